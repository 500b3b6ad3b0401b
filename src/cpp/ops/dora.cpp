// Norms of adapted weights, and a gain for each output.
#include "loraaccel/dora.h"

#include <vector>

#include "ops/adapters.h"
#include "ops/bridge.h"
#include "ops/operators.h"

namespace loraaccel::operators {

using bridge::RowsTensor;

Tensor weight_norms_op(const OptionalTensor& weight, const std::vector<Tensor>& lora_a,
                       const std::vector<Tensor>& lora_b, const std::vector<double>& scalings) {
  constexpr const char* kOp = "weight_norms";
  const std::vector<double> none(lora_a.size(), 0);
  const std::vector<LoraAdapter> adapters =
      bridge::adapters_of(kOp, lora_a, lora_b, scalings, {none, {}, {}});
  WeightNormsArgs args;
  if (weight.has_value()) args.w = bridge::matrix_view(*weight, kOp, "weight");
  args.adapters = adapters;
  const bool some = !adapters.empty();
  Tensor norms = bridge::empty({some ? adapters[0].b.rows() : 0},
                               bridge::sum_type(some ? adapters[0].a.dtype : DType::kFloat32));
  args.norms = bridge::vector_view(norms, kOp, "norms");
  bridge::run([&](const ExecContext& ctx) { return weight_norms(ctx, args); });
  return norms;
}

Tensor column_gain_op(const Tensor& z, const Tensor& gain, const OptionalTensor& bias,
                      bool centred) {
  constexpr const char* kOp = "column_gain";
  const RowsTensor rows = bridge::rows_view(z, kOp, "z");
  ColumnGainArgs args;
  args.z = rows.view;
  args.gain = bridge::vector_view(gain, kOp, "gain");
  if (bias.has_value()) args.bias = bridge::vector_view(*bias, kOp, "bias");
  args.centred = centred;
  Tensor y = bridge::empty_same(z, args.z.dtype);
  args.y = TensorView::matrix(y.data_ptr(), args.z.dtype, args.z.rows(), args.z.cols());
  bridge::run([&](const ExecContext& ctx) { return column_gain_forward(ctx, args); });
  return y;
}

std::vector<Tensor> column_gain_backward_op(const Tensor& grad, const Tensor& z, const Tensor& gain,
                                            const OptionalTensor& bias, bool centred,
                                            const std::vector<bool>& output_mask) {
  constexpr const char* kOp = "column_gain_backward";
  if (output_mask.size() != 3) {
    bridge::fail(StatusCode::kInvalidArgument, std::string(kOp) + ": output_mask has " +
                                                   std::to_string(output_mask.size()) +
                                                   " entries, expected 3 (z, gain, bias)");
  }
  const RowsTensor z_rows = bridge::rows_view(z, kOp, "z");
  const RowsTensor grad_rows = bridge::rows_view(grad, kOp, "grad");
  ColumnGainBackwardArgs args;
  args.dy = grad_rows.view;
  args.z = z_rows.view;
  args.gain = bridge::vector_view(gain, kOp, "gain");
  if (bias.has_value()) args.bias = bridge::vector_view(*bias, kOp, "bias");
  args.centred = centred;
  std::vector<Tensor> outputs;
  if (output_mask[0]) {
    outputs.push_back(bridge::empty_same(z, args.z.dtype));
    args.dz =
        TensorView::matrix(outputs.back().data_ptr(), args.z.dtype, args.z.rows(), args.z.cols());
  }
  if (output_mask[1]) {
    outputs.push_back(bridge::empty({args.gain.rows()}, args.gain.dtype));
    args.dgain = bridge::vector_view(outputs.back(), kOp, "grad_gain");
  }
  if (output_mask[2]) {
    outputs.push_back(bridge::empty({args.gain.rows()}, args.z.dtype));
    args.dbias = bridge::vector_view(outputs.back(), kOp, "grad_bias");
  }
  bridge::run([&](const ExecContext& ctx) { return column_gain_backward(ctx, args); });
  return outputs;
}

}  // namespace loraaccel::operators
