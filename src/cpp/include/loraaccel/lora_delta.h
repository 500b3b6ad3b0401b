// The adapters alone, added to the output of a frozen layer that somebody else computes (a quantised one, for instance).
// Letters: loraaccel/lora_linear.h.
//
//   y = base + O . sum_i s_i h_i B_i^T                      [M, N]
//
// where O is all ones, or the mask of a dropout of the adapters' output; and, for G = dL/dy and u_i = H_i . (s_i (O . G) B_i),
//
//   dx = sum_i D_i(u_i A_i)    dA_i = u_i^T D_i(x)    dB_i = s_i (O . G)^T h_i      (the gradient of base is G)
//
// The sum is rounded once, to the type of base.
#pragma once

#include <span>

#include "loraaccel/lora_linear.h"

namespace loraaccel {

struct LoraDeltaArgs {
  TensorView x;                           // [M, K]
  std::span<const LoraAdapter> adapters;  // at least one
  TensorView base;                        // [M, N], of any type: float64 goes with x only
  TensorView y;             // [M, N]  output, dtype of base; may be base itself, element by element
  TensorView h;             // [M, sum of R]  output, dense; float32, or float64 when x is
  DropoutSpec output = {};  // O
  LoraSamples samples = {};
};

// Computes y and h. Rules and errors as of lora_linear_forward.
Status lora_delta_forward(const ExecContext& ctx, const LoraDeltaArgs& args);

struct LoraDeltaBackwardArgs {
  TensorView dy;                          // [M, N]  G, dtype of y
  TensorView x;                           // [M, K]  read only where some da is wanted
  std::span<const LoraAdapter> adapters;  // as in the forward call
  TensorView h;                    // as the forward call left it; may be undefined without any db
  TensorView dx;                   // [M, K], dtype of x, or undefined
  std::span<const TensorView> da;  // per adapter [R, K], dtype of a, or undefined
  std::span<const TensorView> db;  // per adapter [N, R], dtype of b, or undefined
  DropoutSpec output = {};         // as in the forward call
  LoraSamples samples = {};
};

// Computes the gradients that are defined.
Status lora_delta_backward(const ExecContext& ctx, const LoraDeltaBackwardArgs& args);

}  // namespace loraaccel
