// The inner loops with AVX2. Weights of 24 bits are two factors of 16: sums of 32 bits wrap around, so that
// 256 sum(high p) + sum(low p) is sum(weight p) bit for bit.
#include "images/image_kernels.h"

#if defined(__AVX2__)

#include <immintrin.h>

#include <cstring>

namespace loraaccel {
namespace image_avx2_body {
namespace {

const char* unavailable() { return nullptr; }

inline uint8_t clip(int32_t sum) {
  const int32_t v = sum >> 22;
  return static_cast<uint8_t>(v < 0 ? 0 : v > 255 ? 255 : v);
}

// Four pixels in 16 bytes as pairs of 16 bits: taps 0 and 1 in the lower half, 2 and 3 in the upper one.
inline __m256i pair_mask(int channels) {
  alignas(32) uint8_t mask[32];
  for (int half = 0; half < 2; ++half) {
    for (int c = 0; c < 4; ++c) {
      for (int tap = 0; tap < 2; ++tap) {
        const int byte = (half * 2 + tap) * channels + c;
        mask[half * 16 + c * 4 + tap * 2] = static_cast<uint8_t>(c < channels ? byte : 0x80);
        mask[half * 16 + c * 4 + tap * 2 + 1] = 0x80;
      }
    }
  }
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(mask));
}

// The pair of weights of each half, four times, from four highs and four lows.
inline __m256i weight_mask(int offset) {
  alignas(32) uint8_t mask[32];
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 16; ++i)
      mask[half * 16 + i] = static_cast<uint8_t>(offset + half * 4 + i % 4);
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(mask));
}

inline __m256i broadcast(const void* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}

template <int kRows>
void filter_pixels(const FixedTapsView& taps, int channels, const uint8_t* const* in,
                   uint8_t* const* out) {
  const __m256i pairs = pair_mask(channels);
  const __m256i highs = weight_mask(0);
  const __m256i lows = weight_mask(8);
  const int64_t outputs = taps.outputs;
  const int64_t groups = taps.stride / 4;
  for (int64_t x = 0; x < outputs; ++x) {
    const int16_t* parts = taps.parts + x * taps.stride * 2;
    const int64_t begin = taps.first[x] * channels;
    __m256i high[kRows];
    __m256i low[kRows];
    for (int y = 0; y < kRows; ++y) high[y] = low[y] = _mm256_setzero_si256();
    const int64_t used = (taps.count[x] + 3) / 4;
    for (int64_t g = 0; g < (used < groups ? used : groups); ++g) {
      const __m256i both = broadcast(parts + g * 8);
      const __m256i h = _mm256_shuffle_epi8(both, highs);
      const __m256i l = _mm256_shuffle_epi8(both, lows);
      for (int y = 0; y < kRows; ++y) {
        const __m256i p = _mm256_shuffle_epi8(broadcast(in[y] + begin + g * 4 * channels), pairs);
        high[y] = _mm256_add_epi32(high[y], _mm256_madd_epi16(p, h));
        low[y] = _mm256_add_epi32(low[y], _mm256_madd_epi16(p, l));
      }
    }
    for (int y = 0; y < kRows; ++y) {
      const __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(high[y], 8), low[y]);
      __m128i v = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
      v = _mm_srai_epi32(_mm_add_epi32(v, _mm_set1_epi32(1 << 21)), 22);
      v = _mm_packs_epi32(v, v);
      v = _mm_packus_epi16(v, v);
      const int bytes = _mm_cvtsi128_si32(v);
      std::memcpy(out[y] + x * channels, &bytes, sizeof bytes);
    }
  }
}

void filter_columns(const FixedTapsView& taps, int channels, const uint8_t* const* in, int num_rows,
                    uint8_t* const* out) {
  if (channels >= 3 && num_rows == kRowGroup) {
    filter_pixels<kRowGroup>(taps, channels, in, out);
    return;
  }
  for (int y = 0; y < num_rows; ++y) {
    if (channels >= 3) {
      filter_pixels<1>(taps, channels, in + y, out + y);
      continue;
    }
    const int64_t outputs = taps.outputs;
    for (int64_t x = 0; x < outputs; ++x) {
      const int32_t* weights = taps.weights + x * taps.stride;
      const uint8_t* pixels = in[y] + taps.first[x];
      int32_t sum = 1 << 21;
      const int64_t count = taps.count[x];
      for (int64_t j = 0; j < count; ++j) sum += weights[j] * pixels[j];
      out[y][x] = clip(sum);
    }
  }
}

void filter_rows(const int32_t* weights, int64_t count_taps, const uint8_t* const* in,
                 int64_t count, uint8_t* out) {
  const __m256i zero = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    __m256i high[4] = {zero, zero, zero, zero};
    __m256i low[4] = {zero, zero, zero, zero};
    for (int64_t j = 0; j < count_taps; j += 2) {
      const int32_t w0 = weights[j];
      const bool single = j + 1 == count_taps;
      const int32_t w1 = single ? 0 : weights[j + 1];
      const __m256i h = _mm256_set1_epi32((w1 >> 8) * 65536 | ((w0 >> 8) & 0xFFFF));
      const __m256i l = _mm256_set1_epi32((w1 & 255) << 16 | (w0 & 255));
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in[j] + i));
      const __m256i b =
          single ? zero : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in[j + 1] + i));
      const __m256i lower = _mm256_unpacklo_epi8(a, b);
      const __m256i upper = _mm256_unpackhi_epi8(a, b);
      const __m256i p[4] = {_mm256_unpacklo_epi8(lower, zero), _mm256_unpackhi_epi8(lower, zero),
                            _mm256_unpacklo_epi8(upper, zero), _mm256_unpackhi_epi8(upper, zero)};
      for (int k = 0; k < 4; ++k) {
        high[k] = _mm256_add_epi32(high[k], _mm256_madd_epi16(p[k], h));
        low[k] = _mm256_add_epi32(low[k], _mm256_madd_epi16(p[k], l));
      }
    }
    __m256i v[4];
    for (int k = 0; k < 4; ++k) {
      v[k] = _mm256_add_epi32(_mm256_slli_epi32(high[k], 8), low[k]);
      v[k] = _mm256_srai_epi32(_mm256_add_epi32(v[k], _mm256_set1_epi32(1 << 21)), 22);
    }
    const __m256i result =
        _mm256_packus_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), result);
  }
  for (; i < count; ++i) {
    int32_t sum = 1 << 21;
    for (int64_t j = 0; j < count_taps; ++j) sum += weights[j] * in[j][i];
    out[i] = clip(sum);
  }
}

inline __m128i load_pixel(const uint8_t* p) {
  int32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return _mm_cvtsi32_si128(bytes);
}

// Two rows at a time, one in each half. Weights that pad add +0 to sums that are not negative: nothing.
void area_pixels(const FloatTapsView& taps, int channels, const uint8_t* first,
                 const uint8_t* second, float* first_out, float* second_out) {
  const int64_t outputs = taps.outputs;
  for (int64_t x = 0; x < outputs; ++x) {
    const float* weights = taps.weights + x * taps.stride;
    const int64_t begin = taps.first[x] * channels;
    __m256 sum = _mm256_setzero_ps();
    const int64_t count = taps.count[x];
    for (int64_t j = 0; j < count; ++j) {
      const __m128i both = _mm_unpacklo_epi32(load_pixel(first + begin + j * channels),
                                              load_pixel(second + begin + j * channels));
      const __m256 p = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(both));
      sum = _mm256_add_ps(sum, _mm256_mul_ps(_mm256_set1_ps(weights[j]), p));
    }
    _mm_storeu_ps(first_out + x * channels, _mm256_castps256_ps128(sum));
    _mm_storeu_ps(second_out + x * channels, _mm256_extractf128_ps(sum, 1));
  }
}

void area_columns(const FloatTapsView& taps, int channels, const uint8_t* const* in, int num_rows,
                  float* const* out) {
  if (channels >= 3) {
    const int last = num_rows - 1;
    area_pixels(taps, channels, in[0], in[last], out[0], out[last]);
    return;
  }
  const int64_t outputs = taps.outputs;
  for (int y = 0; y < num_rows; ++y) {
    for (int64_t x = 0; x < outputs; ++x) {
      const float* weights = taps.weights + x * taps.stride;
      const uint8_t* pixels = in[y] + taps.first[x];
      float sum = 0;
      const int64_t count = taps.count[x];
      for (int64_t j = 0; j < count; ++j) {
        const float product = weights[j] * static_cast<float>(pixels[j]);
        sum += product;
      }
      out[y][x] = sum;
    }
  }
}

void area_add(float weight, const float* in, int64_t count, bool first, float* sum) {
  if (first) {
    for (int64_t i = 0; i < count; ++i) sum[i] = weight * in[i];
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float product = weight * in[i];
    sum[i] += product;
  }
}

void area_store(const float* sum, int64_t count, uint8_t* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i v = _mm256_cvtps_epi32(_mm256_loadu_ps(sum + i));
    __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    half = _mm_packus_epi16(half, half);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), half);
  }
  for (; i < count; ++i) {
    const int v = _mm_cvtss_si32(_mm_load_ss(sum + i));
    out[i] = static_cast<uint8_t>(v < 0 ? 0 : v > 255 ? 255 : v);
  }
}

}  // namespace
}  // namespace image_avx2_body

ImageKernel image_kernel_avx2() {
  namespace body = image_avx2_body;
  return {"avx2",
          body::unavailable,
          body::filter_columns,
          body::filter_rows,
          body::area_columns,
          body::area_add,
          body::area_store};
}

}  // namespace loraaccel

#else

namespace loraaccel {
ImageKernel image_kernel_avx2() { return {}; }
}  // namespace loraaccel

#endif
