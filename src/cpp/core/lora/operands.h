// Operands as the kernels want them: rows whose elements are neighbours. What is so already is not copied.
#pragma once

#include "half.h"
#include "loraaccel/tensor_view.h"
#include "scratch.h"

namespace loraaccel {

// [rows, cols] with neighbouring columns; `stride` elements between rows.
template <class T>
struct Rows {
  const T* data = nullptr;
  int64_t stride = 0;
};

// The same with the element type known at run time only.
struct AnyRows {
  const void* data = nullptr;
  int64_t stride = 0;
  DType dtype = DType::kFloat32;

  const void* at(int64_t row, int64_t col = 0) const {
    return static_cast<const char*>(data) +
           (row * stride + col) * static_cast<int64_t>(dtype_size_bytes(dtype));
  }
};

inline bool has_unit_columns(const TensorView& v) {
  return v.ndim == 2 && (v.stride[1] == 1 || v.shape[1] <= 1);
}

// dst[i][j] = src[i][j], converted.
template <class From, class To>
void convert_rows(const ExecContext& ctx, const From* src, int64_t src_row, int64_t src_col,
                  To* dst, int64_t dst_row, int64_t dst_col, int64_t rows, int64_t cols) {
  constexpr int64_t kBlock = 64;
  parallel_for(ctx, ceil_div(rows, kBlock), [&](int64_t block) {
    const int64_t end = rows < (block + 1) * kBlock ? rows : (block + 1) * kBlock;
    for (int64_t i = block * kBlock; i < end; ++i) {
      for (int64_t j = 0; j < cols; ++j)
        from_float(to_float(src[i * src_row + j * src_col]), dst + i * dst_row + j * dst_col);
    }
  });
}

// dst[i][j] = src[i][j], of one type; the columns of dst are neighbours.
template <class T>
void move_rows(const ExecContext& ctx, const T* src, int64_t src_row, int64_t src_col, T* dst,
               int64_t dst_row, int64_t rows, int64_t cols) {
  constexpr int64_t kBlock = 16;
  parallel_for(ctx, ceil_div(rows, kBlock), [&](int64_t block) {
    const int64_t end = rows < (block + 1) * kBlock ? rows : (block + 1) * kBlock;
    // Columns outermost: of a transposed matrix, whole lines of the source are used while they are in cache.
    for (int64_t j0 = 0; j0 < cols; j0 += kBlock) {
      const int64_t j1 = cols < j0 + kBlock ? cols : j0 + kBlock;
      for (int64_t i = block * kBlock; i < end; ++i) {
        for (int64_t j = j0; j < j1; ++j) dst[i * dst_row + j] = src[i * src_row + j * src_col];
      }
    }
  });
}

// The view as rows of T, in `scratch` where it is of another type or its columns are apart.
template <class T>
Status rows_as(const ExecContext& ctx, const char* op, const TensorView& view, Scratch<T>* scratch,
               Rows<T>* out) {
  return visit_dtype(view.dtype, [&](auto tag) -> Status {
    using From = typename decltype(tag)::type;
    const auto* src = static_cast<const From*>(view.data);
    if constexpr (std::is_same_v<From, T>) {
      if (has_unit_columns(view)) {
        *out = {src, view.stride[0]};
        return Status();
      }
    }
    const int64_t rows = view.rows();
    const int64_t cols = view.cols();
    if (!scratch->allocate(ctx, rows * cols)) return out_of_memory(op);
    convert_rows(ctx, src, view.stride[0], view.ndim == 2 ? view.stride[1] : 1, scratch->data(),
                 cols, 1, rows, cols);
    *out = {scratch->data(), cols};
    return Status();
  });
}

// The view as rows of its own type.
inline Status rows_of(const ExecContext& ctx, const char* op, const TensorView& view,
                      Scratch<char>* scratch, AnyRows* out) {
  if (has_unit_columns(view)) {
    *out = {view.data, view.stride[0], view.dtype};
    return Status();
  }
  const int64_t cols = view.cols();
  if (!scratch->allocate(ctx, view.numel() * static_cast<int64_t>(dtype_size_bytes(view.dtype)))) {
    return out_of_memory(op);
  }
  visit_dtype(view.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    move_rows(ctx, static_cast<const T*>(view.data), view.stride[0], view.stride[1],
              reinterpret_cast<T*>(scratch->data()), cols, view.rows(), cols);
  });
  *out = {scratch->data(), cols, view.dtype};
  return Status();
}

// view[i][j] = scale * src[i * row + j * col], rounded once to the view's type.
template <class T>
void store_view(const ExecContext& ctx, const T* src, int64_t row, int64_t col, T scale,
                const TensorView& view) {
  visit_dtype(view.dtype, [&](auto tag) {
    using To = typename decltype(tag)::type;
    auto* dst = static_cast<To*>(view.data);
    constexpr int64_t kBlock = 64;
    parallel_for(ctx, ceil_div(view.rows(), kBlock), [&](int64_t block) {
      const int64_t end = view.rows() < (block + 1) * kBlock ? view.rows() : (block + 1) * kBlock;
      for (int64_t i = block * kBlock; i < end; ++i) {
        for (int64_t j = 0; j < view.cols(); ++j) {
          from_float(scale * src[i * row + j * col], dst + i * view.stride[0] + j * view.stride[1]);
        }
      }
    });
  });
}

}  // namespace loraaccel
