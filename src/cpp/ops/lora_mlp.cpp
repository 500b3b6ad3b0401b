// LoRA MLP block.
#include "loraaccel/lora_mlp.h"

#include <vector>

#include "ops/adapters.h"
#include "ops/bridge.h"
#include "ops/operators.h"

namespace loraaccel::operators {
namespace {

using bridge::Group;
using bridge::RowsTensor;

Activation activation_of(const char* op, int64_t number) {
  if (number < 0 || number > static_cast<int64_t>(Activation::kRelu)) {
    bridge::fail(StatusCode::kInvalidArgument,
                 std::string(op) + ": activation " + std::to_string(number) +
                     ", expected 0 (silu), 1 (gelu), 2 (gelu_tanh) or 3 (relu)");
  }
  return static_cast<Activation>(number);
}

void check_layers(const char* op, size_t count) {
  if (count == 2 || count == 3) return;
  bridge::fail(StatusCode::kInvalidArgument,
               std::string(op) + ": " + std::to_string(count) +
                   " weights, expected gate, up and down, or up and down");
}

// Columns of one of the `count` inner layers in their packed output.
TensorView inner_columns(const Tensor& packed, int64_t rows, int64_t index, int64_t count,
                         DType dtype) {
  const int64_t total = packed.size(packed.dim() - 1);
  const int64_t width = total / count;
  auto* data = static_cast<char*>(packed.data_ptr()) +
               index * width * static_cast<int64_t>(dtype_size_bytes(dtype));
  return TensorView::strided(data, dtype, rows, width, total, 1);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> lora_mlp_op(
    const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
    const std::vector<bool>& has_bias, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const std::vector<int64_t>& adapters,
    const std::vector<double>& scalings, const std::vector<double>& dropouts,
    const OptionalTensor& seed, int64_t activation) {
  constexpr const char* kOp = "lora_mlp";
  check_layers(kOp, weights.size());
  const RowsTensor rows = bridge::rows_view(x, kOp, "x");
  const Group group(kOp, weights.size(), adapters,
                    bridge::adapters_of(kOp, lora_a, lora_b, scalings, {dropouts, {}, seed}));
  const auto bias = bridge::spread(kOp, "biases", biases, has_bias, weights.size());
  std::vector<LoraProjection> layers(weights.size());
  for (size_t j = 0; j < weights.size(); ++j) {
    layers[j].w = bridge::matrix_view(weights[j], kOp, "weight");
    if (bias[j] != nullptr) layers[j].bias = bridge::vector_view(*bias[j], kOp, "bias");
    layers[j].adapters = group.of[j];
  }
  const DType dtype = rows.view.dtype;
  const DType sums = bridge::sum_type(dtype);
  const int64_t m = rows.view.rows();
  const auto count = static_cast<int64_t>(weights.size()) - 1;
  int64_t rank = 0;
  for (const LoraAdapter& ad : layers.back().adapters) rank += ad.a.rows();
  LoraMlpArgs args;
  args.x = rows.view;
  args.activation = activation_of(kOp, activation);
  args.down = layers.back();
  // (Sizes that do not fit are the core's to report: the outputs are then never written.)
  Tensor inner = bridge::empty_like_shape(x, count * args.down.w.cols(), dtype);
  Tensor y = bridge::empty_like_shape(x, args.down.w.rows(), dtype);
  Tensor hidden_inner = bridge::empty({m, group.rank - rank}, sums);
  Tensor hidden_down = bridge::empty({m, rank}, sums);
  for (int64_t j = 0; j < count; ++j) layers[j].y = inner_columns(inner, m, j, count, dtype);
  args.down.y = TensorView::matrix(y.data_ptr(), dtype, m, args.down.w.rows());
  args.inner = {layers.data(), static_cast<size_t>(count)};
  args.h_inner = bridge::matrix_view(hidden_inner, kOp, "hidden_inner");
  args.h_down = bridge::matrix_view(hidden_down, kOp, "hidden_down");
  bridge::run([&](const ExecContext& ctx) { return lora_mlp_forward(ctx, args); });
  return {std::move(y), std::move(inner), std::move(hidden_inner), std::move(hidden_down)};
}

std::vector<Tensor> lora_mlp_backward_op(
    const Tensor& grad, const Tensor& x, const Tensor& inner, const std::vector<Tensor>& weights,
    const std::vector<Tensor>& lora_a, const std::vector<Tensor>& lora_b,
    const std::vector<int64_t>& adapters, const Tensor& hidden_inner, const Tensor& hidden_down,
    const std::vector<double>& scalings, const std::vector<double>& dropouts,
    const OptionalTensor& seed, int64_t activation, const std::vector<bool>& output_mask) {
  constexpr const char* kOp = "lora_mlp_backward";
  check_layers(kOp, weights.size());
  const size_t expected = 1 + 2 * weights.size() + 2 * lora_a.size();
  if (output_mask.size() != expected) {
    bridge::fail(StatusCode::kInvalidArgument,
                 std::string(kOp) + ": output_mask has " + std::to_string(output_mask.size()) +
                     " entries, expected " + std::to_string(expected) +
                     " (x, then weight, bias and A and B of each adapter of each layer)");
  }
  const RowsTensor rows = bridge::rows_view(x, kOp, "x");
  const RowsTensor grad_rows = bridge::rows_view(grad, kOp, "grad");
  const RowsTensor inner_rows = bridge::rows_view(inner, kOp, "inner");
  const Group group(kOp, weights.size(), adapters,
                    bridge::adapters_of(kOp, lora_a, lora_b, scalings, {dropouts, {}, seed}));
  const DType dtype = rows.view.dtype;
  const auto count = static_cast<int64_t>(weights.size()) - 1;
  const int64_t m = rows.view.rows();
  if (inner_rows.view.rows() != m || inner_rows.view.dtype != dtype ||
      !inner_rows.tensor.is_contiguous()) {
    bridge::fail(StatusCode::kShapeMismatch,
                 std::string(kOp) + ": inner is not what lora_mlp returned for this x");
  }
  LoraMlpBackwardArgs args;
  args.dy = grad_rows.view;
  args.x = rows.view;
  args.activation = activation_of(kOp, activation);
  args.h_inner = bridge::matrix_view(hidden_inner, kOp, "hidden_inner");
  args.h_down = bridge::matrix_view(hidden_down, kOp, "hidden_down");
  std::vector<Tensor> outputs;
  if (output_mask[0]) {
    outputs.push_back(bridge::empty_same(x, dtype));
    args.dx = TensorView::matrix(outputs.back().data_ptr(), dtype, m, args.x.cols());
  }
  bridge::GradientOutputs gradients(kOp, output_mask, 1, &outputs);
  std::vector<LoraProjectionBackward> layers;
  layers.reserve(weights.size());
  for (size_t j = 0; j < weights.size(); ++j) {
    layers.push_back(
        gradients.of_layer(bridge::matrix_view(weights[j], kOp, "weight"), group.of[j]));
  }
  std::vector<TensorView> kept;
  kept.reserve(static_cast<size_t>(count));
  for (int64_t j = 0; j < count; ++j)
    kept.push_back(inner_columns(inner_rows.tensor, m, j, count, dtype));
  args.inner = {layers.data(), static_cast<size_t>(count)};
  args.outputs = kept;
  args.down = layers.back();
  bridge::run([&](const ExecContext& ctx) { return lora_mlp_backward(ctx, args); });
  return outputs;
}

}  // namespace loraaccel::operators
