// Everything that the core borrows from its host: threads, memory, a stream, optionally a GEMM.
#pragma once

#include <cstddef>
#include <cstdint>

#include "loraaccel/status.h"
#include "loraaccel/tensor_view.h"

namespace loraaccel {

// c = alpha * a b + beta * c, or alpha * a b + bias where bias is defined (then beta is ignored).
// a [M, K], b [K, N], c [M, N], bias [N]; one dtype; any strides. With beta 0, c is only written.
struct GemmArgs {
  TensorView a, b, c, bias;
  double alpha = 1;
  double beta = 0;
};

// body(arg, i) for one i.
using ParallelBody = void (*)(void* arg, int64_t index);

// Plain data, cheap to copy; what it points to must outlive the call. `host` is handed back to every function.
// All functions may be called from several threads at once and must not throw.
struct ExecContext {
  DeviceType device = DeviceType::kCPU;
  void* stream = nullptr;  // cudaStream_t on CUDA, unused on the CPU
  void* host = nullptr;

  // Threads to use at once, at least 1: the core hands parallel() at most so many parts.
  int num_threads = 1;
  // Runs body(arg, i) once for each i in [0, count), in any order, and returns when all are done. Required, as are
  // allocate and deallocate: an ExecContext{} is refused, default_context() has them all.
  void (*parallel)(void* host, int64_t count, ParallelBody body, void* arg) = nullptr;

  // Memory aligned to 64 bytes, uninitialised; null when there is none.
  void* (*allocate)(void* host, size_t bytes) = nullptr;
  void (*deallocate)(void* host, void* pointer, size_t bytes) = nullptr;

  // A matrix product of the host's, or null. The kernels named `torch` run only where there is one.
  Status (*gemm)(void* host, const GemmArgs& args) = nullptr;

  // Where the name of the kernel that ran is stored, or null.
  const char** kernel_ran = nullptr;
};

// A context over the core's own thread pool and aligned operator new. The pool starts at the first parallel call;
// its size is set_num_threads(), else LORAACCEL_NUM_THREADS, else the CPUs that the process may run on.
// It survives fork: a child starts a pool of its own.
ExecContext default_context();

// Sets the size of the core's own pool; 0 (or less) returns to the default. Takes effect at the next call.
void set_num_threads(int num_threads);
int num_threads();
// What set_num_threads() or LORAACCEL_NUM_THREADS asked for; 0 where neither did. A host with threads of its own uses at
// most that many of them for loraaccel.
int requested_num_threads();

}  // namespace loraaccel
