// AVX-512 F, BW, DQ, VL.
#include "lora/simd/simd.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>
#include <cstring>

#include "random/philox.h"

namespace loraaccel {
namespace avx512 {
namespace {

#include "simd/avx512_trait-inl.h"
using V = Avx512;
#include "lora/simd/simd-inl.h"

}  // namespace
}  // namespace avx512

const LoraSimd* lora_simd_avx512() { return &avx512::kTable; }

}  // namespace loraaccel

#else

namespace loraaccel {
const LoraSimd* lora_simd_avx512() { return nullptr; }
}  // namespace loraaccel

#endif
