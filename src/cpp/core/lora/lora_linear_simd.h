// The pieces from which the vector kernels of lora_linear are made, as one table of function pointers per
// instruction set. Every table is compiled from lora_linear-inl.h.
//
// A panel is a [depth][width] block of float, dense, its unused columns zero. Row strides are in elements.
#pragma once

#include <stdint.h>

#include "loraaccel/dtype.h"

namespace loraaccel {

// Rows of c, one panel wide:  c = [c +] left p + left2 p2 [+ bias].
// The second product continues in the registers of the first: that is where LoRA's rank update costs R / K of a layer.
struct PanelProduct {
  const float* left;  // [m, depth]
  int64_t left_stride;
  const float* panel;  // [depth][width]
  int64_t depth;       // may be 0
  const float* left2;  // [m, depth2]
  int64_t left2_stride;
  const float* panel2;  // [depth2][width]
  int64_t depth2;       // may be 0
  const float* bias;    // [width], or null
  void* c;              // [m, n] of c_dtype
  int64_t c_stride;
  DType c_dtype;  // float32, bfloat16, float16
  int64_t m;
  int n;     // columns of c to write, 1..width
  bool add;  // c is read and added to
};

// A rectangle of dropped-out input; see Note [Dropout mask]. col0 is a multiple of 64.
struct DropoutBlock {
  int64_t row0, rows, col0, cols;
  uint64_t seed, offset;
  double p;
};

struct LoraSimd {
  int width;  // columns of a panel
  int rows;   // rows of the register tile

  // panel[k][n] = scale * w[n][k], for n < count; w rows `stride` apart.
  void (*pack_transposed)(const float* w, int64_t stride, int count, int64_t depth, float scale,
                          float* panel);
  // panel[k][n] = r[k][n], for n < count.
  void (*pack_rows)(const float* r, int64_t stride, int count, int64_t depth, float* panel);
  void (*product)(const PanelProduct& args);
  // out[m][r] = scale * sum_k x[m][k] a[r][k]
  void (*shrink)(DType x_dtype, const void* x, int64_t x_stride, const float* a, int64_t a_stride,
                 float scale, float* out, int64_t out_stride, int64_t m, int64_t r, int64_t k);
  // out[r][n] (+)= sum_m left[r][m] right[m][n], columns [0, n) of right and out. The sum over m runs in blocks
  // of fixed size, so that the result does not depend on how the columns are split among threads.
  void (*outer)(const float* left, int64_t left_stride, DType right_dtype, const void* right,
                int64_t right_stride, float* out, int64_t out_stride, int64_t r, int64_t m,
                int64_t n, bool add);
  // out[i][j] = D(x)[row0 + i][col0 + j]; x points to element [row0][col0].
  void (*dropout)(DType x_dtype, const void* x, int64_t x_stride, const DropoutBlock& block,
                  float* out, int64_t out_stride);
  // c[i][j] += D(t)[row0 + i][col0 + j]; c and t point to element [row0][col0].
  void (*dropout_add)(const float* t, int64_t t_stride, const DropoutBlock& block, DType c_dtype,
                      void* c, int64_t c_stride);
};

// Null where this build has none for its target.
const LoraSimd* lora_simd_avx512();
const LoraSimd* lora_simd_avx2();
const LoraSimd* lora_simd_portable();

// The fastest of these that the CPU runs. Never null.
const LoraSimd& lora_simd_best();

}  // namespace loraaccel
