// lora_linear in plain double arithmetic, from the formulas of loraaccel/lora_linear.h. Each result comes with the sum
// of the absolute values of its terms, which is what bounds the rounding error of any order of summation.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "support/operand.h"
#include "support/tolerance.h"

namespace loraaccel::test {

struct OracleAdapter {
  Matrix a, b;
  double scale = 1;
  double p = 0;
  uint64_t seed = 0;
  uint64_t offset = 0;
  // [M, R]: what rank activations are multiplied by, one after the other.
  std::vector<Matrix> gates = {};
};

struct OracleLayer {
  Matrix x, w;
  std::optional<Matrix> bias;  // [N, 1]
  std::vector<OracleAdapter> adapters;
};

// Of each element: the value, and the bound's ingredients. `count` is the number of terms of the longest sum.
struct ExactMatrix {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t count = 0;
  std::vector<Exact> values;

  ExactMatrix() = default;
  ExactMatrix(int64_t r, int64_t c) : rows(r), cols(c), values(static_cast<size_t>(r * c)) {}
  Exact& operator()(int64_t i, int64_t j) { return values[static_cast<size_t>(i * cols + j)]; }
  const Exact& operator()(int64_t i, int64_t j) const {
    return values[static_cast<size_t>(i * cols + j)];
  }
};

struct OracleForward {
  ExactMatrix y, h;
};

struct OracleBackward {
  ExactMatrix dx, dw, dbias;
  std::vector<ExactMatrix> da, db;
};

OracleForward oracle_forward(const OracleLayer& layer);
// `h` is what the backward pass is given: rounded, as a forward pass leaves it.
OracleBackward oracle_backward(const OracleLayer& layer, const Matrix& dy, const Matrix& h);

}  // namespace loraaccel::test
