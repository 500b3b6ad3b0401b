// AVX2 with FMA and F16C.
#include "losses/simd/loss_simd.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>
#include <cmath>
#include <cstring>

namespace loraaccel {
namespace losses_avx2 {
namespace {

#include "simd/avx2_trait-inl.h"
using V = Avx2;
#include "losses/simd/loss-inl.h"

}  // namespace
}  // namespace losses_avx2

const LossSimd* loss_simd_avx2() { return &losses_avx2::kTable; }

}  // namespace loraaccel

#else

namespace loraaccel {
const LossSimd* loss_simd_avx2() { return nullptr; }
}  // namespace loraaccel

#endif
