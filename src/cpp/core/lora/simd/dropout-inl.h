// Dropout masks by Philox, applied to rows; see Note [Dropout mask]. Included by simd-inl.h.

// The factors (0 or 1 / (1 - p)) of 64 neighbouring columns of one row; see Note [Dropout mask].
// Sixteen counters at a time in plain arrays: the compiler turns each inner loop into vector code of this unit's CPU.
inline void dropout_factors(const DropoutBlock& b, int64_t row, int64_t group, uint64_t threshold,
                            float keep_scale, float* factors) {
  if (threshold == 0 || threshold > 0xFFFFFFFFU) {  // everything is kept, or nothing
    for (int l = 0; l < 64; ++l) factors[l] = threshold == 0 ? keep_scale : 0;
    return;
  }
  uint32_t c0[16], c1[16], c2[16], c3[16];
  for (int l = 0; l < 16; ++l) {
    c0[l] = (uint32_t)(16 * group) + (uint32_t)l;
    c1[l] = (uint32_t)row;
    c2[l] = (uint32_t)((uint64_t)row >> 32);
    c3[l] = (uint32_t)b.offset;
  }
  uint32_t k0 = (uint32_t)b.seed;
  uint32_t k1 = (uint32_t)(b.seed >> 32) ^ (uint32_t)(b.offset >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int l = 0; l < 16; ++l) {
      const uint64_t p0 = (uint64_t)0xD2511F53U * c0[l];
      const uint64_t p1 = (uint64_t)0xCD9E8D57U * c2[l];
      c0[l] = (uint32_t)(p1 >> 32) ^ c1[l] ^ k0;
      c1[l] = (uint32_t)p1;
      c2[l] = (uint32_t)(p0 >> 32) ^ c3[l] ^ k1;
      c3[l] = (uint32_t)p0;
    }
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  const uint32_t t = (uint32_t)threshold;
  for (int l = 0; l < 16; ++l) {
    factors[l] = c0[l] >= t ? keep_scale : 0;
    factors[16 + l] = c1[l] >= t ? keep_scale : 0;
    factors[32 + l] = c2[l] >= t ? keep_scale : 0;
    factors[48 + l] = c3[l] >= t ? keep_scale : 0;
  }
}

template <class T>
void dropout_of(const T* x, int64_t x_stride, const DropoutBlock& b, float* out,
                int64_t out_stride) {
  const uint64_t threshold = dropout_threshold(b.p);
  const float keep_scale = dropout_keep_scale(b.p);
  alignas(64) float factors[kDropoutGroup];
  for (int64_t i = 0; i < b.rows; ++i, x += x_stride, out += out_stride) {
    for (int64_t j = 0; j < b.cols; j += kDropoutGroup) {
      dropout_factors(b, b.row0 + i, (b.col0 + j) / kDropoutGroup, threshold, keep_scale, factors);
      int64_t n = b.cols - j < kDropoutGroup ? b.cols - j : kDropoutGroup;
      int64_t l = 0;
      for (; l + V::kLanes <= n; l += V::kLanes) {
        V::store(out + j + l, V::mul(V::load(factors + l), V::load(x + j + l)));
      }
      if (l < n) {
        const int rest = (int)(n - l);
        V::store_n(out + j + l, V::mul(V::load_n(factors + l, rest), V::load_n(x + j + l, rest)),
                   rest);
      }
    }
  }
}

void dropout(DType x_dtype, const void* x, int64_t x_stride, const DropoutBlock& b, float* out,
             int64_t out_stride) {
  switch (x_dtype) {
    case DType::kBFloat16:
      return dropout_of(static_cast<const BFloat16*>(x), x_stride, b, out, out_stride);
    case DType::kFloat16:
      return dropout_of(static_cast<const Float16*>(x), x_stride, b, out, out_stride);
    default:
      return dropout_of(static_cast<const float*>(x), x_stride, b, out, out_stride);
  }
}

template <class T>
void dropout_add_of(const float* t, int64_t t_stride, const DropoutBlock& b, T* c,
                    int64_t c_stride) {
  const uint64_t threshold = dropout_threshold(b.p);
  const float keep_scale = dropout_keep_scale(b.p);
  alignas(64) float factors[kDropoutGroup];
  for (int64_t i = 0; i < b.rows; ++i, t += t_stride, c += c_stride) {
    for (int64_t j = 0; j < b.cols; j += kDropoutGroup) {
      dropout_factors(b, b.row0 + i, (b.col0 + j) / kDropoutGroup, threshold, keep_scale, factors);
      int64_t n = b.cols - j < kDropoutGroup ? b.cols - j : kDropoutGroup;
      int64_t l = 0;
      for (; l + V::kLanes <= n; l += V::kLanes) {
        const V::F d = V::mul(V::load(factors + l), V::load(t + j + l));
        V::store(c + j + l, V::add(V::load(c + j + l), d));
      }
      if (l < n) {
        const int rest = (int)(n - l);
        const V::F d = V::mul(V::load_n(factors + l, rest), V::load_n(t + j + l, rest));
        V::store_n(c + j + l, V::add(V::load_n(c + j + l, rest), d), rest);
      }
    }
  }
}

void dropout_add(const float* t, int64_t t_stride, const DropoutBlock& b, DType c_dtype, void* c,
                 int64_t c_stride) {
  switch (c_dtype) {
    case DType::kBFloat16:
      return dropout_add_of(t, t_stride, b, static_cast<BFloat16*>(c), c_stride);
    case DType::kFloat16:
      return dropout_add_of(t, t_stride, b, static_cast<Float16*>(c), c_stride);
    default:
      return dropout_add_of(t, t_stride, b, static_cast<float*>(c), c_stride);
  }
}
