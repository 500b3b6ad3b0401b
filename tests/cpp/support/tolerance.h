// How far a result may lie from the exact one. Every comparison of numbers in these tests goes through here.
//
//   forward:   |y - ref| <= 4 u |ref| +  8 e sqrt(count) terms
//   backward:  |y - ref| <= 8 u |ref| + 16 e sqrt(count) terms
//
// u is half the spacing of the output's dtype at 1 (the rounding at the store), e that of the sums: float64's where the
// operands are float64, else float32's. `terms` is the sum of the absolute values of what is added up, `count` how many
// there are: rounding errors of a sum are independent of each other, so they grow with the square root of their number.
#pragma once

#include <cmath>
#include <cstdint>

#include "loraaccel/dtype.h"

namespace loraaccel::test {

enum class Pass { kForward, kBackward };

// Half the distance between 1 and the next number.
constexpr double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 0x1p-53;
    case DType::kFloat32:
      return 0x1p-24;
    case DType::kFloat16:
      return 0x1p-11;
    case DType::kBFloat16:
      return 0x1p-8;
  }
  return 0;
}

// Below the normal numbers the spacing stops shrinking: u |ref| says too little there.
constexpr double smallest_step(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 0x1p-1074;
    case DType::kFloat32:
      return 0x1p-149;
    case DType::kFloat16:
      return 0x1p-24;
    case DType::kBFloat16:
      return 0x1p-133;
  }
  return 0;
}

// An exact value and what its error bound is made of.
struct Exact {
  double value = 0;
  double terms = 0;
  // Sum of the absolute values of partial results that were rounded to the output's dtype on the way, as where a
  // borrowed GEMM stores a 16-bit product before the adapters are added. Each is one more rounding of its own size.
  double stored = 0;
};

inline double tolerance(const Exact& exact, Pass pass, DType output, DType sums, int64_t count) {
  const double factor = pass == Pass::kForward ? 4 : 8;
  const double u = unit_roundoff(output);
  return factor * u * std::abs(exact.value) + u * exact.stored +
         2 * factor * unit_roundoff(sums) * std::sqrt(static_cast<double>(count)) * exact.terms +
         smallest_step(output);
}

}  // namespace loraaccel::test
