// A borrowed matrix or vector: pointer, type, shape, strides. Owns nothing.
#pragma once

#include <cstdint>

#include "loraaccel/dtype.h"

namespace loraaccel {

enum class DeviceType : int8_t { kCPU = 0, kCUDA = 1 };

// At most two dimensions: operators take their leading dimensions flattened into rows.
// Strides are in elements, may be zero (expanded) or negative. data may be null when the view is empty.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  DeviceType device = DeviceType::kCPU;
  int8_t ndim = 0;
  int64_t shape[2] = {0, 0};
  int64_t stride[2] = {0, 0};

  // Dense row-major [rows, cols].
  static TensorView matrix(const void* data, DType dtype, int64_t rows, int64_t cols) {
    return strided(data, dtype, rows, cols, cols, 1);
  }

  static TensorView strided(const void* data, DType dtype, int64_t rows, int64_t cols,
                            int64_t row_stride, int64_t col_stride) {
    TensorView v;
    v.data = const_cast<void*>(data);
    v.dtype = dtype;
    v.ndim = 2;
    v.shape[0] = rows;
    v.shape[1] = cols;
    v.stride[0] = row_stride;
    v.stride[1] = col_stride;
    return v;
  }

  // [size], elements `step` apart.
  static TensorView vector(const void* data, DType dtype, int64_t size, int64_t step = 1) {
    TensorView v;
    v.data = const_cast<void*>(data);
    v.dtype = dtype;
    v.ndim = 1;
    v.shape[0] = size;
    v.stride[0] = step;
    return v;
  }

  bool defined() const noexcept { return ndim != 0; }
  int64_t rows() const noexcept { return shape[0]; }
  int64_t cols() const noexcept { return ndim == 2 ? shape[1] : 1; }
  int64_t numel() const noexcept { return ndim == 0 ? 0 : rows() * cols(); }
  // The same memory read as [cols, rows].
  TensorView transposed() const noexcept {
    TensorView v = *this;
    v.shape[0] = shape[1];
    v.shape[1] = shape[0];
    v.stride[0] = stride[1];
    v.stride[1] = stride[0];
    return v;
  }
};

}  // namespace loraaccel
