// Dot products of rows with rows. Included by simd-inl.h.

// How a register's worth of elements of x and a is loaded and multiplied: in floats, or (below) in pairs of bfloat16.
template <class TX, class TA, class Trait>
struct DotStep {
  static constexpr int kElements = V::kLanes;
  static V::F x(const TX* p) { return V::load(p); }
  static V::F a(const TA* p) { return V::load(p); }
  static V::F x_n(const TX* p, int n) { return V::load_n(p, n); }
  static V::F a_n(const TA* p, int n) { return V::load_n(p, n); }
  static V::F step(const V::F& a, const V::F& b, const V::F& c) { return V::fma(a, b, c); }
};
template <class Trait>
  requires(Trait::kPairs)
struct DotStep<BFloat16, BFloat16, Trait> {
  static constexpr int kElements = 2 * V::kLanes;
  static V::F x(const BFloat16* p) { return Trait::load_words(p); }
  static V::F a(const BFloat16* p) { return Trait::load_words(p); }
  static V::F x_n(const BFloat16* p, int n) {
    alignas(64) BFloat16 buffer[kElements] = {};
    memcpy(buffer, p, (size_t)n * sizeof(BFloat16));
    return Trait::load_words(buffer);
  }
  static V::F a_n(const BFloat16* p, int n) { return x_n(p, n); }
  static V::F step(const V::F& a, const V::F& b, const V::F& c) {
    return Trait::dot_pairs(a, b, c);
  }
};

// Dot products of MX rows of x with NA rows of a, both along k.
template <int MX, int NA, class TX, class TA, class Trait = V>
void dot_tile(const TX* x, int64_t x_stride, const TA* a, int64_t a_stride, float scale, float* out,
              int64_t out_stride, int64_t k) {
  using Step = DotStep<TX, TA, V>;
  float total[MX][NA];
  for (int i = 0; i < MX; ++i) {
    for (int j = 0; j < NA; ++j) total[i][j] = 0;
  }
  // A lane adds up every kLanes-th product, so its sums are short; a block is longer than kSumBlock by that factor.
  constexpr int64_t kBlock = kSumBlock * Step::kElements;
  for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
    const int64_t end = k - k0 < kBlock ? k : k0 + kBlock;
    V::F acc[MX][NA];
#pragma GCC unroll 8
    for (int i = 0; i < MX; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < NA; ++j) acc[i][j] = V::zero();
    }
    int64_t kk = k0;
    for (; kk + Step::kElements <= end; kk += Step::kElements) {
      V::F xv[MX];
#pragma GCC unroll 8
      for (int i = 0; i < MX; ++i) xv[i] = Step::x(x + i * x_stride + kk);
#pragma GCC unroll 8
      for (int j = 0; j < NA; ++j) {
        const V::F av = Step::a(a + j * a_stride + kk);
#pragma GCC unroll 8
        for (int i = 0; i < MX; ++i) acc[i][j] = Step::step(xv[i], av, acc[i][j]);
      }
    }
    if (kk < end) {
      const int n = (int)(end - kk);
      V::F xv[MX];
#pragma GCC unroll 8
      for (int i = 0; i < MX; ++i) xv[i] = Step::x_n(x + i * x_stride + kk, n);
#pragma GCC unroll 8
      for (int j = 0; j < NA; ++j) {
        const V::F av = Step::a_n(a + j * a_stride + kk, n);
#pragma GCC unroll 8
        for (int i = 0; i < MX; ++i) acc[i][j] = Step::step(xv[i], av, acc[i][j]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MX; ++i) {
      if constexpr (NA == 8) {
        Trait::add_sums(acc[i], total[i]);
      } else {
#pragma GCC unroll 8
        for (int j = 0; j < NA; ++j) total[i][j] += V::sum(acc[i][j]);
      }
    }
  }
  for (int i = 0; i < MX; ++i) {
    for (int j = 0; j < NA; ++j) out[i * out_stride + j] = scale * total[i][j];
  }
}

// Rows of a outermost: a group of them stays in the first caches while every row of x passes.
template <int NA, class TX, class TA>
void dot_columns(const TX* x, int64_t x_stride, const TA* a, int64_t a_stride, float scale,
                 float* out, int64_t out_stride, int64_t m, int64_t k) {
  int64_t i = 0;
  for (; i + V::kDotRows <= m; i += V::kDotRows) {
    dot_tile<V::kDotRows, NA>(x + i * x_stride, x_stride, a, a_stride, scale, out + i * out_stride,
                              out_stride, k);
  }
  for (; i < m; ++i) {
    dot_tile<1, NA>(x + i * x_stride, x_stride, a, a_stride, scale, out + i * out_stride,
                    out_stride, k);
  }
}

template <class TX, class TA>
void dot_of(const void* xv, int64_t x_stride, const void* av, int64_t a_stride, float scale,
            float* out, int64_t out_stride, int64_t m, int64_t r, int64_t k) {
  const TX* x = static_cast<const TX*>(xv);
  const TA* a = static_cast<const TA*>(av);
  int64_t j = 0;
  for (; j + V::kDotCols <= r; j += V::kDotCols) {
    dot_columns<V::kDotCols>(x, x_stride, a + j * a_stride, a_stride, scale, out + j, out_stride, m,
                             k);
  }
  for (; j < r; ++j) {
    dot_columns<1>(x, x_stride, a + j * a_stride, a_stride, scale, out + j, out_stride, m, k);
  }
}

void dot(DType x_dtype, const void* x, int64_t x_stride, DType a_dtype, const void* a,
         int64_t a_stride, float scale, float* out, int64_t out_stride, int64_t m, int64_t r,
         int64_t k) {
  const bool floats = a_dtype == DType::kFloat32;
  switch (x_dtype) {
    case DType::kBFloat16:
      if (floats)
        return dot_of<BFloat16, float>(x, x_stride, a, a_stride, scale, out, out_stride, m, r, k);
      return dot_of<BFloat16, BFloat16>(x, x_stride, a, a_stride, scale, out, out_stride, m, r, k);
    case DType::kFloat16:
      if (floats)
        return dot_of<Float16, float>(x, x_stride, a, a_stride, scale, out, out_stride, m, r, k);
      return dot_of<Float16, Float16>(x, x_stride, a, a_stride, scale, out, out_stride, m, r, k);
    default:
      return dot_of<float, float>(x, x_stride, a, a_stride, scale, out, out_stride, m, r, k);
  }
}
