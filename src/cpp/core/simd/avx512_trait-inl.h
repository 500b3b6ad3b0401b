// The AVX-512 trait, shared by the units with and without AVX512_BF16: included inside a namespace of each.
// 14 x 32 register tile: 28 accumulators, 2 columns of the panel, 1 broadcast, of 32 registers.

struct Avx512 {
  static constexpr bool kPairs = false;
  static constexpr int kLanes = 16;
  static constexpr int kRows = 14;
  static constexpr int kDotRows = 3;
  static constexpr int kDotCols = 8;
  using F = __m512;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float v) { return _mm512_set1_ps(v); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static float sum(F v) { return _mm512_reduce_add_ps(v); }
  // Eight sums at once: halves are added until each lane of 256 bits holds one.
  static void add_sums(const F* v, float* out) {
    __m256 h[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j)
      h[j] = _mm256_add_ps(_mm512_castps512_ps256(v[j]), _mm512_extractf32x8_ps(v[j], 1));
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(h[0], h[1]), _mm256_hadd_ps(h[2], h[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(h[4], h[5]), _mm256_hadd_ps(h[6], h[7]));
    const __m256 s =
        _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), s));
  }
  static __mmask16 first(int n) { return (__mmask16)((1U << n) - 1U); }

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static void store_n(float* p, F v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }

  static F widen(__m256i bits, BFloat16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static F widen(__m256i bits, Float16) { return _mm512_cvtph_ps(bits); }
  static __m256i narrow(F v, Float16) {
    return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // Round to nearest even by adding half of the last kept bit (less one, plus that bit); NaN keeps its top bits, quiet.
  static __m256i narrow(F v, BFloat16) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
  template <class T>
  static F load(const T* p) {
    return widen(_mm256_loadu_si256((const __m256i*)p), T{});
  }
  template <class T>
  static F load_n(const T* p, int n) {
    return widen(_mm256_maskz_loadu_epi16(first(n), p), T{});
  }
  template <class T>
  static void store(T* p, F v) {
    _mm256_storeu_si256((__m256i*)p, narrow(v, T{}));
  }
  template <class T>
  static void store_n(T* p, F v, int n) {
    _mm256_mask_storeu_epi16(p, first(n), narrow(v, T{}));
  }

  // Two 16 x 16 transposes in four levels of shuffles.
  template <class Load>
  static void transpose_block(const Load& load, float* out) {
    for (int half = 0; half < 2; ++half, out += 16) {
      __m512 r[16];
      __m512 t[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) r[i] = load(16 * half + i, 0);
#pragma GCC unroll 8
      for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 16; i += 4) {
        r[i] = pair_lo(t[i], t[i + 2]);
        r[i + 1] = pair_hi(t[i], t[i + 2]);
        r[i + 2] = pair_lo(t[i + 1], t[i + 3]);
        r[i + 3] = pair_hi(t[i + 1], t[i + 3]);
      }
      // Now r[4 g + c] holds, in each 128-bit lane q, column 4 q + c of rows 4 g .. 4 g + 3.
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const __m512 a = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88);
        const __m512 b = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
        const __m512 d = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xDD);
        const __m512 e = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xDD);
        _mm512_storeu_ps(out + (0 + c) * 32, _mm512_shuffle_f32x4(a, b, 0x88));
        _mm512_storeu_ps(out + (8 + c) * 32, _mm512_shuffle_f32x4(a, b, 0xDD));
        _mm512_storeu_ps(out + (4 + c) * 32, _mm512_shuffle_f32x4(d, e, 0x88));
        _mm512_storeu_ps(out + (12 + c) * 32, _mm512_shuffle_f32x4(d, e, 0xDD));
      }
    }
  }
  static __m512 pair_lo(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  static __m512 pair_hi(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
};
