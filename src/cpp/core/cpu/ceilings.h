#pragma once

#include <cstddef>
#include <cstdint>

// What one core of this machine can do at most: the yardstick of `loraaccel bench`.
namespace loraaccel::cpu {

struct Ceiling {
  double gflops;    // 1e9 operations per second; an FMA is two of them
  const char* isa;  // static string: "baseline", "neon", "avx2", "avx512", "avx512_bf16"
};

// Runs independent fused multiply-adds in registers for about `seconds` on the calling thread and
// returns their rate in GFLOP/s; *isa (may be null) names the instructions.
// Dtypes: "float32"; "bfloat16", where products of bf16 pairs are added in fp32. A CPU without such
// an instruction widens bf16 to fp32, so its ceiling is that of float32, and *isa says so. Matrix
// units (AMX, SME) are not measured. An unknown dtype returns 0 and sets *isa to null. Thread-safe.
double measure_fma_gflops(const char* dtype, double seconds, const char** isa);

// Reads `bytes` of `buffer` `passes` times on the calling thread; returns GB/s (1e9 bytes).
// The buffer should be several times the last-level cache, aligned to 64 bytes, and written once,
// so that its pages exist. Up to 1023 bytes at the end are left out. Returns 0 when there is
// nothing to read. Thread-safe.
double measure_read_gbytes(void* buffer, std::size_t bytes, int passes);

// `run` returns what it computed only so that the work cannot be removed.
struct FmaKernel {
  const char* isa;
  float (*run)(std::int64_t num_steps, float seed);
  int flops_per_step;
};

// What one target contributes.
struct CeilingKernels {
  FmaKernel float32;
  FmaKernel bfloat16;
  std::uint64_t (*read)(const void* buffer, std::size_t bytes);
};

}  // namespace loraaccel::cpu
