// Bodies of the casts from float, compiled once for each instruction set: the including file has defined
// `round_to_f16(source, destination, count)` in its own namespace, which this file is included in.
//
// The loops have no branches, so that compilers turn them into vector code.

inline uint32_t bits_of(float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  return bits;
}

// Elements whose magnitude is in (0, zero_end], which round to zero; and in [infinity_begin, infinity).
inline void count_losses(const float* source, size_t count, uint32_t zero_end,
                         uint32_t infinity_begin, CastCounts* counts) {
  uint32_t zeros = 0;
  uint32_t infinities = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t magnitude = bits_of(source[i]) & 0x7FFFFFFFU;
    zeros += static_cast<uint32_t>(magnitude - 1 < zero_end);
    infinities += static_cast<uint32_t>(magnitude - infinity_begin < 0x7F800000U - infinity_begin);
  }
  counts->zeros += zeros;
  counts->infinities += infinities;
}

inline void to_f16(const float* source, uint16_t* destination, size_t count, CastCounts* counts) {
  round_to_f16(source, destination, count);
  // 2^-25 is half of the smallest number, a tie that goes to zero; 65520 is the tie that goes to infinity.
  count_losses(source, count, 0x33000000U, 0x477FF000U, counts);
}

inline void to_bf16(const float* source, uint16_t* destination, size_t count, CastCounts* counts) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(source[i]);
    const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40U;
    destination[i] = static_cast<uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? quiet : rounded);
  }
  count_losses(source, count, 0x8000U, 0x7F7F8000U, counts);
}
