#include "loraaccel/exec_context.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "cpu/thread_pool.h"

namespace loraaccel {
namespace {

constexpr std::align_val_t kAlignment{64};

std::atomic<int> threads_wanted{0};

void own_parallel(void*, int64_t count, ParallelBody body, void* arg) {
  pool_parallel(num_threads(), count, body, arg);
}

void* own_allocate(void*, size_t bytes) { return ::operator new(bytes, kAlignment, std::nothrow); }

void own_deallocate(void*, void* pointer, size_t) { ::operator delete(pointer, kAlignment); }

}  // namespace

void set_num_threads(int num_threads) { threads_wanted.store(std::clamp(num_threads, 0, 1024)); }

int requested_num_threads() {
  const int wanted = threads_wanted.load();
  return wanted > 0 ? wanted : num_threads_from_environment();
}

int num_threads() {
  const int wanted = requested_num_threads();
  return wanted > 0 ? wanted : num_usable_cpus();
}

ExecContext default_context() {
  ExecContext ctx;
  ctx.num_threads = num_threads();
  ctx.parallel = own_parallel;
  ctx.allocate = own_allocate;
  ctx.deallocate = own_deallocate;
  return ctx;
}

}  // namespace loraaccel
