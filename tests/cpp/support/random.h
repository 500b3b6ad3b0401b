// Numbers that are the same on every machine, unlike those of <random>'s distributions.
#pragma once

#include <cstdint>
#include <span>

namespace loraaccel::test {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  // SplitMix64: a counter through a mixing function.
  uint64_t bits() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  }
  // In [0, count).
  int64_t below(int64_t count) {
    return static_cast<int64_t>(bits() % static_cast<uint64_t>(count));
  }
  // In [-1, 1).
  double real() { return static_cast<double>(bits() >> 11) * 0x1p-52 - 1; }
  template <class T>
  T pick(std::span<const T> choices) {
    return choices[static_cast<size_t>(below(static_cast<int64_t>(choices.size())))];
  }

 private:
  uint64_t state_;
};

}  // namespace loraaccel::test
