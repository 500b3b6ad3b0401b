#include "cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

#include "loraaccel/exec_context.h"
#include "support/env.h"

namespace loraaccel::test {
namespace {

template <class F>
void parallel(int num_threads, int64_t count, const F& f) {
  pool_parallel(
      num_threads, count, [](void* arg, int64_t i) { (*static_cast<const F*>(arg))(i); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

// How often each index ran.
std::vector<int> visits(int num_threads, int64_t count) {
  std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
  parallel(num_threads, count, [&](int64_t i) { ++seen[static_cast<size_t>(i)]; });
  return {seen.begin(), seen.end()};
}

bool once_each(const std::vector<int>& seen) {
  return std::ranges::all_of(seen, [](int n) { return n == 1; });
}

TEST(ThreadPool, EveryIndexRunsOnce) {
  for (int threads = 1; threads <= 8; ++threads) {
    for (const int64_t count : {0, 1, 2, 3, 7, 8, 9, 100, 1000}) {
      EXPECT_TRUE(once_each(visits(threads, count))) << threads << " threads, " << count;
    }
  }
}

TEST(ThreadPool, ManyShortJobs) {
  for (int i = 0; i < 5000; ++i) {
    ASSERT_TRUE(once_each(visits(2 + i % 7, 1 + i % 5))) << "job " << i;
  }
}

TEST(ThreadPool, NoMoreThreadsThanAskedFor) {
  std::ignore = visits(8, 64);  // the pool has seven workers
  std::mutex mutex;
  std::set<std::thread::id> ids;
  parallel(3, 50, [&](int64_t) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::lock_guard<std::mutex> lock(mutex);
    ids.insert(std::this_thread::get_id());
  });
  EXPECT_LE(ids.size(), 3U);
  EXPECT_GE(ids.size(), 1U);
}

TEST(ThreadPool, WorkersHelp) {
  // Two indices that wait for each other: with one thread this would never end.
  std::atomic<int> arrived{0};
  parallel(2, 2, [&](int64_t) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
}

TEST(ThreadPool, NestedCallsRunOnTheirThread) {
  std::vector<std::atomic<int>> seen(6 * 10);
  std::atomic<int> elsewhere{0};
  parallel(4, 6, [&](int64_t i) {
    const std::thread::id outer = std::this_thread::get_id();
    parallel(4, 10, [&](int64_t j) {
      elsewhere += std::this_thread::get_id() != outer;
      ++seen[static_cast<size_t>(10 * i + j)];
    });
  });
  EXPECT_EQ(elsewhere, 0);
  EXPECT_TRUE(std::ranges::all_of(seen, [](const auto& n) { return n == 1; }));
  EXPECT_TRUE(once_each(visits(4, 20))) << "the pool still works afterwards";
}

TEST(ThreadPool, CallersAtOnceTakeTurns) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&wrong, c] {
      for (int i = 0; i < 200; ++i) wrong += !once_each(visits(1 + c % 4, 5 + i % 20));
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadPool, SizeFollowsTheSetting) {
  const ScopedEnv none("LORAACCEL_NUM_THREADS", nullptr);
  set_num_threads(0);
  EXPECT_EQ(requested_num_threads(), 0);
  EXPECT_EQ(num_threads(), num_usable_cpus());
  EXPECT_GE(num_usable_cpus(), 1);
  {
    const ScopedEnv env("LORAACCEL_NUM_THREADS", "3");
    EXPECT_EQ(requested_num_threads(), 3);
    EXPECT_EQ(num_threads(), 3);
    set_num_threads(5);  // the program wins over the environment
    EXPECT_EQ(num_threads(), 5);
    EXPECT_EQ(default_context().num_threads, 5);
    set_num_threads(0);
    EXPECT_EQ(num_threads(), 3);
  }
  for (const char* nonsense : {"", "0", "-2", "many"}) {
    const ScopedEnv env("LORAACCEL_NUM_THREADS", nonsense);
    EXPECT_EQ(requested_num_threads(), 0) << '"' << nonsense << '"';
  }
}

// Runs f in a forked child; true when it returned true within the time limit.
template <class F>
bool succeeds_in_child(const F& f) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a deadlock ends the child by SIGALRM
    _exit(f() ? 0 : 1);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

TEST(ThreadPool, ChildOfAForkHasAPoolOfItsOwn) {
  EXPECT_TRUE(once_each(visits(4, 100)));
  EXPECT_TRUE(succeeds_in_child([] { return once_each(visits(4, 100)); }));
  EXPECT_TRUE(succeeds_in_child([] {  // and a child of the child
    return once_each(visits(2, 10)) && succeeds_in_child([] { return once_each(visits(4, 100)); });
  }));
  EXPECT_TRUE(once_each(visits(4, 100))) << "the parent's pool is as it was";
}

// The locks of the pool are held by a thread that the child does not have.
TEST(ThreadPool, ForkWhileAnotherThreadWorks) {
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) std::ignore = visits(3, 50);
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(succeeds_in_child([] { return once_each(visits(4, 100)); }));
  }
  stop = true;
  busy.join();
}

TEST(ThreadPool, ForkInsideABody) {
  std::atomic<int> failures{0};
  parallel(2, 2, [&](int64_t) {
    failures += !succeeds_in_child([] { return once_each(visits(4, 100)); });
  });
  EXPECT_EQ(failures, 0);
}

TEST(DefaultContext, LendsAlignedMemoryAndThreads) {
  const ExecContext ctx = default_context();
  for (const size_t bytes : {1U, 63U, 64U, 1000U}) {
    void* p = ctx.allocate(ctx.host, bytes);
    ASSERT_NE(p, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 64, 0U);
    ctx.deallocate(ctx.host, p, bytes);
  }
  std::atomic<int64_t> sum{0};
  ctx.parallel(
      ctx.host, 100, [](void* arg, int64_t i) { *static_cast<std::atomic<int64_t>*>(arg) += i; },
      &sum);
  EXPECT_EQ(sum, 4950);
  EXPECT_EQ(ctx.gemm, nullptr);
}

// More memory than there is: null, not an exception.
TEST(DefaultContext, NoMemoryIsNull) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they end the process
  const ExecContext ctx = default_context();
  EXPECT_EQ(ctx.allocate(ctx.host, size_t{1} << 62), nullptr);
#else
  GTEST_SKIP() << "the sanitizers report requests of this size themselves";
#endif
}

}  // namespace
}  // namespace loraaccel::test
