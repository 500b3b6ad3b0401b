#include "cpu/ceilings.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "cpu/cpu_features.h"

// The build's own target: what every CPU of this architecture has (SSE2, NEON).
#define LORAACCEL_TARGET baseline
#include "cpu/ceilings-inl.h"

namespace loraaccel::cpu {

#if defined(__x86_64__)
namespace avx2 {
extern const CeilingKernels kCeilingKernels;
}
namespace avx512 {
extern const CeilingKernels kCeilingKernels;
}
namespace avx512_bf16 {
extern const CeilingKernels kCeilingKernels;
}
#endif

namespace {

using Clock = std::chrono::steady_clock;

const CeilingKernels& best_kernels() {
#if defined(__x86_64__)
  const CpuFeatures& features = cpu_features_detected();
  if (features.avx512_bf16) return avx512_bf16::kCeilingKernels;
  if (features.avx512) return avx512::kCeilingKernels;
  if (features.avx2) return avx2::kCeilingKernels;
#endif
  return baseline::kCeilingKernels;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A store to a volatile is a side effect, so the value must have been computed.
template <class T>
void consume(T value) {
  [[maybe_unused]] volatile T sink = value;
}

Ceiling time_fma(const FmaKernel& kernel, double seconds) {
  constexpr std::int64_t kBlockSteps = 20000;  // some 50 us: the clock is read seldom
  constexpr float kSeed = 1e-3F;               // small: sums stay finite
  consume(kernel.run(kBlockSteps, kSeed));     // wakes the vector units
  std::int64_t num_steps = 0;
  double elapsed_seconds = 0;
  const auto start = Clock::now();
  do {
    consume(kernel.run(kBlockSteps, kSeed));
    num_steps += kBlockSteps;
    elapsed_seconds = seconds_since(start);
  } while (elapsed_seconds < seconds);
  const double flops = static_cast<double>(num_steps) * kernel.flops_per_step;
  return {flops / elapsed_seconds * 1e-9, kernel.isa};
}

}  // namespace

double measure_fma_gflops(const char* dtype, double seconds, const char** isa) {
  const CeilingKernels& kernels = best_kernels();
  Ceiling ceiling = {0, nullptr};
  if (std::strcmp(dtype, "float32") == 0) ceiling = time_fma(kernels.float32, seconds);
  if (std::strcmp(dtype, "bfloat16") == 0) ceiling = time_fma(kernels.bfloat16, seconds);
  if (isa != nullptr) *isa = ceiling.isa;
  return ceiling.gflops;
}

double measure_read_gbytes(void* buffer, std::size_t bytes, int passes) {
  constexpr std::size_t kStepBytes = 1024;
  const std::size_t read_bytes = bytes / kStepBytes * kStepBytes;
  if (read_bytes == 0 || passes < 1) return 0;
  const CeilingKernels& kernels = best_kernels();
  const auto start = Clock::now();
  for (int pass = 0; pass < passes; ++pass) consume(kernels.read(buffer, read_bytes));
  const double elapsed_seconds = std::max(seconds_since(start), 1e-9);
  return static_cast<double>(read_bytes) * passes / elapsed_seconds * 1e-9;
}

}  // namespace loraaccel::cpu
