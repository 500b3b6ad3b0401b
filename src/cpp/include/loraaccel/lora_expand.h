// The second half of an adapter, where the first is computed elsewhere (a convolution, an embedding): rank activations to
// outputs, added to those of the frozen layer. For each of several pairs of matrices (the images of a batch, say),
//
//   y = base + scale h B^T          [M, N]
//
// and, for G = dL/dy,   dh = scale G B    dB = scale sum over the pairs of G^T h    (the gradient of base is G).
//
// Matrices may be stored by rows or by columns: a channels-last image is [pixels, channels] by rows, an NCHW one by columns.
// Sums are kept in float32 (float64 for float64 operands), each output is rounded once.
#pragma once

#include <span>

#include "loraaccel/exec_context.h"

namespace loraaccel {

struct LoraExpandArgs {
  TensorView b;                        // [N, R]
  double scale = 1;                    // finite
  std::span<const TensorView> base;    // each [M, N]
  std::span<const TensorView> hidden;  // each [M, R]; float64 goes with float64 only
  std::span<const TensorView> y;       // each [M, N]  output, dtype of base; may be base itself
};

// Fails before anything is written with kShapeMismatch, kUnsupportedDtype, kUnsupportedDevice or kInvalidArgument; after
// kOutOfMemory the outputs are undefined.
Status lora_expand_forward(const ExecContext& ctx, const LoraExpandArgs& args);

struct LoraExpandBackwardArgs {
  std::span<const TensorView> dy;  // each [M, N]  G
  TensorView b;                    // [N, R]
  double scale = 1;
  std::span<const TensorView> hidden;   // each [M, R]
  std::span<const TensorView> dhidden;  // each [M, R]  output, of any type; or empty: not wanted
  TensorView db;                        // [N, R]  output, dtype of b; or undefined
};

Status lora_expand_backward(const ExecContext& ctx, const LoraExpandBackwardArgs& args);

}  // namespace loraaccel
