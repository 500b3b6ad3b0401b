// Matrices and vectors in memory, laid out in every way that a view allows, with guards around and between them.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "half.h"
#include "loraaccel/tensor_view.h"

namespace loraaccel::test {

enum class Layout {
  kDense,
  kPadded,      // rows further apart than they are long
  kTransposed,  // neighbours along a column
  kStepped,     // gaps between columns too
  kReversed,    // both strides negative
  kMisaligned,  // dense, one element past an aligned address
  kOneRow,      // every row is the same memory (expand()); inputs only
  kOneColumn,   // every column is; inputs only
};
constexpr Layout kOutputLayouts[] = {Layout::kDense,   Layout::kPadded,   Layout::kTransposed,
                                     Layout::kStepped, Layout::kReversed, Layout::kMisaligned};
constexpr Layout kInputLayouts[] = {Layout::kDense,   Layout::kPadded,   Layout::kTransposed,
                                    Layout::kStepped, Layout::kReversed, Layout::kMisaligned,
                                    Layout::kOneRow,  Layout::kOneColumn};
const char* layout_name(Layout layout);

// Values in double, row by row.
struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<double> values;

  Matrix() = default;
  Matrix(int64_t r, int64_t c) : rows(r), cols(c), values(static_cast<size_t>(r * c)) {}
  double& operator()(int64_t i, int64_t j) { return values[static_cast<size_t>(i * cols + j)]; }
  double operator()(int64_t i, int64_t j) const {
    return values[static_cast<size_t>(i * cols + j)];
  }
};

// Owns the memory behind a view. Every byte that is no element of it is 0xFF: a NaN for whoever reads it as a number
// of any type, and easy to see when it was written.
class Operand {
 public:
  // Undefined, as an argument that is left out.
  Operand() = default;
  // [rows, cols] of NaN: an output before it is computed.
  static Operand output(DType dtype, int64_t rows, int64_t cols, Layout layout = Layout::kDense);
  // [rows, cols] of what `value` returns, rounded to dtype.
  static Operand matrix(DType dtype, int64_t rows, int64_t cols, Layout layout,
                        const std::function<double()>& value);
  // [size]; the layouts of two dimensions count as kDense.
  static Operand vector_output(DType dtype, int64_t size, Layout layout = Layout::kDense);
  static Operand vector(DType dtype, int64_t size, Layout layout,
                        const std::function<double()>& value);

  Operand(Operand&&) = default;
  Operand& operator=(Operand&&) = default;

  const TensorView& view() const { return view_; }
  double at(int64_t i, int64_t j = 0) const;
  Matrix read() const;  // a vector as one column

  // Nothing was written since the operand was made.
  bool untouched() const { return bytes_ == before_; }
  // Nothing was written but elements.
  bool guards_intact() const;
  // The elements in logical order, for bitwise comparison.
  std::vector<char> element_bytes() const;

 private:
  void allocate(DType dtype, int8_t ndim, int64_t rows, int64_t cols, Layout layout);
  void fill(const std::function<double()>& value);
  char* element(int64_t i, int64_t j) const;

  TensorView view_;
  std::vector<char> bytes_, before_;
};

}  // namespace loraaccel::test
