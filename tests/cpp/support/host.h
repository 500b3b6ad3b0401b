// A host for the core under test: counts and poisons scratch memory, fails on request, lends a GEMM of plain loops.
#pragma once

#include <atomic>
#include <cstdint>

#include "loraaccel/exec_context.h"

namespace loraaccel::test {

class TestHost {
 public:
  TestHost() = default;
  TestHost(const TestHost&) = delete;
  TestHost& operator=(const TestHost&) = delete;

  // Runs the indices of a parallel call one after the other, the last first: whatever depends on their order shows.
  // `num_threads` is what the core believes it has.
  ExecContext context(int num_threads = 1);
  // The same with the GEMM of this host.
  ExecContext lending_context(int num_threads = 1);

  const char* kernel_ran = nullptr;

  // The allocation with this number, counted from 0, returns null; -1: none does.
  int64_t fail_allocation = -1;
  int64_t num_allocations() const { return allocations_; }
  int64_t live_bytes() const { return live_bytes_; }
  // False after a write behind the end of a block, or a deallocation with another size than was allocated.
  bool blocks_intact() const { return intact_; }

  // The product with this number, counted from 0, reports a failure; -1: none does.
  int64_t fail_gemm = -1;
  int64_t num_gemms() const { return gemms_; }

 private:
  static void* allocate(void* host, size_t bytes);
  static void deallocate(void* host, void* pointer, size_t bytes);
  static Status gemm(void* host, const GemmArgs& args);

  std::atomic<int64_t> allocations_{0};
  std::atomic<int64_t> live_bytes_{0};
  std::atomic<bool> intact_{true};
  std::atomic<int64_t> gemms_{0};
};

}  // namespace loraaccel::test
