// Lists of independent pieces of work, of any sizes, done in one go.
#pragma once

#include <atomic>
#include <functional>
#include <span>

#include "scratch.h"

namespace loraaccel {

struct Tasks {
  int64_t count = 0;
  std::function<void(int64_t)> run;  // run(i) for i in [0, count); at once and in any order
};

// Every task of every list. Threads take the next one as they become free: handing work to threads twice costs more
// than one of these lists does.
inline void run_tasks(const ExecContext& ctx, std::span<const Tasks> lists) {
  int64_t total = 0;
  for (const Tasks& tasks : lists) total += tasks.count;
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t) {
    for (int64_t i = next++; i < total; i = next++) {
      int64_t index = i;
      for (const Tasks& tasks : lists) {
        if (index < tasks.count) {
          tasks.run(index);
          break;
        }
        index -= tasks.count;
      }
    }
  };
  parallel_for(ctx, total < ctx.num_threads ? total : ctx.num_threads, work);
}

}  // namespace loraaccel
