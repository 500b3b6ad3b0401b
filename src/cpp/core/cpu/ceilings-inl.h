// Body of the ceiling probes, compiled once per target. No include guard: the including file
// defines LORAACCEL_TARGET (the namespace) and is compiled with that target's flags.
#ifndef LORAACCEL_TARGET
#error "define LORAACCEL_TARGET before including ceilings-inl.h"
#endif

#include "cpu/ceilings.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace loraaccel::cpu::LORAACCEL_TARGET {

// A trait per vector type. kNumAccumulators covers latency x issue width (4 cycles x 2 on current
// x86, 6 x 2 for the bf16 dot product) and leaves two registers for the factors: 14 of 16 on AVX2,
// fewer than 32 elsewhere.
#if defined(__AVX512F__)
struct Float32 {
  using Vec = __m512;
  static constexpr const char* kIsa = "avx512";
  static constexpr int kNumAccumulators = 24;
  static constexpr int kFlops = 32;
  static Vec set(float value) { return _mm512_set1_ps(value); }
  static Vec factor(float value) { return set(value); }
  static Vec multiply_add(Vec acc, Vec a, Vec b) { return _mm512_fmadd_ps(a, b, acc); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static float first(Vec value) { return _mm512_cvtss_f32(value); }
};
#elif defined(__AVX2__)
struct Float32 {
  using Vec = __m256;
  static constexpr const char* kIsa = "avx2";
  static constexpr int kNumAccumulators = 14;
  static constexpr int kFlops = 16;
  static Vec set(float value) { return _mm256_set1_ps(value); }
  static Vec factor(float value) { return set(value); }
  static Vec multiply_add(Vec acc, Vec a, Vec b) { return _mm256_fmadd_ps(a, b, acc); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static float first(Vec value) { return _mm256_cvtss_f32(value); }
};
#elif defined(__aarch64__)
struct Float32 {
  using Vec = float32x4_t;
  static constexpr const char* kIsa = "neon";
  static constexpr int kNumAccumulators = 24;  // 4 cycles x 4 pipes on the large cores
  static constexpr int kFlops = 8;
  static Vec set(float value) { return vdupq_n_f32(value); }
  static Vec factor(float value) { return set(value); }
  static Vec multiply_add(Vec acc, Vec a, Vec b) { return vfmaq_f32(acc, a, b); }
  static Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
  static float first(Vec value) { return vgetq_lane_f32(value, 0); }
};
#else
struct Float32 {
  using Vec = float;
  static constexpr const char* kIsa = "baseline";
  static constexpr int kNumAccumulators = 12;
  static constexpr int kFlops = 2;
  static Vec set(float value) { return value; }
  static Vec factor(float value) { return value; }
  static Vec multiply_add(Vec acc, Vec a, Vec b) { return a * b + acc; }
  static Vec add(Vec a, Vec b) { return a + b; }
  static float first(Vec value) { return value; }
};
#endif

#if defined(__AVX512BF16__)
struct Bfloat16 : Float32 {
  using Factor = __m512bh;
  static constexpr const char* kIsa = "avx512_bf16";
  static constexpr int kFlops = 64;
  static Factor factor(float value) { return _mm512_cvtne2ps_pbh(set(value), set(value)); }
  static Vec multiply_add(Vec acc, Factor a, Factor b) { return _mm512_dpbf16_ps(acc, a, b); }
};
#else
using Bfloat16 = Float32;  // widened
#endif

template <class Trait>
float run_fma(std::int64_t num_steps, float seed) {
  constexpr int kNum = Trait::kNumAccumulators;
  typename Trait::Vec acc[kNum];
  // Unequal, so that no two are one to the compiler.
  for (int i = 0; i < kNum; ++i) acc[i] = Trait::set(seed + static_cast<float>(i));
  const auto a = Trait::factor(seed);
  const auto b = Trait::factor(seed * 0.5F);
  for (std::int64_t step = 0; step < num_steps; ++step) {
#if defined(__clang__)
#pragma clang loop unroll(full)
#else
#pragma GCC unroll 32
#endif
    for (int i = 0; i < kNum; ++i) {
      acc[i] = Trait::multiply_add(acc[i], a, b);
    }
  }
  auto sum = acc[0];
  for (int i = 1; i < kNum; ++i) sum = Trait::add(sum, acc[i]);
  return Trait::first(sum);
}

static std::uint64_t read_all(const void* buffer, std::size_t bytes) {
  constexpr std::size_t kWords = 128;  // 1 KiB per step: several cache lines in flight
  const auto* words = static_cast<const std::uint64_t*>(buffer);
  std::uint64_t lanes[kWords / 4] = {};
  for (std::size_t at = 0; at + kWords <= bytes / sizeof(std::uint64_t); at += kWords) {
    for (std::size_t quarter = 0; quarter < kWords; quarter += kWords / 4) {
      for (std::size_t i = 0; i < kWords / 4; ++i) lanes[i] ^= words[at + quarter + i];
    }
  }
  std::uint64_t result = 0;
  for (const std::uint64_t lane : lanes) result ^= lane;
  return result;
}

extern const CeilingKernels kCeilingKernels;
// NOLINTNEXTLINE(misc-definitions-in-headers): each including file has its own namespace
const CeilingKernels kCeilingKernels = {
    {Float32::kIsa, &run_fma<Float32>, Float32::kNumAccumulators * Float32::kFlops},
    {Bfloat16::kIsa, &run_fma<Bfloat16>, Bfloat16::kNumAccumulators * Bfloat16::kFlops},
    &read_all,
};

}  // namespace loraaccel::cpu::LORAACCEL_TARGET
