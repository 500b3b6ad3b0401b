// The AVX2 trait (with FMA and F16C): included inside a namespace of each unit that uses it.
// 6 x 16 register tile: 12 accumulators, 2 columns of the panel, 1 broadcast, of 16 registers.

struct Avx2 {
  static constexpr bool kPairs = false;
  static constexpr int kLanes = 8;
  static constexpr int kRows = 6;
  static constexpr int kDotRows = 3;
  static constexpr int kDotCols = 4;
  using F = __m256;

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float v) { return _mm256_set1_ps(v); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static float sum(F v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load_n(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static void store_n(float* p, F v, int n) { _mm256_maskstore_ps(p, first(n), v); }

  static F widen(__m128i bits, BFloat16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static F widen(__m128i bits, Float16) { return _mm256_cvtph_ps(bits); }
  static __m128i narrow(F v, Float16) {
    return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // Round to nearest even by adding half of the last kept bit (less one, plus that bit); NaN keeps its top bits, quiet.
  static __m128i narrow(F v, BFloat16) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
  template <class T>
  static F load(const T* p) {
    return widen(_mm_loadu_si128((const __m128i*)p), T{});
  }
  template <class T>
  static F load_n(const T* p, int n) {
    T buffer[kLanes] = {};
    for (int i = 0; i < n; ++i) buffer[i] = p[i];
    return load(buffer);
  }
  template <class T>
  static void store(T* p, F v) {
    _mm_storeu_si128((__m128i*)p, narrow(v, T{}));
  }
  template <class T>
  static void store_n(T* p, F v, int n) {
    T buffer[kLanes];
    store(buffer, v);
    for (int i = 0; i < n; ++i) p[i] = buffer[i];
  }

  // Four 8 x 8 transposes in three levels of shuffles.
  template <class Load>
  static void transpose_block(const Load& load, float* out) {
    for (int n = 0; n < 16; n += 8) {
      for (int k = 0; k < 16; k += 8) transpose_8x8(load, n, k, out + k * 16 + n);
    }
  }
  template <class Load>
  static void transpose_8x8(const Load& load, int n, int k, float* out) {
    __m256 r[8];
    __m256 t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = load(n + i, k);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
      r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      _mm256_storeu_ps(out + c * 16, _mm256_permute2f128_ps(r[c], r[4 + c], 0x20));
      _mm256_storeu_ps(out + (4 + c) * 16, _mm256_permute2f128_ps(r[c], r[4 + c], 0x31));
    }
  }
};
