// NEON of 64-bit Arm, which every such CPU has; float16 is converted only, so no optional instruction is needed.
#include "lora/simd/simd.h"

#if defined(__ARM_NEON) && defined(__aarch64__)

#include <arm_neon.h>
#include <cstring>

#include "random/philox.h"

namespace loraaccel {
namespace neon {
namespace {

#include "simd/neon_trait-inl.h"
using V = Neon;
#include "lora/simd/simd-inl.h"

}  // namespace
}  // namespace neon

const LoraSimd* lora_simd_neon() { return &neon::kTable; }

}  // namespace loraaccel

#else

namespace loraaccel {
const LoraSimd* lora_simd_neon() { return nullptr; }
}  // namespace loraaccel

#endif
