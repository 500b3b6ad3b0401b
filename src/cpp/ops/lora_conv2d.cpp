// LoRA convolution over NCHW images, forward.
#include "loraaccel/lora_conv2d.h"

#include <vector>

#include "ops/adapters.h"
#include "ops/bridge.h"
#include "ops/operators.h"

namespace loraaccel::operators {
namespace {

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

}  // namespace

std::tuple<Tensor, Tensor> lora_conv2d_op(const Tensor& x, const Tensor& weight,
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
  bridge::run([&](const ExecContext& ctx) { return lora_conv2d_forward(ctx, args); });
  return {std::move(y), std::move(hidden)};
}

}  // namespace loraaccel::operators
