#include "support/operand.h"

#include <algorithm>

namespace loraaccel::test {
namespace {

// Wider than any vector register, so that a kernel that runs over an end is seen; and wide enough for the outputs that
// the tests of overlaps put here on purpose.
constexpr int64_t kGuardBytes = 1024;

}  // namespace

const char* layout_name(Layout layout) {
  switch (layout) {
    case Layout::kDense:
      return "dense";
    case Layout::kPadded:
      return "padded";
    case Layout::kTransposed:
      return "transposed";
    case Layout::kStepped:
      return "stepped";
    case Layout::kReversed:
      return "reversed";
    case Layout::kMisaligned:
      return "misaligned";
    case Layout::kOneRow:
      return "one row";
    case Layout::kOneColumn:
      return "one column";
  }
  return "?";
}

void Operand::allocate(DType dtype, int8_t ndim, int64_t rows, int64_t cols, Layout layout) {
  int64_t row = cols;
  int64_t col = 1;
  int64_t first = 0;  // elements from the lowest address to element (0, 0)
  switch (layout) {
    case Layout::kPadded:
      row = cols + 3;
      break;
    case Layout::kTransposed:
      row = 1;
      col = rows + 1;
      break;
    case Layout::kStepped:
      row = 2 * cols + 5;
      col = 2;
      break;
    case Layout::kReversed:
      row = -(cols + 2);
      col = -1;
      first = std::max<int64_t>(rows - 1, 0) * (cols + 2) + std::max<int64_t>(cols - 1, 0);
      break;
    case Layout::kOneRow:
      row = 0;
      break;
    case Layout::kOneColumn:
      row = 1;
      col = 0;
      break;
    case Layout::kDense:
    case Layout::kMisaligned:
      break;
  }
  const auto size = static_cast<int64_t>(dtype_size_bytes(dtype));
  int64_t last = first;  // elements from the lowest address to the highest element
  if (rows > 0 && cols > 0) {
    last += std::max<int64_t>(row, 0) * (rows - 1) + std::max<int64_t>(col, 0) * (cols - 1);
  }
  bytes_.assign(static_cast<size_t>(2 * kGuardBytes + 64 + (last + 2) * size), '\xFF');
  auto start = reinterpret_cast<uintptr_t>(bytes_.data()) + kGuardBytes;
  start = (start + 63) / 64 * 64;
  if (layout == Layout::kMisaligned) start += static_cast<uintptr_t>(size);
  char* origin = bytes_.data() + (start - reinterpret_cast<uintptr_t>(bytes_.data()));
  view_ = TensorView::strided(origin + first * size, dtype, rows, cols, row, col);
  view_.ndim = ndim;
  before_ = bytes_;
}

Operand Operand::output(DType dtype, int64_t rows, int64_t cols, Layout layout) {
  Operand o;
  o.allocate(dtype, 2, rows, cols, layout);
  return o;
}

Operand Operand::matrix(DType dtype, int64_t rows, int64_t cols, Layout layout,
                        const std::function<double()>& value) {
  Operand o = output(dtype, rows, cols, layout);
  o.fill(value);
  return o;
}

// A column of a matrix of one column, so that the row stride is the distance between the elements.
Operand Operand::vector_output(DType dtype, int64_t size, Layout layout) {
  const bool expanded = layout == Layout::kOneRow || layout == Layout::kOneColumn;
  Operand o;
  o.allocate(dtype, 1, size, 1, expanded ? Layout::kOneRow : layout);
  return o;
}

Operand Operand::vector(DType dtype, int64_t size, Layout layout,
                        const std::function<double()>& value) {
  Operand o = vector_output(dtype, size, layout);
  o.fill(value);
  return o;
}

char* Operand::element(int64_t i, int64_t j) const {
  const auto size = static_cast<int64_t>(dtype_size_bytes(view_.dtype));
  return static_cast<char*>(view_.data) + (i * view_.stride[0] + j * view_.stride[1]) * size;
}

void Operand::fill(const std::function<double()>& value) {
  visit_dtype(view_.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t i = 0; i < view_.rows(); ++i) {
      for (int64_t j = 0; j < view_.cols(); ++j) {
        T rounded;
        from_float(value(), &rounded);
        std::memcpy(element(i, j), &rounded, sizeof rounded);
      }
    }
  });
  before_ = bytes_;
}

double Operand::at(int64_t i, int64_t j) const {
  return visit_dtype(view_.dtype, [&](auto tag) -> double {
    using T = typename decltype(tag)::type;
    T v;
    std::memcpy(&v, element(i, j), sizeof v);
    return static_cast<double>(to_float(v));
  });
}

Matrix Operand::read() const {
  Matrix m(view_.rows(), view_.cols());
  for (int64_t i = 0; i < m.rows; ++i) {
    for (int64_t j = 0; j < m.cols; ++j) m(i, j) = at(i, j);
  }
  return m;
}

bool Operand::guards_intact() const {
  std::vector<char> with_elements = before_;
  const size_t size = dtype_size_bytes(view_.dtype);
  for (int64_t i = 0; i < view_.rows(); ++i) {
    for (int64_t j = 0; j < view_.cols(); ++j) {
      const auto at = element(i, j) - bytes_.data();
      std::memcpy(with_elements.data() + at, bytes_.data() + at, size);
    }
  }
  return with_elements == bytes_;
}

std::vector<char> Operand::element_bytes() const {
  std::vector<char> out;
  const size_t size = dtype_size_bytes(view_.dtype);
  for (int64_t i = 0; i < view_.rows(); ++i) {
    for (int64_t j = 0; j < view_.cols(); ++j)
      out.insert(out.end(), element(i, j), element(i, j) + size);
  }
  return out;
}

}  // namespace loraaccel::test
