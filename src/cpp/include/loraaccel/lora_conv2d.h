// LoRA convolution (LoCon) over NCHW images, forward:
//
//   h = conv(x, A)    y = conv(x, W) + bias + scale conv1x1(h, B)
//
// as one product: rows of W, and of A, times columns of pixels that are gathered from the image as they are needed; the
// update continues in the registers of the frozen product. One group. Sums in float32, y is rounded once.
#pragma once

#include "loraaccel/exec_context.h"

namespace loraaccel {

struct ConvShape {
  int64_t samples, channels, height, width;  // of x
  int64_t kernel[2], stride[2], padding[2], dilation[2];

  // Of y, in direction 0 (height) or 1 (width); less than 1 where the kernel does not fit.
  int64_t output(int direction) const {
    const int64_t size = direction == 0 ? height : width;
    const int64_t reach = dilation[direction] * (kernel[direction] - 1) + 1;
    return (size + 2 * padding[direction] - reach) / stride[direction] + 1;
  }
  int64_t pixels() const { return output(0) * output(1); }
  int64_t inputs() const { return channels * kernel[0] * kernel[1]; }  // terms of a sum
};

struct LoraConv2dArgs {
  ConvShape shape;
  DType dtype = DType::kFloat32;  // of x and y: float32, bfloat16 or float16
  const void* x = nullptr;        // [samples, channels, height, width], dense
  TensorView w;                   // [N, channels kh kw]  dtype of x
  TensorView bias;                // [N], or undefined
  TensorView a;                   // [R, channels kh kw]  any type up to 32 bits
  TensorView b;                   // [N, R]  dtype of a
  double scale = 1;               // finite
  void* y = nullptr;              // [samples, N, output height, output width]  output, dense
  float* h = nullptr;             // [samples, R, output height, output width]  output, dense
};

// Fails before anything is written with kShapeMismatch, kUnsupportedDtype, kUnsupportedDevice or kInvalidArgument; after
// kOutOfMemory the outputs are undefined.
Status lora_conv2d_forward(const ExecContext& ctx, const LoraConv2dArgs& args);

}  // namespace loraaccel
