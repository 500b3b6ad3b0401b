// SHA-256 with the SHA extensions of x86.
#include "checkpoint/sha256.h"

#if defined(__SHA__) && defined(__SSE4_1__)

#include <immintrin.h>

namespace loraaccel {
namespace {

void ni_blocks(uint32_t* state, const uint8_t* data, size_t count) {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  auto* words = reinterpret_cast<__m128i*>(state);
  const auto* rounds = reinterpret_cast<const __m128i*>(kSha256Rounds);
  // The instructions keep the eight words as (a b e f) and (c d g h), highest lane first.
  const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1);
  const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(badc, hgfe, 8);
  __m128i cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);
  for (; count > 0; --count, data += 64) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      __m128i& next = w[i % 4];
      if (i < 4) {
        const auto* block = reinterpret_cast<const __m128i*>(data) + i;
        next = _mm_shuffle_epi8(_mm_loadu_si128(block), big_endian);
      } else {
        const __m128i one = w[(i + 3) % 4];  // the four words before
        const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(next, w[(i + 1) % 4]),
                                          _mm_alignr_epi8(one, w[(i + 2) % 4], 4));
        next = _mm_sha256msg2_epu32(sum, one);
      }
      const __m128i k = _mm_add_epi32(next, _mm_load_si128(rounds + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, k);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(k, 0x0E));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

}  // namespace

Sha256Blocks sha256_ni_blocks() { return ni_blocks; }

}  // namespace loraaccel

#else

namespace loraaccel {
Sha256Blocks sha256_ni_blocks() { return nullptr; }
}  // namespace loraaccel

#endif
