// For any CPU.
#include "losses/simd/loss_simd.h"

#include <cmath>
#include <cstring>

#include "half.h"

namespace loraaccel {
namespace losses_portable {
namespace {

#include "simd/portable_trait-inl.h"
using V = Portable;
#include "losses/simd/loss-inl.h"

}  // namespace
}  // namespace losses_portable

const LossSimd* loss_simd_portable() { return &losses_portable::kTable; }

}  // namespace loraaccel
