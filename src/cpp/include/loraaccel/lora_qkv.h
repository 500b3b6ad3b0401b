// Several LoRA linear layers over one input: the projections of an attention block (Q, K, V), or the gate and up
// projections of an MLP. Letters and formulas: loraaccel/lora_linear.h; a number of outputs N_j for each projection.
//
//   y_j = x W_j^T + bias_j + sum_i s_ji D_ji(x) A_ji^T B_ji^T          dx = sum_j G_j W_j + sum_ji D_ji(s_ji G_j B_ji A_ji)
//
// x is read once for all of them. Sums over j are kept in the type of the sums: dx is rounded once.
#pragma once

#include <cstdint>
#include <span>

#include "loraaccel/lora_linear.h"

namespace loraaccel {

struct LoraProjection {
  TensorView w;                           // [N, K]  dtype of x
  TensorView bias;                        // [N], as of lora_linear; or undefined
  std::span<const LoraAdapter> adapters;  // none is allowed
  TensorView y;                    // [M, N]  output, dtype of x; may be columns of a wider matrix
  const void* packed_w = nullptr;  // w by pack_weight(kForward), or null
};

struct LoraQkvArgs {
  TensorView x;  // [M, K]
  std::span<const LoraProjection>
      projections;  // at least one; sizes, biases and adapters may differ
  TensorView
      h;  // [M, sum of all R]  output, dense; in the order of the projections and their adapters
  LoraSamples samples = {};
};

// Computes every y and h. Rules and errors as of lora_linear_forward.
Status lora_qkv_forward(const ExecContext& ctx, const LoraQkvArgs& args);

struct LoraProjectionBackward {
  TensorView dy;  // [M, N]  G, dtype of x; undefined: no gradient, as if zero
  TensorView w;   // [N, K]
  std::span<const LoraAdapter> adapters;  // as in the forward call
  TensorView dw;                          // [N, K], dtype of w, or undefined
  TensorView dbias;                       // [N], dtype of w, or undefined
  std::span<const TensorView> da;         // per adapter [R, K], dtype of a, or undefined
  std::span<const TensorView> db;         // per adapter [N, R], dtype of b, or undefined
  const void* packed_w = nullptr;         // w by pack_weight(kInputGradient), or null
};

struct LoraQkvBackwardArgs {
  TensorView x;  // [M, K]  read only where some dw or da is wanted
  std::span<const LoraProjectionBackward> projections;  // as in the forward call
  TensorView h;              // as the forward call left it; may be undefined where no db is wanted
  TensorView dx;             // [M, K], dtype of x, or undefined
  LoraSamples samples = {};  // as in the forward call
};

// Computes the gradients that are defined. With M = 0, or without any dy, they are zeros.
Status lora_qkv_backward(const ExecContext& ctx, const LoraQkvBackwardArgs& args);

}  // namespace loraaccel
