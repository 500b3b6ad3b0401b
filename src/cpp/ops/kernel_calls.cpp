// How often each kernel ran in operators of this process.
#include <atomic>
#include <cstring>

#include "ops/bridge.h"

namespace loraaccel::bridge {
namespace {

constexpr int kMaxKernels = 16;

struct KernelCalls {
  std::atomic<const char*> name{nullptr};
  std::atomic<int64_t> calls{0};
};
KernelCalls calls_of[kMaxKernels];

}  // namespace

void count_kernel(const char* name) {
  for (KernelCalls& entry : calls_of) {
    const char* known = entry.name.load(std::memory_order_acquire);
    if (known == nullptr && entry.name.compare_exchange_strong(known, name)) known = name;
    if (known == name || std::strcmp(known, name) == 0) {
      entry.calls.fetch_add(1, std::memory_order_relaxed);
      return;
    }
  }
}

int kernel_calls(const char** names, int64_t* calls, int capacity) {
  int count = 0;
  for (const KernelCalls& entry : calls_of) {
    const char* name = entry.name.load(std::memory_order_acquire);
    if (name == nullptr || count == capacity) break;
    names[count] = name;
    calls[count] = entry.calls.load(std::memory_order_relaxed);
    ++count;
  }
  return count;
}

}  // namespace loraaccel::bridge
