// The core's own threads, for programs that bring none.
#pragma once

#include <cstdint>

#include "loraaccel/exec_context.h"

namespace loraaccel {

// LORAACCEL_NUM_THREADS where it is a positive number, else 0.
int num_threads_from_environment();
// The CPUs in this process's affinity mask, at least 1.
int num_usable_cpus();

// Runs body(arg, i) for i in [0, count) on up to `num_threads` threads, the caller's included.
// A call from inside a body runs its work on the calling thread. Threads start at first use and sleep between
// calls; concurrent callers take turns. After fork the child has none of them and starts its own.
void pool_parallel(int num_threads, int64_t count, ParallelBody body, void* arg);

}  // namespace loraaccel
