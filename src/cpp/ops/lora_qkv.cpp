// Several LoRA linear layers over one input.
#include "loraaccel/lora_qkv.h"

#include <span>
#include <vector>

#include "ops/adapters.h"
#include "ops/bridge.h"
#include "ops/operators.h"

namespace loraaccel::operators {

using bridge::Group;
using bridge::RowsTensor;
using bridge::spread;

std::tuple<Tensor, Tensor> lora_qkv_op(
    const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
    const std::vector<bool>& has_bias, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const std::vector<int64_t>& adapters,
    const std::vector<double>& scalings, const std::vector<double>& dropouts,
    const OptionalTensor& seed, const std::vector<double>& rank_dropouts,
    const OptionalTensor& rank_factors) {
  constexpr const char* kOp = "lora_qkv";
  const RowsTensor rows = bridge::rows_view(x, kOp, "x");
  const Group group(kOp, weights.size(), adapters,
                    bridge::adapters_of(kOp, lora_a, lora_b, scalings,
                                        {dropouts, rank_dropouts, seed, 0, &rank_factors}));
  const auto bias = spread(kOp, "biases", biases, has_bias, weights.size());
  std::vector<LoraProjection> projections(weights.size());
  int64_t outputs = 0;
  for (size_t j = 0; j < weights.size(); ++j) {
    projections[j].w = bridge::matrix_view(weights[j], kOp, "weight");
    if (bias[j] != nullptr) projections[j].bias = bridge::vector_view(*bias[j], kOp, "bias");
    projections[j].adapters = group.of[j];
    outputs += projections[j].w.rows();
  }
  const DType dtype = rows.view.dtype;
  Tensor y = bridge::empty_like_shape(x, outputs, dtype);
  Tensor hidden = bridge::empty({rows.view.rows(), group.rank}, bridge::sum_type(dtype));
  auto* data = static_cast<char*>(y.data_ptr());
  for (LoraProjection& p : projections) {
    p.y = TensorView::strided(data, dtype, rows.view.rows(), p.w.rows(), outputs, 1);
    data += p.w.rows() * static_cast<int64_t>(dtype_size_bytes(dtype));
  }
  const LoraQkvArgs args = {rows.view, projections, bridge::matrix_view(hidden, kOp, "hidden"),
                            bridge::samples_of(kOp, x, rows.view.rows(), {})};
  bridge::run([&](const ExecContext& ctx) { return lora_qkv_forward(ctx, args); });
  return {std::move(y), std::move(hidden)};
}

std::vector<Tensor> lora_qkv_backward_op(
    const std::vector<Tensor>& grads, const std::vector<bool>& has_grad, const Tensor& x,
    const std::vector<Tensor>& weights, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const std::vector<int64_t>& adapters, const Tensor& hidden,
    const std::vector<double>& scalings, const std::vector<double>& dropouts,
    const OptionalTensor& seed, const std::vector<bool>& output_mask,
    const std::vector<double>& rank_dropouts, const OptionalTensor& rank_factors) {
  constexpr const char* kOp = "lora_qkv_backward";
  const size_t expected = 1 + 2 * weights.size() + 2 * lora_a.size();
  if (output_mask.size() != expected) {
    bridge::fail(StatusCode::kInvalidArgument,
                 std::string(kOp) + ": output_mask has " + std::to_string(output_mask.size()) +
                     " entries, expected " + std::to_string(expected) +
                     " (x, then weight, bias and A and B of each adapter of each projection)");
  }
  const RowsTensor rows = bridge::rows_view(x, kOp, "x");
  const Group group(kOp, weights.size(), adapters,
                    bridge::adapters_of(kOp, lora_a, lora_b, scalings,
                                        {dropouts, rank_dropouts, seed, 0, &rank_factors}));
  const auto grad = spread(kOp, "grads", grads, has_grad, weights.size());
  const DType dtype = rows.view.dtype;
  LoraQkvBackwardArgs args;
  args.x = rows.view;
  args.h = bridge::matrix_view(hidden, kOp, "hidden");
  args.samples = bridge::samples_of(kOp, x, args.x.rows(), {});
  std::vector<Tensor> outputs;
  size_t at = 0;
  if (output_mask[at++]) {
    outputs.push_back(bridge::empty_same(x, dtype));
    args.dx = TensorView::matrix(outputs.back().data_ptr(), dtype, args.x.rows(), args.x.cols());
  }
  std::vector<LoraProjectionBackward> projections(weights.size());
  std::vector<RowsTensor> grad_rows(weights.size());
  bridge::GradientOutputs gradients(kOp, output_mask, at, &outputs);
  for (size_t j = 0; j < weights.size(); ++j) {
    projections[j] =
        gradients.of_layer(bridge::matrix_view(weights[j], kOp, "weight"), group.of[j]);
    if (grad[j] == nullptr) continue;
    grad_rows[j] = bridge::rows_view(*grad[j], kOp, "grad");
    projections[j].dy = grad_rows[j].view;
  }
  args.projections = projections;
  bridge::run([&](const ExecContext& ctx) { return lora_qkv_backward(ctx, args); });
  return outputs;
}

}  // namespace loraaccel::operators
