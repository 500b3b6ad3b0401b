// NEON with the bf16 instructions: BFDOT adds two products of bfloat16 a lane and step.
#include "lora/simd/simd.h"

#if defined(__ARM_NEON) && defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

#include <arm_neon.h>
#include <cstring>

#include "random/philox.h"

namespace loraaccel {
namespace neon_bf16 {
namespace {

#include "simd/neon_trait-inl.h"

struct V : Neon {
  static constexpr bool kPairs = true;

  // Its sums are rounded to odd, not to nearest, and numbers below 2^-126 count as zero (on CPUs without FEAT_EBF16).
  static F dot_pairs(F a, F b, F c) {
    return vbfdotq_f32(c, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
  }
  static F load_words(const BFloat16* p) { return vreinterpretq_f32_u16(vld1q_u16(&p->bits)); }
  static F pair(F low, F high) {
    return vreinterpretq_f32_u32(
        vsriq_n_u32(vreinterpretq_u32_f32(high), vreinterpretq_u32_f32(low), 16));
  }

  using Neon::store;
  using Neon::store_n;
  // Bit for bit what the arithmetic of the base does, in one instruction.
  static uint16x4_t narrowed(F v) { return vreinterpret_u16_bf16(vcvt_bf16_f32(v)); }
  static void store(BFloat16* p, F v) { vst1_u16(&p->bits, narrowed(v)); }
  static void store_n(BFloat16* p, F v, int n) { store_bits(&p->bits, narrowed(v), n); }
};

#include "lora/simd/simd-inl.h"

}  // namespace
}  // namespace neon_bf16

const LoraSimd* lora_simd_neon_bf16() { return &neon_bf16::kTable; }

}  // namespace loraaccel

#else

namespace loraaccel {
const LoraSimd* lora_simd_neon_bf16() { return nullptr; }
}  // namespace loraaccel

#endif
