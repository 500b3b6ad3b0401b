// Casts from float with AVX2 and F16C.
#include "checkpoint/cast.h"

#if defined(__AVX2__) && defined(__F16C__)

#include <immintrin.h>

#include <cstring>

namespace loraaccel {
namespace cast_avx2_body {
namespace {

void round_to_f16(const float* source, uint16_t* destination, size_t count) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), kNearest);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(destination + i), half);
  }
  for (; i < count; ++i)
    destination[i] =
        static_cast<uint16_t>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(source[i]), kNearest), 0));
}

#include "checkpoint/cast-inl.h"

}  // namespace
}  // namespace cast_avx2_body

CastVariant cast_avx2() { return {"avx2", cast_avx2_body::to_f16, cast_avx2_body::to_bf16}; }

}  // namespace loraaccel

#else

namespace loraaccel {
CastVariant cast_avx2() { return {"avx2", nullptr, nullptr}; }
}  // namespace loraaccel

#endif
