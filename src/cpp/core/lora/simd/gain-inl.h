// A factor for each column, one row at a time. Included by simd-inl.h.

template <class T>
void gain_of(const GainRow& row) {
  const T* z = static_cast<const T*>(row.z);
  T* y = static_cast<T*>(row.y);
  const auto part = [&](int64_t j, const auto& load, const auto& store) {
    const V::F v = load(z + j);
    const V::F from = row.offset == nullptr ? v : V::add(v, load(row.offset + j));
    V::F sum = row.add == nullptr ? V::zero() : load(row.add + j);
    if (row.keep) sum = V::add(sum, v);
    store(y + j, V::fma(load(row.gain + j), from, sum));
  };
  int64_t j = 0;
  for (; j + V::kLanes <= row.count; j += V::kLanes) {
    part(
        j, [](const auto* p) { return V::load(p); },
        [](auto* p, const V::F& v) { V::store(p, v); });
  }
  if (j < row.count) {
    const int n = (int)(row.count - j);
    part(
        j, [n](const auto* p) { return V::load_n(p, n); },
        [n](auto* p, const V::F& v) { V::store_n(p, v, n); });
  }
}

void gain(const GainRow& row) {
  switch (row.dtype) {
    case DType::kBFloat16:
      return gain_of<BFloat16>(row);
    case DType::kFloat16:
      return gain_of<Float16>(row);
    default:
      return gain_of<float>(row);
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
