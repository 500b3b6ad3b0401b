// The second half of an adapter, added to a given output.
#include "loraaccel/lora_expand.h"

#include <vector>

#include "ops/bridge.h"
#include "ops/operators.h"

namespace loraaccel::operators {
namespace {

using bridge::RowsTensor;

// The matrices [pixels, channels] of a tensor: [..., C] as one by rows, or each image of [S, C, ...] by columns.
struct Matrices {
  RowsTensor rows;  // owns the memory
  std::vector<TensorView> views;

  Matrices(const Tensor& t, bool channels_first, const char* op, const char* name) {
    if (!channels_first) {
      rows = bridge::rows_view(t, op, name);
      views.push_back(rows.view);
      return;
    }
    if (t.dim() < 2 || !t.is_contiguous()) {
      bridge::fail(StatusCode::kInvalidArgument,
                   std::string(op) + ": " + name + " is no dense tensor [samples, channels, ...]");
    }
    const int64_t channels = t.size(1);
    const int64_t per_sample = t.size(0) * channels == 0 ? 0 : t.numel() / (t.size(0) * channels);
    const DType dtype = bridge::dtype_of(t, op, name);
    auto* data = static_cast<char*>(t.data_ptr());
    for (int64_t i = 0; i < t.size(0); ++i) {
      views.push_back(TensorView::strided(data, dtype, per_sample, channels, 1, per_sample));
      data += per_sample * channels * static_cast<int64_t>(dtype_size_bytes(dtype));
    }
  }
};

}  // namespace

Tensor lora_expand_op(const Tensor& base, const Tensor& hidden, const Tensor& lora_b,
                      double scaling, bool channels_first) {
  constexpr const char* kOp = "lora_expand";
  const Matrices bases(base, channels_first, kOp, "base");
  const Matrices hiddens(hidden, channels_first, kOp, "hidden");
  Tensor y = bridge::empty_same(base, bridge::dtype_of(base, kOp, "base"));
  const Matrices outputs(y, channels_first, kOp, "y");
  LoraExpandArgs args;
  args.b = bridge::matrix_view(lora_b, kOp, "lora_B");
  args.scale = scaling;
  args.base = bases.views;
  args.hidden = hiddens.views;
  args.y = outputs.views;
  bridge::run([&](const ExecContext& ctx) { return lora_expand_forward(ctx, args); });
  return y;
}

std::vector<Tensor> lora_expand_backward_op(const Tensor& grad, const Tensor& hidden,
                                            const Tensor& lora_b, double scaling,
                                            bool channels_first,
                                            const std::vector<bool>& output_mask) {
  constexpr const char* kOp = "lora_expand_backward";
  if (output_mask.size() != 2) {
    bridge::fail(StatusCode::kInvalidArgument, std::string(kOp) + ": output_mask has " +
                                                   std::to_string(output_mask.size()) +
                                                   " entries, expected 2 (hidden, lora_B)");
  }
  const Matrices grads(grad, channels_first, kOp, "grad");
  const Matrices hiddens(hidden, channels_first, kOp, "hidden");
  LoraExpandBackwardArgs args;
  args.dy = grads.views;
  args.b = bridge::matrix_view(lora_b, kOp, "lora_B");
  args.scale = scaling;
  args.hidden = hiddens.views;
  std::vector<Tensor> outputs;
  std::vector<TensorView> dhidden;
  if (output_mask[0]) {
    outputs.push_back(bridge::empty_same(hidden, bridge::dtype_of(hidden, kOp, "hidden")));
    dhidden = Matrices(outputs.back(), channels_first, kOp, "grad_hidden").views;
    args.dhidden = dhidden;
  }
  if (output_mask[1]) {
    outputs.push_back(bridge::empty({args.b.rows(), args.b.cols()}, args.b.dtype));
    args.db = bridge::matrix_view(outputs.back(), kOp, "grad_B");
  }
  bridge::run([&](const ExecContext& ctx) { return lora_expand_backward(ctx, args); });
  return outputs;
}

}  // namespace loraaccel::operators
