// Philox4x32-10 and the dropout mask, written from the paper (Salmon et al. 2011, sections 3.2 and 3.3) and from
// Note [Dropout mask], not from the code that they check.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace loraaccel::test {

using Counter = std::array<uint32_t, 4>;
using Key = std::array<uint32_t, 2>;

inline Counter philox4x32_10(Counter counter, Key key) {
  const auto wide = [](uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b; };
  const auto high = [](uint64_t v) { return static_cast<uint32_t>(v >> 32); };
  const auto low = [](uint64_t v) { return static_cast<uint32_t>(v); };
  for (int round = 0; round < 10; ++round) {
    if (round > 0) {  // the Weyl sequence of the keys: golden ratio, sqrt(3) - 1
      key[0] += 0x9E3779B9U;
      key[1] += 0xBB67AE85U;
    }
    const uint64_t left = wide(counter[0], 0xD2511F53U);
    const uint64_t right = wide(counter[2], 0xCD9E8D57U);
    counter = {high(right) ^ counter[1] ^ key[0], low(right), high(left) ^ counter[3] ^ key[1],
               low(left)};
  }
  return counter;
}

inline bool dropout_keeps(double p, uint64_t seed, uint64_t offset, int64_t row, int64_t col) {
  const auto group = static_cast<uint32_t>(col / 64);
  const auto word = static_cast<size_t>(col % 64 / 16);
  const auto lane = static_cast<uint32_t>(col % 16);
  const auto m = static_cast<uint64_t>(row);
  const Counter counter = {16 * group + lane, static_cast<uint32_t>(m),
                           static_cast<uint32_t>(m >> 32), static_cast<uint32_t>(offset)};
  const Key key = {static_cast<uint32_t>(seed),
                   static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32)};
  return philox4x32_10(counter, key)[word] >= std::floor(p * 0x1p32 + 0.5);
}

}  // namespace loraaccel::test
