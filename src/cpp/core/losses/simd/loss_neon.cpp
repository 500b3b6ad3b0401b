// NEON of 64-bit Arm.
#include "losses/simd/loss_simd.h"

#if defined(__ARM_NEON) && defined(__aarch64__)

#include <arm_neon.h>
#include <cmath>
#include <cstring>

namespace loraaccel {
namespace losses_neon {
namespace {

#include "simd/neon_trait-inl.h"
using V = Neon;
#include "losses/simd/loss-inl.h"

}  // namespace
}  // namespace losses_neon

const LossSimd* loss_simd_neon() { return &losses_neon::kTable; }

}  // namespace loraaccel

#else

namespace loraaccel {
const LossSimd* loss_simd_neon() { return nullptr; }
}  // namespace loraaccel

#endif
