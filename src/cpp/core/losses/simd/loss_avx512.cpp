// AVX-512 F, BW, DQ, VL.
#include "losses/simd/loss_simd.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>
#include <cmath>
#include <cstring>

namespace loraaccel {
namespace losses_avx512 {
namespace {

#include "simd/avx512_trait-inl.h"
using V = Avx512;
#include "losses/simd/loss-inl.h"

}  // namespace
}  // namespace losses_avx512

const LossSimd* loss_simd_avx512() { return &losses_avx512::kTable; }

}  // namespace loraaccel

#else

namespace loraaccel {
const LossSimd* loss_simd_avx512() { return nullptr; }
}  // namespace loraaccel

#endif
