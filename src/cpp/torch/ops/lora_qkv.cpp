// Several LoRA linear layers over one input: schema and CPU implementation.
#include "loraaccel/lora_qkv.h"

#include <span>
#include <vector>

#include "bridge.h"
#include "ops/adapters.h"

namespace loraaccel {
namespace {

using bridge::OptionalTensor;
using bridge::RowsTensor;
using bridge::Tensor;

// The flat lists of a call, cut into projections.
struct Group {
  std::vector<LoraAdapter> adapters;
  std::vector<std::span<const LoraAdapter>> of;
  int64_t rank = 0;

  Group(const char* op, size_t projections, const std::vector<int64_t>& counts,
        std::vector<LoraAdapter> all)
      : adapters(std::move(all)) {
    int64_t total = 0;
    bool negative = false;
    for (const int64_t n : counts) {
      total += n;
      negative = negative || n < 0;
    }
    if (counts.size() != projections || negative ||
        total != static_cast<int64_t>(adapters.size())) {
      bridge::fail(StatusCode::kInvalidArgument,
                   std::string(op) + ": " + std::to_string(counts.size()) +
                       " counts of adapters with the sum " + std::to_string(total) + ", expected " +
                       std::to_string(projections) + " with the sum " +
                       std::to_string(adapters.size()));
    }
    size_t at = 0;
    for (const int64_t n : counts) {
      of.emplace_back(adapters.data() + at, static_cast<size_t>(n));
      at += static_cast<size_t>(n);
    }
    for (const LoraAdapter& ad : adapters) rank += ad.a.rows();
  }
};

// The tensors of a list that holds those of the true entries only.
std::vector<const Tensor*> spread(const char* op, const char* name, const std::vector<Tensor>& some,
                                  const std::vector<bool>& present, size_t expected) {
  std::vector<const Tensor*> all;
  size_t next = 0;
  for (const bool there : present) {
    if (there && next == some.size()) {
      next = some.size() + 1;
      break;
    }
    all.push_back(there ? &some[next++] : nullptr);
  }
  if (next != some.size() || present.size() != expected) {
    bridge::fail(
        StatusCode::kInvalidArgument,
        std::string(op) + ": " + std::to_string(some.size()) + " " + name + " and " +
            std::to_string(present.size()) +
            " flags, expected one flag for each projection and a tensor for each true one");
  }
  return all;
}

std::tuple<Tensor, Tensor> forward_op(
    const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
    const std::vector<bool>& has_bias, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const std::vector<int64_t>& adapters,
    const std::vector<double>& scalings, const std::vector<double>& dropouts,
    const OptionalTensor& seed) {
  constexpr const char* kOp = "lora_qkv";
  const RowsTensor rows = bridge::rows_view(x, kOp, "x");
  const Group group(kOp, weights.size(), adapters,
                    bridge::adapters_of(kOp, lora_a, lora_b, scalings, dropouts, seed));
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
  const char* kernel = nullptr;
  bridge::throw_if_error(
      lora_qkv_forward(bridge::context(&kernel),
                       {rows.view, projections, bridge::matrix_view(hidden, kOp, "hidden")}));
  bridge::count_kernel(kernel);
  return {std::move(y), std::move(hidden)};
}

std::vector<Tensor> backward_op(const std::vector<Tensor>& grads, const std::vector<bool>& has_grad,
                                const Tensor& x, const std::vector<Tensor>& weights,
                                const std::vector<Tensor>& lora_a,
                                const std::vector<Tensor>& lora_b,
                                const std::vector<int64_t>& adapters, const Tensor& hidden,
                                const std::vector<double>& scalings,
                                const std::vector<double>& dropouts, const OptionalTensor& seed,
                                const std::vector<bool>& output_mask) {
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
                    bridge::adapters_of(kOp, lora_a, lora_b, scalings, dropouts, seed));
  const auto grad = spread(kOp, "grads", grads, has_grad, weights.size());
  const DType dtype = rows.view.dtype;
  LoraQkvBackwardArgs args;
  args.x = rows.view;
  args.h = bridge::matrix_view(hidden, kOp, "hidden");
  std::vector<Tensor> outputs;
  size_t at = 0;
  if (output_mask[at++]) {
    outputs.push_back(bridge::empty_same(x, dtype));
    args.dx = TensorView::matrix(outputs.back().data_ptr(), dtype, args.x.rows(), args.x.cols());
  }
  std::vector<LoraProjectionBackward> projections(weights.size());
  std::vector<RowsTensor> grad_rows(weights.size());
  std::vector<std::vector<TensorView>> da(weights.size());
  std::vector<std::vector<TensorView>> db(weights.size());
  const auto matrix = [&](const TensorView& like, const char* name) {
    outputs.push_back(bridge::empty({like.rows(), like.cols()}, like.dtype));
    return bridge::matrix_view(outputs.back(), kOp, name);
  };
  for (size_t j = 0; j < weights.size(); ++j) {
    LoraProjectionBackward& p = projections[j];
    p.w = bridge::matrix_view(weights[j], kOp, "weight");
    p.adapters = group.of[j];
    if (grad[j] != nullptr) {
      grad_rows[j] = bridge::rows_view(*grad[j], kOp, "grad");
      p.dy = grad_rows[j].view;
    }
    if (output_mask[at++]) p.dw = matrix(p.w, "grad_weight");
    if (output_mask[at++]) {
      outputs.push_back(bridge::empty({p.w.rows()}, dtype));
      p.dbias = bridge::vector_view(outputs.back(), kOp, "grad_bias");
    }
    da[j].resize(p.adapters.size());
    db[j].resize(p.adapters.size());
    for (size_t i = 0; i < p.adapters.size(); ++i) {
      if (output_mask[at++]) da[j][i] = matrix(p.adapters[i].a, "grad_A");
      if (output_mask[at++]) db[j][i] = matrix(p.adapters[i].b, "grad_B");
    }
    p.da = da[j];
    p.db = db[j];
  }
  args.projections = projections;
  const char* kernel = nullptr;
  bridge::throw_if_error(lora_qkv_backward(bridge::context(&kernel), args));
  bridge::count_kernel(kernel);
  return outputs;
}

}  // namespace
}  // namespace loraaccel

STABLE_TORCH_LIBRARY_FRAGMENT(loraaccel, m) {
  // Returns the outputs of all projections side by side, y [..., sum of N], and the rank activations [M, sum of R].
  // biases: only those that there are; lora_A, lora_B, scalings, dropouts: of all projections, `adapters` counts each's.
  m.def(
      "lora_qkv(Tensor x, Tensor[] weights, Tensor[] biases, bool[] has_bias, Tensor[] lora_A, "
      "Tensor[] lora_B, int[] adapters, float[] scalings, float[] dropouts, Tensor? seed) -> "
      "(Tensor, Tensor)");
  // grads: of the projections whose output got one. Returns the gradients that output_mask asks for, in its order: x,
  // then of each projection weight, bias, and A and B of each adapter.
  m.def(
      "lora_qkv_backward(Tensor[] grads, bool[] has_grad, Tensor x, Tensor[] weights, Tensor[] "
      "lora_A, Tensor[] lora_B, int[] adapters, Tensor hidden, float[] scalings, float[] dropouts, "
      "Tensor? seed, bool[] output_mask) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(loraaccel, CPU, m) {
  m.impl("lora_qkv", TORCH_BOX(&loraaccel::forward_op));
  m.impl("lora_qkv_backward", TORCH_BOX(&loraaccel::backward_op));
}
