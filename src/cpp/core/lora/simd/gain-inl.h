// A factor for each column, one row at a time. Included by simd-inl.h.

template <class T>
void gain_of(const T* z, const float* more, const float* offset, T* y, int64_t n) {
  int64_t j = 0;
  for (; j + V::kLanes <= n; j += V::kLanes) {
    const V::F v = V::load(z + j);
    const V::F from = offset == nullptr ? v : V::add(v, V::load(offset + j));
    V::store(y + j, V::fma(V::load(more + j), from, v));
  }
  if (j < n) {
    const int rest = (int)(n - j);
    const V::F v = V::load_n(z + j, rest);
    const V::F from = offset == nullptr ? v : V::add(v, V::load_n(offset + j, rest));
    V::store_n(y + j, V::fma(V::load_n(more + j, rest), from, v), rest);
  }
}

void gain(DType dtype, const void* z, const float* more, const float* offset, void* y, int64_t n) {
  switch (dtype) {
    case DType::kBFloat16:
      return gain_of(static_cast<const BFloat16*>(z), more, offset, static_cast<BFloat16*>(y), n);
    case DType::kFloat16:
      return gain_of(static_cast<const Float16*>(z), more, offset, static_cast<Float16*>(y), n);
    default:
      return gain_of(static_cast<const float*>(z), more, offset, static_cast<float*>(y), n);
  }
}

template <class T>
void multiply_sums_of(const T* a, const T* b, float* sums, int64_t n) {
  int64_t j = 0;
  for (; j + V::kLanes <= n; j += V::kLanes) {
    const V::F factor = b == nullptr ? V::set1(1.0F) : V::load(b + j);
    V::store(sums + j, V::fma(V::load(a + j), factor, V::load(sums + j)));
  }
  if (j < n) {
    const int rest = (int)(n - j);
    const V::F factor = b == nullptr ? V::set1(1.0F) : V::load_n(b + j, rest);
    V::store_n(sums + j, V::fma(V::load_n(a + j, rest), factor, V::load_n(sums + j, rest)), rest);
  }
}

void multiply_sums(DType dtype, const void* a, const void* b, float* sums, int64_t n) {
  switch (dtype) {
    case DType::kBFloat16:
      return multiply_sums_of(static_cast<const BFloat16*>(a), static_cast<const BFloat16*>(b),
                              sums, n);
    case DType::kFloat16:
      return multiply_sums_of(static_cast<const Float16*>(a), static_cast<const Float16*>(b), sums,
                              n);
    default:
      return multiply_sums_of(static_cast<const float*>(a), static_cast<const float*>(b), sums, n);
  }
}
