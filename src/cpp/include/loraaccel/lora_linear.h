// LoRA linear layer, forward and backward.
//
// Letters, here and in every file of the family: M rows of x, K inputs, N outputs, R rank.
// With D_i(x) the input dropout of adapter i (identity where p_i = 0):
//
//   h_i = H_i . (D_i(x) A_i^T)                          [M, R_i]
//   y   = x W^T + bias + sum_i s_i h_i B_i^T            [M, N]
//
// where H_i, all ones without the dropouts of the rank activations, is applied element by element; and, for G = dL/dy and
// u_i = H_i . (s_i G B_i),
//
//   dx = G W + sum_i D_i(u_i A_i)    dA_i = u_i^T D_i(x)    dB_i = s_i G^T h_i
//   dW = G^T x                       dbias = sum of the rows of G
//
// Sums are kept in float32 (float64 for float64 operands), each output is rounded once
// (where a GEMM of the host is borrowed for 16-bit operands, its product is rounded once more).
#pragma once

#include <cstdint>
#include <span>

#include "loraaccel/exec_context.h"

namespace loraaccel {

// D(x)[m, k] = x[m, k] * f, f = 1 / (1 - p) where keep(m, k), else 0 (so a NaN or infinity stays a NaN).
// keep is a pure function of (seed, offset, m, k), see Note [Dropout mask] in core/random/philox.h, so that the
// backward pass and a recomputed forward pass see the same mask and nothing is stored.
struct DropoutSpec {
  double p = 0;  // probability of zeroing, in [0, 1]; 1 zeroes everything
  uint64_t seed = 0;
  uint64_t offset = 0;
};

struct LoraAdapter {
  TensorView a;             // [R, K], R at least 1
  TensorView b;             // [N, R]  dtype of a
  double scale = 1;         // alpha / r, already divided; finite
  DropoutSpec dropout;      // on the adapter's input
  DropoutSpec hidden = {};  // on the rank activations: H(m, r) has the mask's factor at (m, r)
  DropoutSpec rank =
      {};  // on whole ranks of a sample: H(m, r) has the factor at (m / samples.rows, r)
  TensorView factors = {};  // [M, R], type of the sums: H(m, r) has this factor too; or undefined
};

// How the rows of x belong to samples: row m to sample m / rows.
struct LoraSamples {
  int64_t rows = 1;  // of one sample, at least 1; M is a multiple of it
  // [M / rows]: the adapter that a sample has, an index into each layer's adapters, or -1 for none (then the rows are those
  // of the frozen layer; h is zero where an adapter is not the sample's). Null: every row has all adapters.
  // Such adapters have no dropout of their input.
  const int64_t* adapter = nullptr;
};

struct LoraLinearArgs {
  TensorView x;                           // [M, K]
  TensorView w;                           // [N, K]  dtype of x
  TensorView bias;                        // [N], dtype of x or float32 beside 16 bit; or undefined
  std::span<const LoraAdapter> adapters;  // none is allowed: a plain linear layer
  TensorView y;                           // [M, N]  output, dtype of x
  TensorView h;                    // [M, sum of R]  output, dense; float32, or float64 when x is
  const void* packed_w = nullptr;  // w by pack_weight(kForward), or null; see loraaccel/pack.h
  LoraSamples samples = {};
};

// Computes y and h.
// x, w, bias, y share one dtype; each adapter is of that dtype or of another one that is at most 32 bits wide
// (float64 goes only with float64). Any strides. M may be zero; y and h overlap no input.
// On CUDA the work is queued on ctx.stream and may still be running on return.
// Fails with kShapeMismatch, kUnsupportedDtype, kUnsupportedDevice, kInvalidArgument or kKernelUnavailable before anything
// is written;
// after kOutOfMemory or kLenderFailed the outputs are undefined. Thread-safe for distinct outputs.
Status lora_linear_forward(const ExecContext& ctx, const LoraLinearArgs& args);

struct LoraLinearGrads {
  TensorView dx;                   // [M, K], dtype of x, or undefined: not wanted
  TensorView dw;                   // [N, K], dtype of w, or undefined
  TensorView dbias;                // [N], dtype of w or float32 beside 16 bit; or undefined
  std::span<const TensorView> da;  // per adapter [R, K], dtype of a, or undefined
  std::span<const TensorView> db;  // per adapter [N, R], dtype of b, or undefined
};

struct LoraLinearBackwardArgs {
  TensorView dy;                          // [M, N]  G, dtype of x
  TensorView x;                           // [M, K]  read only where dw or some da is wanted
  TensorView w;                           // [N, K]  read, as A is, only where dx is wanted
  std::span<const LoraAdapter> adapters;  // as in the forward call
  TensorView h;           // as the forward call left it; may be undefined where no db is wanted
  LoraLinearGrads grads;  // outputs; only the defined ones are computed
  const void* packed_w = nullptr;  // w by pack_weight(kInputGradient), or null
  LoraSamples samples = {};        // as in the forward call
};

// Computes the gradients that `grads` defines. With M = 0 they are zeros. Errors as in the forward call.
// The result is the same for any number of threads (where a GEMM is borrowed: if the host's is).
Status lora_linear_backward(const ExecContext& ctx, const LoraLinearBackwardArgs& args);

}  // namespace loraaccel
