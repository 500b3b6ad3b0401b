// LoRA convolution over NCHW images, forward: schema and CPU implementation.
#include "loraaccel/lora_conv2d.h"

#include <vector>

#include "bridge.h"
#include "ops/adapters.h"

namespace loraaccel {
namespace {

using bridge::OptionalTensor;
using bridge::Tensor;

// The view of [rows, ...] as a matrix: the rest must be dense.
TensorView flat(const Tensor& t, const char* op, const char* name) {
  if (t.dim() < 2 || !t.is_contiguous()) {
    bridge::fail(StatusCode::kInvalidArgument,
                 std::string(op) + ": " + name + " is no dense tensor of two or more dimensions");
  }
  const int64_t rows = t.size(0);
  return TensorView::matrix(t.data_ptr(), bridge::dtype_of(t, op, name), rows,
                            rows == 0 ? 0 : t.numel() / rows);
}

std::tuple<Tensor, Tensor> forward_op(const Tensor& x, const Tensor& weight,
                                      const OptionalTensor& bias, const Tensor& lora_a,
                                      const Tensor& lora_b, double scaling,
                                      const std::vector<int64_t>& stride,
                                      const std::vector<int64_t>& padding,
                                      const std::vector<int64_t>& dilation) {
  constexpr const char* kOp = "lora_conv2d";
  if (x.dim() != 4 || !x.is_contiguous() || weight.dim() != 4 || stride.size() != 2 ||
      padding.size() != 2 || dilation.size() != 2) {
    bridge::fail(StatusCode::kInvalidArgument,
                 std::string(kOp) +
                     ": expected a dense x of four dimensions, a weight of four, and two numbers "
                     "each for stride, padding and dilation");
  }
  LoraConv2dArgs args;
  ConvShape& s = args.shape;
  s = {x.size(0),
       x.size(1),
       x.size(2),
       x.size(3),
       {weight.size(2), weight.size(3)},
       {stride[0], stride[1]},
       {padding[0], padding[1]},
       {dilation[0], dilation[1]}};
  args.dtype = bridge::dtype_of(x, kOp, "x");
  args.x = x.data_ptr();
  args.w = flat(weight, kOp, "weight");
  if (bias.has_value()) args.bias = bridge::vector_view(*bias, kOp, "bias");
  args.a = flat(lora_a, kOp, "lora_A");
  args.b = flat(lora_b, kOp, "lora_B");
  args.scale = scaling;
  const bool fits = s.stride[0] > 0 && s.stride[1] > 0;
  const int64_t height = fits ? std::max<int64_t>(0, s.output(0)) : 0;
  const int64_t width = fits ? std::max<int64_t>(0, s.output(1)) : 0;
  Tensor y = bridge::empty({s.samples, weight.size(0), height, width}, args.dtype);
  Tensor hidden = bridge::empty({s.samples, args.a.rows(), height, width}, DType::kFloat32);
  args.y = y.data_ptr();
  args.h = static_cast<float*>(hidden.data_ptr());
  const char* kernel = nullptr;
  bridge::throw_if_error(lora_conv2d_forward(bridge::context(&kernel), args));
  if (kernel != nullptr) bridge::count_kernel(kernel);
  return {std::move(y), std::move(hidden)};
}

}  // namespace
}  // namespace loraaccel

STABLE_TORCH_LIBRARY_FRAGMENT(loraaccel, m) {
  // Returns y [S, N, H', W'] and the rank activations [S, R, H', W'] in float32. x dense NCHW, one group.
  m.def(
      "lora_conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor lora_A, Tensor lora_B, float "
      "scaling, int[] stride, int[] padding, int[] dilation) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(loraaccel, CPU, m) {
  m.impl("lora_conv2d", TORCH_BOX(&loraaccel::forward_op));
}
