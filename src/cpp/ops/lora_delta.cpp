// The adapters alone, added to the output of a frozen layer that something else computed.
#include "loraaccel/lora_delta.h"

#include <vector>

#include "ops/adapters.h"
#include "ops/bridge.h"
#include "ops/operators.h"

namespace loraaccel::operators {
namespace {

using bridge::RowsTensor;

int64_t total_rank(const std::vector<LoraAdapter>& adapters) {
  int64_t rank = 0;
  for (const LoraAdapter& ad : adapters) rank += ad.a.rows();
  return rank;
}

}  // namespace

std::tuple<Tensor, Tensor> lora_delta_op(
    const Tensor& x, const Tensor& base, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const std::vector<double>& scalings,
    const std::vector<double>& dropouts, const OptionalTensor& seed,
    const std::vector<double>& rank_dropouts, double output_dropout,
    const OptionalTensor& adapter_ids, const OptionalTensor& rank_factors) {
  constexpr const char* kOp = "lora_delta";
  const RowsTensor rows = bridge::rows_view(x, kOp, "x");
  const RowsTensor base_rows = bridge::rows_view(base, kOp, "base");
  const bridge::Dropouts dropped = {dropouts, rank_dropouts, seed, output_dropout, &rank_factors};
  const std::vector<LoraAdapter> adapters =
      bridge::adapters_of(kOp, lora_a, lora_b, scalings, dropped);
  LoraDeltaArgs args;
  args.x = rows.view;
  args.base = base_rows.view;
  args.adapters = adapters;
  args.output = bridge::output_dropout_of(kOp, adapters.size(), dropped);
  args.samples = bridge::samples_of(kOp, x, args.x.rows(), adapter_ids);
  const DType dtype = args.base.dtype;
  Tensor y = bridge::empty_same(base, dtype);
  Tensor hidden =
      bridge::empty({args.x.rows(), total_rank(adapters)}, bridge::sum_type(args.x.dtype));
  args.y = TensorView::matrix(y.data_ptr(), dtype, args.base.rows(), args.base.cols());
  args.h = bridge::matrix_view(hidden, kOp, "hidden");
  bridge::run([&](const ExecContext& ctx) { return lora_delta_forward(ctx, args); });
  return {std::move(y), std::move(hidden)};
}

std::vector<Tensor> lora_delta_backward_op(
    const Tensor& grad, const Tensor& x, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const Tensor& hidden, const std::vector<double>& scalings,
    const std::vector<double>& dropouts, const OptionalTensor& seed,
    const std::vector<bool>& output_mask, const std::vector<double>& rank_dropouts,
    double output_dropout, const OptionalTensor& adapter_ids, const OptionalTensor& rank_factors) {
  constexpr const char* kOp = "lora_delta_backward";
  if (output_mask.size() != 1 + 2 * lora_a.size()) {
    bridge::fail(StatusCode::kInvalidArgument,
                 std::string(kOp) + ": output_mask has " + std::to_string(output_mask.size()) +
                     " entries, expected " + std::to_string(1 + 2 * lora_a.size()) +
                     " (x, then A and B of each adapter)");
  }
  const RowsTensor x_rows = bridge::rows_view(x, kOp, "x");
  const RowsTensor grad_rows = bridge::rows_view(grad, kOp, "grad");
  const bridge::Dropouts dropped = {dropouts, rank_dropouts, seed, output_dropout, &rank_factors};
  const std::vector<LoraAdapter> adapters =
      bridge::adapters_of(kOp, lora_a, lora_b, scalings, dropped);
  LoraDeltaBackwardArgs args;
  args.dy = grad_rows.view;
  args.x = x_rows.view;
  args.adapters = adapters;
  args.h = bridge::matrix_view(hidden, kOp, "hidden");
  args.output = bridge::output_dropout_of(kOp, adapters.size(), dropped);
  args.samples = bridge::samples_of(kOp, x, args.x.rows(), adapter_ids);
  std::vector<Tensor> outputs;
  if (output_mask[0]) {
    outputs.push_back(bridge::empty_same(x, args.x.dtype));
    args.dx =
        TensorView::matrix(outputs.back().data_ptr(), args.x.dtype, args.x.rows(), args.x.cols());
  }
  std::vector<TensorView> da(adapters.size());
  std::vector<TensorView> db(adapters.size());
  const auto gradient = [&](const TensorView& like) {
    outputs.push_back(bridge::empty({like.rows(), like.cols()}, like.dtype));
    return bridge::matrix_view(outputs.back(), kOp, "gradient");
  };
  for (size_t i = 0; i < adapters.size(); ++i) {
    if (output_mask[1 + 2 * i]) da[i] = gradient(adapters[i].a);
    if (output_mask[2 + 2 * i]) db[i] = gradient(adapters[i].b);
  }
  args.da = da;
  args.db = db;
  bridge::run([&](const ExecContext& ctx) { return lora_delta_backward(ctx, args); });
  return outputs;
}

}  // namespace loraaccel::operators
