// AVX2 with FMA and F16C.
#include "lora/simd/simd.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>
#include <cstring>

#include "random/philox.h"

namespace loraaccel {
namespace avx2 {
namespace {

#include "simd/avx2_trait-inl.h"
using V = Avx2;
#include "lora/simd/simd-inl.h"

}  // namespace
}  // namespace avx2

const LoraSimd* lora_simd_avx2() { return &avx2::kTable; }

}  // namespace loraaccel

#else

namespace loraaccel {
const LoraSimd* lora_simd_avx2() { return nullptr; }
}  // namespace loraaccel

#endif
