// What weight-decomposed adaptation (DoRA) adds to a LoRA layer: the norms of the adapted weight's rows, and a gain for each
// output. With c = weight_norms(W, A, B) taken as a constant and a trained magnitude m [N], the layer is
//
//   z = x W^T + sum_i s_i h_i B_i^T          loraaccel/lora_linear.h, without its bias
//   y = (m / c) . z + bias                   column_gain
//
// or, from a z that has the bias in it ("centred"), y = z + (m / c - 1) . (z - bias): where m = c, as before the first step,
// that is z bit for bit.
//
// Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024.
#pragma once

#include <span>

#include "loraaccel/lora_linear.h"

namespace loraaccel {

struct WeightNormsArgs {
  TensorView w;                           // [N, K], or undefined: zeros
  std::span<const LoraAdapter> adapters;  // at least one; their dropouts play no part
  TensorView norms;                       // [N]  output; float32, or float64 when the adapters are
};

// norms[n] = || W_n + sum_i s_i (B_i A_i)_n ||_2. W is read once; no matrix of its size is made.
// Fails as lora_linear_forward.
Status weight_norms(const ExecContext& ctx, const WeightNormsArgs& args);

struct ColumnGainArgs {
  TensorView z;     // [M, N]
  TensorView gain;  // [N]  float64 goes with z only
  TensorView bias;  // [N], dtype of z; or undefined
  TensorView y;     // [M, N]  output, dtype of z; may be z itself
  bool centred = false;
};

// y = gain . z + bias, or, centred, y = z + (gain - 1) . (z - bias); rounded once.
Status column_gain_forward(const ExecContext& ctx, const ColumnGainArgs& args);

struct ColumnGainBackwardArgs {
  TensorView dy;     // [M, N]  G, dtype of z
  TensorView z;      // [M, N]  read only where dgain is wanted
  TensorView gain;   // [N]
  TensorView bias;   // [N], or undefined; read only where centred
  TensorView dz;     // [M, N], dtype of z, or undefined:  gain . G
  TensorView dgain;  // [N], dtype of gain, or undefined:  sum over m of G . z, or G . (z - bias)
  TensorView dbias;  // [N], dtype of z, or undefined:  sum over m of G, or (1 - gain) times that
  bool centred = false;
};

Status column_gain_backward(const ExecContext& ctx, const ColumnGainBackwardArgs& args);

}  // namespace loraaccel
