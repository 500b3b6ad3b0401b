// Panels of pixels for convolutions. Included by simd-inl.h.

// Term k of every pixel, kWidth of them.
template <class T>
LORAACCEL_INLINE void gather_row(const PixelSource& s, int64_t k, T* out) {
  const PixelPlace& place = s.places[k % s.count];
  const T* channel = static_cast<const T*>(s.image) + k / s.count * s.channel;
  if (place.full && place.count == 1) {
    memcpy(out, channel + place.runs[0].from, kWidth * sizeof(T));
    return;
  }
  if (!place.full) memset(out, 0, kWidth * sizeof(T));
  for (int r = 0; r < place.count; ++r) {
    const PixelRun& run = place.runs[r];
    const T* from = channel + run.from;
    T* to = out + run.to;
    int i = 0;
    for (; i + 8 <= run.count; i += 8) memcpy(to + i, from + i, 8 * sizeof(T));
    for (; i < run.count; ++i) to[i] = from[i];
  }
}

template <class T>
void gather_floats(const PixelSource& s, float* panel) {
  for (int64_t k = s.begin; k < s.begin + s.depth; ++k, panel += kWidth) {
    if constexpr (sizeof(T) == sizeof(float)) {
      gather_row<T>(s, k, panel);
    } else {
      T row[kWidth];
      gather_row<T>(s, k, row);
      V::store(panel, V::load(row));
      V::store(panel + V::kLanes, V::load(row + V::kLanes));
    }
  }
}

void gather_pairs(const PixelSource& s, uint32_t* panel) {
  alignas(64) uint16_t low[kWidth];
  alignas(64) uint16_t high[kWidth];
  const int64_t end = s.begin + s.depth;
  for (int64_t k = s.begin; k < end; k += 2, panel += kWidth) {
    gather_row<uint16_t>(s, k, low);
    if (k + 1 < end)
      gather_row<uint16_t>(s, k + 1, high);
    else
      memset(high, 0, sizeof high);
    for (int j = 0; j < kWidth; ++j) panel[j] = low[j] | (uint32_t)high[j] << 16;
  }
}

void gather(const PixelSource& source, bool pairs, void* panel) {
  if (pairs) return gather_pairs(source, static_cast<uint32_t*>(panel));
  float* floats = static_cast<float*>(panel);
  switch (source.dtype) {
    case DType::kBFloat16:
      return gather_floats<BFloat16>(source, floats);
    case DType::kFloat16:
      return gather_floats<Float16>(source, floats);
    default:
      return gather_floats<float>(source, floats);
  }
}
