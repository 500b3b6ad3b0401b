// NEON with the bf16 instructions: BFDOT adds two products of bfloat16 a lane and step.
#include "lora/simd/simd.h"

#if defined(__ARM_NEON) && defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

#include <arm_neon.h>
#include <string.h>

#include "random/philox.h"

namespace loraaccel {
namespace neon_bf16 {
namespace {

#include "lora/simd/neon_trait-inl.h"

struct V : Neon {
  static constexpr bool kPairs = true;

  // (Each addition rounds to odd on CPUs without FEAT_EBF16, and what is below 2^-126 counts as zero.)
  static F dot_pairs(F a, F b, F c) {
    return vbfdotq_f32(c, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
  }
  static F load_words(const BFloat16* p) { return vreinterpretq_f32_u16(vld1q_u16(&p->bits)); }
  static F pair(F low, F high) {
    return vreinterpretq_f32_u32(
        vsriq_n_u32(vreinterpretq_u32_f32(high), vreinterpretq_u32_f32(low), 16));
  }
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
