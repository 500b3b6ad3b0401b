#include "cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif
#ifndef _WIN32
#include <pthread.h>
#endif

namespace loraaccel {
namespace {

thread_local bool inside_body = false;

// One job at a time; workers pick indices from a shared counter.
class Pool {
 public:
  void run(int num_threads, int64_t count, ParallelBody body, void* arg) {
    std::lock_guard<std::mutex> turn(turn_);
    start_workers(std::min<int64_t>(num_threads, count) - 1);
    const int helpers = static_cast<int>(std::min<int64_t>(
        static_cast<int64_t>(workers_.size()), std::min<int64_t>(num_threads, count) - 1));
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = body;
      arg_ = arg;
      count_ = count;
      next_.store(0, std::memory_order_relaxed);
      seats_ = helpers;
      running_ = helpers;
      ++job_;
    }
    wake_.notify_all();
    work(body, arg, count);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void start_workers(int64_t wanted) {
    while (static_cast<int64_t>(workers_.size()) < wanted) {
      try {
        workers_.emplace_back([this] { worker(); });
      } catch (const std::exception&) {
        return;  // the system gives no more threads, or no memory: the ones there are do the work
      }
      workers_.back().detach();
    }
  }

  void work(ParallelBody body, void* arg, int64_t count) {
    inside_body = true;
    for (int64_t i = next_.fetch_add(1); i < count; i = next_.fetch_add(1)) body(arg, i);
    inside_body = false;
  }

  void worker() {
    uint64_t seen = 0;
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return job_ != seen; });
      seen = job_;
      if (seats_ == 0) continue;
      --seats_;
      const ParallelBody body = body_;
      void* const arg = arg_;
      const int64_t count = count_;
      lock.unlock();
      work(body, arg, count);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex turn_;  // held by the caller whose job runs
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  std::atomic<int64_t> next_{0};
  ParallelBody body_ = nullptr;
  void* arg_ = nullptr;
  int64_t count_ = 0;
  int seats_ = 0;    // helpers that the current job still takes
  int running_ = 0;  // helpers that have not finished it
  uint64_t job_ = 0;
};

// Never destroyed: detached workers may outlive static destructors.
std::atomic<Pool*> current_pool{nullptr};

#ifndef _WIN32
// The child has the parent's memory but only one thread: the old pool, its locks included, is left behind.
void forget_pool_in_child() {
  current_pool.store(nullptr);
  inside_body = false;
}
#endif

// Null where there is no memory for one.
Pool* pool() {
  Pool* p = current_pool.load(std::memory_order_acquire);
  if (p != nullptr) return p;
#ifndef _WIN32
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
  (void)registered;
#endif
  auto* fresh = new (std::nothrow) Pool;
  if (fresh == nullptr) return nullptr;
  if (current_pool.compare_exchange_strong(p, fresh)) return fresh;
  delete fresh;
  return p;
}

}  // namespace

int num_threads_from_environment() {
  if (const char* text = std::getenv("LORAACCEL_NUM_THREADS")) {
    const long n = std::strtol(text, nullptr, 10);
    if (n > 0) return static_cast<int>(std::min(n, 1024L));
  }
  return 0;
}

int num_usable_cpus() {
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

void pool_parallel(int num_threads, int64_t count, ParallelBody body, void* arg) {
  Pool* const workers = num_threads <= 1 || count <= 1 || inside_body ? nullptr : pool();
  if (workers == nullptr) {
    for (int64_t i = 0; i < count; ++i) body(arg, i);
    return;
  }
  workers->run(num_threads, count, body, arg);
}

}  // namespace loraaccel
