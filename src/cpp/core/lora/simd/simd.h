// The pieces from which the vector kernels of the LoRA family are made, as one table of function pointers per
// instruction set. Every table is compiled from simd-inl.h.
//
// A word is what a register lane multiplies at a time: one float, or (`pairs`) two neighbouring bfloat16s, whose products
// are both added to a float sum. A panel is a dense [depth][width] block of words, its unused columns zero; element
// 2 k + i of a column is half i of its word k.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "loraaccel/activation.h"
#include "loraaccel/dtype.h"

namespace loraaccel {

// Rows of c, one panel wide:  c = [c +] [partial +] left panel + left2 panel2 [+ bias].
// The second product continues in the registers of the first: that is where LoRA's rank update costs R / K of a layer.
struct PanelProduct {
  const void* left;     // [m, depth] words
  int64_t left_stride;  // bytes between rows, any number
  const void* panel;    // [depth][width] words
  int64_t depth;        // words; may be 0
  bool pairs;           // words of the first product are pairs of bfloat16
  const float* left2;   // [m, depth2]
  int64_t left2_stride;
  const float* panel2;   // [depth2][width]
  int64_t depth2;        // may be 0
  const float* bias;     // [width], or null
  const float* partial;  // [m, width], or null; may be c
  int64_t partial_stride;
  void* c;  // [m, n] of c_dtype
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

// Part of a matrix that becomes a panel.
struct PanelSource {
  const void* data;  // element (0, 0)
  int64_t stride;    // elements between rows
  DType dtype;       // float32, bfloat16, float16
  // panel[k][n] = data[n][k], else data[k][n]
  bool transposed;
  int count;      // columns of the panel that there are, 1..width
  int64_t depth;  // elements, not words
};

// Where the pixels of a panel lie in the channels of an image, for each place of a kernel: runs of neighbours. Term k of a
// sum is place k % places of channel k / places; what no run covers is zero.
struct PixelRun {
  int to, count;
  int64_t from;
};
struct PixelPlace {
  const PixelRun* runs;
  int count;
  bool full;  // the runs cover a whole panel
};
struct PixelSource {
  DType dtype;  // float32, bfloat16, float16
  const void* image;
  int64_t channel;  // elements between channels
  const PixelPlace* places;
  int64_t count;  // of places
  int64_t begin;  // first term
  int64_t depth;  // terms
};

// Neighbouring elements of an MLP, all of one type up to 32 bits:  t = act(gate) * up, or, where `dt` is given,
// dgate = dt * up * act'(gate) and dup = dt * act(gate). Without up its place is taken by 1. dup may be dt.
struct ActivationRow {
  DType dtype;
  int64_t count;
  const void* gate;
  const void* up;  // or null
  const void* dt;  // or null
  void* t;
  void* dgate;
  void* dup;
};

// A row of factors for columns:  y = [z +] gain (z + offset) + add.
struct GainRow {
  DType dtype;  // of z and y, up to 32 bits
  int64_t count;
  const void* z;
  const float* gain;
  const float* offset;  // or null
  const float* add;     // or null
  bool keep;            // z itself is part of the sum
  void* y;
};

constexpr int kMaxPanelWidth = 32;  // of all tables

struct LoraSimd {
  int width;   // columns of a panel
  int rows;    // rows of the register tile
  bool pairs;  // multiplies pairs of bfloat16

  void (*pack)(const PanelSource& source, bool pairs, void* panel);
  void (*product)(const PanelProduct& args);
  // out[i][j] = x[i][j] in float
  void (*widen)(DType x_dtype, const void* x, int64_t x_stride, float* out, int64_t out_stride,
                int64_t m, int64_t k);
  // out[m][r] = scale * sum_k x[m][k] a[r][k]. a has x's type or is float32.
  void (*dot)(DType x_dtype, const void* x, int64_t x_stride, DType a_dtype, const void* a,
              int64_t a_stride, float scale, float* out, int64_t out_stride, int64_t m, int64_t r,
              int64_t k);
  // out[r][n] (+)= sum_m left[m][r] right[m][n], columns [0, n) of right and out. The sum over m runs in blocks
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
  void (*activate)(Activation kind, const ActivationRow& row);
  // A panel of pixels: panel[k][j] is term begin + k of pixel j.
  void (*gather)(const PixelSource& source, bool pairs, void* panel);
  void (*gain)(const GainRow& row);
  // sums[j] += a[j] b[j], or a[j] where b is null.
  void (*multiply_sums)(DType dtype, const void* a, const void* b, float* sums, int64_t n);
};

// Null where this build has none for its target.
const LoraSimd* lora_simd_avx512_bf16();
const LoraSimd* lora_simd_avx512();
const LoraSimd* lora_simd_avx2();
const LoraSimd* lora_simd_neon_bf16();
const LoraSimd* lora_simd_neon();
const LoraSimd* lora_simd_portable();

// The fastest of these that the CPU runs. Never null.
const LoraSimd& lora_simd_best();

}  // namespace loraaccel
