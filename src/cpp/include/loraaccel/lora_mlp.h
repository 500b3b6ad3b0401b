// LoRA MLP block, gated or plain. Letters: loraaccel/lora_linear.h; I is the width between its two halves.
//
//   gated:  t = act(x Wg^T + ...) * (x Wu^T + ...)        plain:  t = act(x Wu^T + ...)          [M, I]
//   y = t Wd^T + ...                                                                             [M, N]
//
// each product with its bias and adapters. The forward pass keeps the gate and up outputs for the backward pass, beside
// the rank activations; t is recomputed. t is rounded once, to the type of x.
#pragma once

#include "loraaccel/activation.h"
#include "loraaccel/lora_qkv.h"

namespace loraaccel {

struct LoraMlpArgs {
  TensorView x;  // [M, K]
  std::span<const LoraProjection>
      inner;            // gate and up, or up alone; y: [M, I], outputs kept for the backward pass
  LoraProjection down;  // w [N, I]; y [M, N], output
  Activation activation = Activation::kSilu;
  TensorView h_inner;  // [M, sum of the ranks of gate and up]  output, as h of lora_qkv
  TensorView h_down;   // [M, rank of down]  output
};

// Rules and errors as of lora_linear_forward; all operands share x's type, float64 included.
Status lora_mlp_forward(const ExecContext& ctx, const LoraMlpArgs& args);

struct LoraMlpBackwardArgs {
  TensorView dy;  // [M, N]
  TensorView x;   // [M, K]  read only where some dw or da of gate or up is wanted
  // As in the forward call; dy is ignored. `outputs` are the y that it left.
  std::span<const LoraProjectionBackward> inner;
  std::span<const TensorView> outputs;
  LoraProjectionBackward down;
  Activation activation = Activation::kSilu;
  TensorView h_inner, h_down;  // as the forward call left them
  TensorView dx;               // [M, K], or undefined
};

Status lora_mlp_backward(const ExecContext& ctx, const LoraMlpBackwardArgs& args);

}  // namespace loraaccel
