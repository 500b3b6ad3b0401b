#include "ops/bridge.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>

namespace loraaccel::bridge {
namespace {

// An output this large is fresh from the kernel each time (malloc gives such blocks back), and writing to it faults once
// per page: a sixth of the time of a layer of 4096 x 2304 floats. Only whole huge pages inside the tensor are asked for,
// so that no memory is used beyond it; where the system has none the advice does nothing.
void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#ifdef __linux__
  constexpr int64_t kLarge = 16 << 20;
  constexpr uintptr_t kHuge = 2 << 20;
  if (bytes < kLarge) return;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const auto end =
      (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
  if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(t.size(i));
  }
  return text + "]";
}

void fail(StatusCode code, const std::string& message) {
  throw std::runtime_error("loraaccel::" + Status(code, message).to_string());
}

void throw_if_error(const Status& status) {
  if (!status.ok()) throw std::runtime_error("loraaccel::" + status.to_string());
}

TensorView matrix_view(const Tensor& tensor, const char* op, const char* name) {
  if (tensor.dim() != 2) {
    fail(StatusCode::kShapeMismatch, std::string(op) + ": " + name + " has shape " +
                                         shape_text(tensor) + ", expected two dimensions");
  }
  const auto& strides = tensor.strides();
  return TensorView::strided(tensor.data_ptr(), dtype_of(tensor, op, name), tensor.size(0),
                             tensor.size(1), strides[0], strides[1]);
}

TensorView vector_view(const Tensor& tensor, const char* op, const char* name) {
  if (tensor.dim() != 1) {
    fail(StatusCode::kShapeMismatch, std::string(op) + ": " + name + " has shape " +
                                         shape_text(tensor) + ", expected one dimension");
  }
  return TensorView::vector(tensor.data_ptr(), dtype_of(tensor, op, name), tensor.size(0),
                            tensor.strides()[0]);
}

RowsTensor rows_view(const Tensor& tensor, const char* op, const char* name) {
  const int64_t ndim = tensor.dim();
  if (ndim == 0) {
    fail(StatusCode::kShapeMismatch,
         std::string(op) + ": " + name + " has no dimensions, expected [..., K]");
  }
  const DType dtype = dtype_of(tensor, op, name);
  const auto& sizes = tensor.sizes();
  const auto& strides = tensor.strides();
  int64_t rows = 1;
  int64_t row_stride = 0;  // of the innermost leading dimension that is longer than 1
  bool collapses = true;
  for (int64_t i = ndim - 2; i >= 0; --i) {
    if (sizes[i] != 1) {
      if (rows == 1) {
        row_stride = strides[i];
      } else {
        collapses = collapses && strides[i] == row_stride * rows;
      }
    }
    rows *= sizes[i];
  }
  const int64_t cols = sizes[ndim - 1];
  if (collapses || rows * cols == 0) {
    return {tensor, TensorView::strided(tensor.data_ptr(), dtype, rows, cols,
                                        rows > 1 ? row_stride : cols, strides[ndim - 1])};
  }
  Tensor copy = dense_copy(tensor);
  const TensorView view = TensorView::matrix(copy.data_ptr(), dtype, rows, cols);
  return {std::move(copy), view};
}

Tensor empty(const std::vector<int64_t>& shape, DType dtype) {
  std::vector<int64_t> strides(shape.size());
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(shape[i], 1);
  }
  Tensor tensor = empty_strided(shape, strides, dtype);
  advise_huge_pages(tensor.data_ptr(), step * static_cast<int64_t>(dtype_size_bytes(dtype)));
  return tensor;
}

Tensor empty_like_shape(const Tensor& tensor, int64_t last, DType dtype) {
  const auto& sizes = tensor.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = last;
  return empty(shape, dtype);
}

Tensor empty_same(const Tensor& tensor, DType dtype) {
  const auto& sizes = tensor.sizes();
  return empty({sizes.begin(), sizes.end()}, dtype);
}

}  // namespace loraaccel::bridge
