// One LoRA linear layer.
#include "loraaccel/lora_linear.h"

#include <vector>

#include "loraaccel/pack.h"
#include "ops/adapters.h"
#include "ops/bridge.h"
#include "ops/operators.h"

namespace loraaccel::operators {
namespace {

using bridge::RowsTensor;
using bridge::sum_type;

int64_t total_rank(const std::vector<LoraAdapter>& adapters) {
  int64_t rank = 0;
  for (const LoraAdapter& ad : adapters) rank += ad.a.rows();
  return rank;
}

}  // namespace

std::tuple<Tensor, Tensor> lora_linear_op(
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
    const std::vector<Tensor>& lora_a, const std::vector<Tensor>& lora_b,
    const std::vector<double>& scalings, const std::vector<double>& dropouts,
    const OptionalTensor& seed, const OptionalTensor& packed,
    const std::vector<double>& rank_dropouts, const OptionalTensor& adapter_ids,
    const OptionalTensor& rank_factors) {
  constexpr const char* kOp = "lora_linear";
  const RowsTensor rows = bridge::rows_view(x, kOp, "x");
  const std::vector<LoraAdapter> adapters = bridge::adapters_of(
      kOp, lora_a, lora_b, scalings, {dropouts, rank_dropouts, seed, 0, &rank_factors});
  LoraLinearArgs args;
  args.x = rows.view;
  args.w = bridge::matrix_view(weight, kOp, "weight");
  if (bias.has_value()) args.bias = bridge::vector_view(*bias, kOp, "bias");
  args.adapters = adapters;
  args.packed_w = bridge::packed_memory(packed, kOp);
  args.samples = bridge::samples_of(kOp, x, args.x.rows(), adapter_ids);
  const DType dtype = args.x.dtype;
  Tensor y = bridge::empty_like_shape(x, args.w.rows(), dtype);
  Tensor hidden = bridge::empty({args.x.rows(), total_rank(adapters)}, sum_type(dtype));
  args.y = TensorView::matrix(y.data_ptr(), dtype, args.x.rows(), args.w.rows());
  args.h = bridge::matrix_view(hidden, kOp, "hidden");
  bridge::run([&](const ExecContext& ctx) { return lora_linear_forward(ctx, args); });
  return {std::move(y), std::move(hidden)};
}

std::vector<Tensor> lora_linear_backward_op(
    const Tensor& grad, const Tensor& x, const Tensor& weight, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const Tensor& hidden, const std::vector<double>& scalings,
    const std::vector<double>& dropouts, const OptionalTensor& seed,
    const std::vector<bool>& output_mask, const OptionalTensor& packed,
    const std::vector<double>& rank_dropouts, const OptionalTensor& adapter_ids,
    const OptionalTensor& rank_factors) {
  constexpr const char* kOp = "lora_linear_backward";
  if (output_mask.size() != 3 + 2 * lora_a.size()) {
    bridge::fail(StatusCode::kInvalidArgument,
                 std::string(kOp) + ": output_mask has " + std::to_string(output_mask.size()) +
                     " entries, expected " + std::to_string(3 + 2 * lora_a.size()) +
                     " (x, weight, bias, then A and B of each adapter)");
  }
  const RowsTensor x_rows = bridge::rows_view(x, kOp, "x");
  const RowsTensor grad_rows = bridge::rows_view(grad, kOp, "grad");
  const std::vector<LoraAdapter> adapters = bridge::adapters_of(
      kOp, lora_a, lora_b, scalings, {dropouts, rank_dropouts, seed, 0, &rank_factors});
  LoraLinearBackwardArgs args;
  args.dy = grad_rows.view;
  args.x = x_rows.view;
  args.w = bridge::matrix_view(weight, kOp, "weight");
  args.adapters = adapters;
  args.h = bridge::matrix_view(hidden, kOp, "hidden");
  args.packed_w = bridge::packed_memory(packed, kOp);
  args.samples = bridge::samples_of(kOp, x, args.x.rows(), adapter_ids);

  std::vector<Tensor> outputs;
  const DType dtype = args.x.dtype;
  if (output_mask[0]) {
    outputs.push_back(bridge::empty_same(x, dtype));
    args.grads.dx =
        TensorView::matrix(outputs.back().data_ptr(), dtype, args.x.rows(), args.x.cols());
  }
  if (output_mask[1]) {
    outputs.push_back(bridge::empty({args.w.rows(), args.w.cols()}, dtype));
    args.grads.dw = bridge::matrix_view(outputs.back(), kOp, "grad_weight");
  }
  if (output_mask[2]) {
    outputs.push_back(bridge::empty({args.w.rows()}, sum_type(dtype)));  // the bias may be float32
    args.grads.dbias = bridge::vector_view(outputs.back(), kOp, "grad_bias");
  }
  std::vector<TensorView> da(adapters.size());
  std::vector<TensorView> db(adapters.size());
  for (size_t i = 0; i < adapters.size(); ++i) {
    if (output_mask[3 + 2 * i]) {
      outputs.push_back(
          bridge::empty({adapters[i].a.rows(), adapters[i].a.cols()}, adapters[i].a.dtype));
      da[i] = bridge::matrix_view(outputs.back(), kOp, "grad_A");
    }
    if (output_mask[4 + 2 * i]) {
      outputs.push_back(
          bridge::empty({adapters[i].b.rows(), adapters[i].b.cols()}, adapters[i].b.dtype));
      db[i] = bridge::matrix_view(outputs.back(), kOp, "grad_B");
    }
  }
  args.grads.da = da;
  args.grads.db = db;
  bridge::run([&](const ExecContext& ctx) { return lora_linear_backward(ctx, args); });
  return outputs;
}

Tensor pack_weight_op(const Tensor& weight, bool for_input_gradient) {
  constexpr const char* kOp = "pack_weight";
  const TensorView w = bridge::matrix_view(weight, kOp, "weight");
  const WeightUse use = for_input_gradient ? WeightUse::kInputGradient : WeightUse::kForward;
  const size_t bytes = packed_weight_bytes(w, use);
  Tensor packed = bridge::empty_bytes(static_cast<int64_t>(bytes));
  bridge::run(
      [&](const ExecContext& ctx) { return pack_weight(ctx, w, use, packed.data_ptr(), bytes); });
  return packed;
}

}  // namespace loraaccel::operators
