// lora_linear with gradients, for programs that link libtorch: the operators of the Python package from C++.
//
// Header-only, compiled against the program's own libtorch (2.13 or newer, C++20). The operators are found by name when
// first called, so libloraaccel must be in the process: link loraaccel::autograd, which keeps it there, or dlopen it.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/randint.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace loraaccel {

// One adapter on a layer [N, K].
struct LoraTensors {
  at::Tensor lora_A;   // [R, K]
  at::Tensor lora_B;   // [N, R]  dtype of lora_A
  double scaling = 1;  // alpha / R, already divided; finite
  // Probabilities, in force while training.
  double input_dropout = 0;   // of elements of x
  double hidden_dropout = 0;  // of rank activations
  double rank_dropout = 0;    // of whole ranks of a sample, an index of x's first dimension
};

struct LoraLinearOptions {
  double input_dropout = 0;
  double hidden_dropout = 0;
  double rank_dropout = 0;
  bool training = true;
};

namespace autograd_detail {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;
using Numbers = at::ArrayRef<double>;

using ForwardOp = std::tuple<Tensor, Tensor>(const Tensor& x, const Tensor& weight,
                                             const OptionalTensor& bias, at::TensorList lora_A,
                                             at::TensorList lora_B, Numbers scalings,
                                             Numbers dropouts, const OptionalTensor& seed,
                                             const OptionalTensor& packed, Numbers rank_dropouts,
                                             const OptionalTensor& adapter_ids,
                                             const OptionalTensor& rank_factors);
using BackwardOp = std::vector<Tensor>(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                       at::TensorList lora_A, at::TensorList lora_B,
                                       const Tensor& hidden, Numbers scalings, Numbers dropouts,
                                       const OptionalTensor& seed, at::ArrayRef<bool> output_mask,
                                       const OptionalTensor& packed, Numbers rank_dropouts,
                                       const OptionalTensor& adapter_ids,
                                       const OptionalTensor& rank_factors);

template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  TORCH_CHECK(
      op.has_value(), name,
      ": no such operator, expected libloraaccel in the process (link loraaccel::autograd)");
  return op->typed<Signature>();
}

// Identity whose own gradient is an error. Without it the outputs of a backward pass would be constants to autograd, and
// a second derivative silently zero.
struct NoSecondDerivative : torch::autograd::Function<NoSecondDerivative> {
  static variable_list forward(AutogradContext*, at::TensorList grads) {
    variable_list out;
    for (const Tensor& g : grads) out.push_back(g.detach());
    return out;
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(
        false,
        "loraaccel::lora_linear: the gradient of a gradient (create_graph) is not supported");
  }
};

struct LoraLinearFunction : torch::autograd::Function<LoraLinearFunction> {
  // `adapters` holds A and B of each adapter in turn.
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, at::TensorList adapters,
                        const std::vector<double>& scalings, const std::vector<double>& dropouts,
                        const std::vector<double>& rank_dropouts, const OptionalTensor& seed) {
    static const auto op = find_op<ForwardOp>("loraaccel::lora_linear");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [a, b] = unzip(adapters);
    auto [y, hidden] = op.call(x, weight, bias, a, b, scalings, dropouts, seed, std::nullopt,
                               rank_dropouts, std::nullopt, std::nullopt);
    variable_list saved = {x, weight, std::move(hidden), seed.value_or(Tensor())};
    saved.insert(saved.end(), adapters.begin(), adapters.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["scalings"] = scalings;
    ctx->saved_data["dropouts"] = dropouts;
    ctx->saved_data["rank_dropouts"] = rank_dropouts;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<BackwardOp>("loraaccel::lora_linear_backward");
    const variable_list saved = ctx->get_saved_variables();
    const auto adapters = at::TensorList(saved).slice(4);
    const bool has_bias = ctx->saved_data["has_bias"].toBool();

    // Edges of the graph: x, weight, bias where there is one, the adapters. output_mask always has a place for bias.
    c10::SmallVector<bool, 16> mask = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                       has_bias && ctx->needs_input_grad(2)};
    const size_t first_adapter = has_bias ? 3 : 2;
    for (size_t i = 0; i < adapters.size(); ++i)
      mask.push_back(ctx->needs_input_grad(first_adapter + i));

    variable_list wanted;
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const auto [a, b] = unzip(adapters);
      const OptionalTensor seed = saved[3].defined() ? OptionalTensor(saved[3]) : std::nullopt;
      wanted =
          op.call(grads[0], saved[0], saved[1], a, b, saved[2],
                  ctx->saved_data["scalings"].toDoubleVector(),
                  ctx->saved_data["dropouts"].toDoubleVector(), seed,
                  at::ArrayRef<bool>(mask.data(), mask.size()), std::nullopt,
                  ctx->saved_data["rank_dropouts"].toDoubleVector(), std::nullopt, std::nullopt);
    }
    if (at::GradMode::is_enabled()) {  // the caller builds a graph of this backward pass
      for (Tensor& g : wanted) g = g.detach().requires_grad_();
      if (!wanted.empty()) wanted = NoSecondDerivative::apply(at::TensorList(wanted));
    }

    // One entry per argument of forward(), the list of adapters flattened; undefined where nothing is wanted.
    variable_list out(mask.size() + 4);
    auto next = wanted.begin();
    for (size_t i = 0; i < mask.size(); ++i) {
      if (mask[i]) out[i] = std::move(*next++);
    }
    return out;
  }

 private:
  static std::pair<variable_list, variable_list> unzip(at::TensorList adapters) {
    std::pair<variable_list, variable_list> lists;
    for (size_t i = 0; i < adapters.size(); i += 2) {
      lists.first.push_back(adapters[i]);
      lists.second.push_back(adapters[i + 1]);
    }
    return lists;
  }
};

// The rest is checked in the operator, which cannot be called with these.
inline void check_operand(const char* name, const Tensor& t, const Tensor& x) {
  TORCH_CHECK_VALUE(t.defined(), "loraaccel::lora_linear: ", name,
                    " is undefined, expected a tensor");
  TORCH_CHECK_VALUE(t.device() == x.device(), "loraaccel::lora_linear: ", name, " is on ",
                    t.device(), ", expected ", x.device(), " as x");
}

}  // namespace autograd_detail

// LoRA linear layer with any number of adapters on one input; D_i is the input dropout of adapter i and H_i the factors of
// the dropouts of its rank activations, identities unless `training`:
//
//   y = x W^T + bias + sum_i scaling_i (H_i . (D_i(x) A_i^T)) B_i^T
//
// x [..., K], weight [N, K], bias [N] or none (an undefined tensor is none too), y [..., N]. Any strides, any leading
// dimensions, zero rows, no adapters.
// x, weight and bias share a dtype: float32, float64, bfloat16 or float16; y has it too. The adapters share it, or are
// float32 beside 16-bit operands or 16-bit beside float32. Autocast is not looked at: cast the operands before.
//
// Gradients reach x, weight, bias and the adapters, each in its own dtype, where they require one. A second derivative
// throws when it is asked for. A dropout mask is a function of two numbers drawn from torch's default CPU generator: it
// follows torch::manual_seed, differs between adapters, and is recomputed in the backward pass instead of stored.
//
// Throws std::exception (c10::Error, std::runtime_error) naming the argument, what was found and what was expected, for
// wrong shapes, dtypes or devices, a scaling that is not finite or a probability outside [0, 1].
// Thread-safe as torch's own operators are.
inline at::Tensor lora_linear(const at::Tensor& x, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias,
                              std::span<const LoraTensors> adapters, bool training = true) {
  using autograd_detail::check_operand;
  const bool has_bias = bias.has_value() && bias->defined();
  check_operand("x", x, x);
  check_operand("weight", weight, x);
  if (has_bias) check_operand("bias", *bias, x);
  std::vector<at::Tensor> tensors;
  std::vector<double> scalings, dropouts, rank_dropouts;
  bool drops = false;
  bool drops_ranks = false;
  // A probability that is none reaches the operator's check, training or not.
  const auto in_force = [&](double p) { return training || !(p >= 0 && p <= 1) ? p : 0; };
  for (const LoraTensors& ad : adapters) {
    check_operand("lora_A", ad.lora_A, x);
    check_operand("lora_B", ad.lora_B, x);
    tensors.insert(tensors.end(), {ad.lora_A, ad.lora_B});
    scalings.push_back(ad.scaling);
    dropouts.push_back(in_force(ad.input_dropout));
    drops = drops || dropouts.back() != 0;
    for (const double p : {in_force(ad.hidden_dropout), in_force(ad.rank_dropout)}) {
      rank_dropouts.push_back(p);
      drops_ranks = drops_ranks || p != 0;
    }
  }
  if (!drops_ranks) rank_dropouts.clear();
  std::optional<at::Tensor> seed;
  if (drops || drops_ranks)
    seed = at::randint(int64_t{1} << 62, {2}, at::kLong);  // as the Python package draws it
  return autograd_detail::LoraLinearFunction::apply(x, weight, has_bias ? bias : std::nullopt,
                                                    at::TensorList(tensors), scalings, dropouts,
                                                    rank_dropouts, seed);
}

// The same with one adapter: lora_A [R, K], lora_B [N, R], scaling = alpha / R.
inline at::Tensor lora_linear(const at::Tensor& x, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, const at::Tensor& lora_A,
                              const at::Tensor& lora_B, double scaling = 1,
                              const LoraLinearOptions& options = {}) {
  const LoraTensors adapter = {
      lora_A, lora_B, scaling, options.input_dropout, options.hidden_dropout, options.rank_dropout};
  return lora_linear(x, weight, bias, {&adapter, 1}, options.training);
}

}  // namespace loraaccel
