// AVX-512 with AVX512_BF16: two products of bfloat16 a lane and step.
#include "lora/simd/simd.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__AVX512BF16__)

#include <immintrin.h>
#include <cstring>

#include "random/philox.h"

namespace loraaccel {
namespace avx512_bf16 {
namespace {

#include "simd/avx512_trait-inl.h"

struct V : Avx512 {
  static constexpr bool kPairs = true;

  static F dot_pairs(F a, F b, F c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
  using Avx512::store;
  using Avx512::store_n;
  // The instruction rounds as the base's code does, except that it makes zeros of subnormal numbers.
  static __m256i narrowed(F v) {
    constexpr int kSubnormal = 0x20;
    if (__builtin_expect(_mm512_fpclass_ps_mask(v, kSubnormal) != 0, 0))
      return Avx512::narrow(v, BFloat16{});
    return (__m256i)_mm512_cvtneps_pbh(v);
  }
  static void store(BFloat16* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(v));
  }
  static void store_n(BFloat16* p, F v, int n) {
    _mm256_mask_storeu_epi16(p, first(n), narrowed(v));
  }

  static F load_words(const BFloat16* p) {
    return _mm512_loadu_ps(reinterpret_cast<const float*>(p));
  }
  static F pair(F low, F high) {
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16),
                                               _mm512_castps_si512(high)));
  }
};

#include "lora/simd/simd-inl.h"

}  // namespace
}  // namespace avx512_bf16

const LoraSimd* lora_simd_avx512_bf16() { return &avx512_bf16::kTable; }

}  // namespace loraaccel

#else

namespace loraaccel {
const LoraSimd* lora_simd_avx512_bf16() { return nullptr; }
}  // namespace loraaccel

#endif
