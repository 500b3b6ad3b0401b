// Packing of panels. Included by simd-inl.h.

// The rows of a panel are far apart: the hardware sees no stream that it could read ahead. How far we do, in blocks of a
// transposition (a cache line of floats of each row), and in rows.
constexpr int64_t kBlocksAhead = 4;
constexpr int64_t kRowsAhead = 16;

// What lies `bytes` behind p is wanted soon; it may be outside the tensor (an address, not an access).
LORAACCEL_INLINE void want(const void* p, int64_t bytes) {
  __builtin_prefetch(
      reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + (uintptr_t)bytes));
}

// The part of a row that fills one row of a panel, so many rows ahead.
template <class T>
LORAACCEL_INLINE void want_row(const T* row, int64_t stride, int64_t rows) {
  const auto bytes = rows * stride * (int64_t)sizeof(T);
  for (int64_t b = 0; b < kWidth * (int64_t)sizeof(T); b += 64) want(row, bytes + b);
}

template <class T>
void pack_rows(const PanelSource& s, float* panel) {
  const T* r = static_cast<const T*>(s.data);
  for (int64_t k = 0; k < s.depth; ++k, r += s.stride, panel += kWidth) {
    want_row(r, s.stride, kRowsAhead);
    V::F v[2];
    load_two(r, s.count, v);
    store_two(panel, kWidth, v);
  }
}

// Blocks of 16 words of `width` columns by the trait's transposition, edges by plain loops.
// Word(n, k): one word; load(n, k): kLanes words from k on. `data`, `stride` and `word_bytes`: where the words lie, in bytes.
template <class Word, class Load>
LORAACCEL_INLINE void pack_transposed(int count, int64_t words, const void* data, int64_t stride,
                                      int64_t word_bytes, float* panel, const Word& word,
                                      const Load& load) {
  constexpr int kStep = 16;
  for (int64_t k0 = 0; k0 < words; k0 += kStep, panel += kStep * kWidth) {
    if (words - k0 >= kStep && count == kWidth) {
      for (int n = 0; n < kWidth; ++n)
        want(data, n * stride + (k0 + kBlocksAhead * kStep) * word_bytes);
      V::transpose_block([&](int n, int k) { return load(n, k0 + k); }, panel);
      continue;
    }
    const int steps = (int)(words - k0 < kStep ? words - k0 : kStep);
    for (int k = 0; k < steps; ++k) {
      for (int n = 0; n < count; ++n) panel[k * kWidth + n] = word(n, k0 + k);
      for (int n = count; n < kWidth; ++n) panel[k * kWidth + n] = 0;
    }
  }
}

template <class T>
void pack_floats(const PanelSource& s, float* panel) {
  if (!s.transposed) return pack_rows<T>(s, panel);
  const T* w = static_cast<const T*>(s.data);
  pack_transposed(
      s.count, s.depth, w, s.stride * (int64_t)sizeof(T), sizeof(T), panel,
      [&](int n, int64_t k) {
        const V::F v = V::load_n(w + n * s.stride + k, 1);
        float f[V::kLanes];
        V::store(f, v);
        return f[0];
      },
      [&](int n, int64_t k) { return V::load(w + n * s.stride + k); });
}

// Words are moved as floats whose bits nobody looks at.
template <class Trait>
void pack_pairs(const PanelSource& s, float* panel) {
  if constexpr (Trait::kPairs) {
    const BFloat16* w = static_cast<const BFloat16*>(s.data);
    if (s.transposed) {
      const auto word = [&](int n, int64_t k) {
        uint16_t halves[2] = {0, 0};  // the second half of the last word of an odd depth
        memcpy(halves, w + n * s.stride + 2 * k, sizeof(BFloat16) * (2 * k + 1 < s.depth ? 2 : 1));
        float f;
        memcpy(&f, halves, sizeof f);
        return f;
      };
      const auto load = [&](int n, int64_t k) {
        return Trait::load_words(w + n * s.stride + 2 * k);
      };
      pack_transposed(s.count, s.depth / 2, w, s.stride * (int64_t)sizeof(BFloat16),
                      2 * sizeof(BFloat16), panel, word, load);
      if (s.depth % 2 != 0) {
        panel += s.depth / 2 * kWidth;
        for (int n = 0; n < kWidth; ++n) panel[n] = n < s.count ? word(n, s.depth / 2) : 0;
      }
      return;
    }
    for (int64_t k = 0; k < s.depth; k += 2, w += 2 * s.stride, panel += kWidth) {
      want_row(w, s.stride, kRowsAhead);
      want_row(w, s.stride, kRowsAhead + 1);
      V::F low[2];
      V::F high[2] = {V::zero(), V::zero()};
      load_two(w, s.count, low);
      if (k + 1 < s.depth) load_two(w + s.stride, s.count, high);
      const V::F words[2] = {Trait::pair(low[0], high[0]), Trait::pair(low[1], high[1])};
      store_two(panel, kWidth, words);
    }
  }
}

void pack(const PanelSource& s, bool pairs, void* panel) {
  float* out = static_cast<float*>(panel);
  if (pairs) return pack_pairs<V>(s, out);
  switch (s.dtype) {
    case DType::kBFloat16:
      return pack_floats<BFloat16>(s, out);
    case DType::kFloat16:
      return pack_floats<Float16>(s, out);
    default:
      return pack_floats<float>(s, out);
  }
}
