// Entry of the operators of linear layers: checks once, picks once. A single layer is a group of one projection.
#include "loraaccel/lora_qkv.h"

#include "kernel_choice.h"
#include "lora/checks.h"
#include "lora/lora_group.h"
#include "lora/lora_linear_kernels.h"
#include "lora/lora_rank.h"

namespace loraaccel {
namespace {

// `out` shares no memory with the operands of any projection.
template <class Projections>
Status apart_from_all(const Checker& check, const char* name, const TensorView& out,
                      std::initializer_list<TensorView> inputs, const Projections& projections) {
  LORAACCEL_RETURN_IF_ERROR(check.apart(name, out, inputs, {}));
  for (const auto& p : projections)
    LORAACCEL_RETURN_IF_ERROR(check.apart(name, out, {p.w}, p.adapters));
  return Status();
}

// Of all layers.
template <class Projections>
Status check_samples(const Checker& check, const TensorView& x, const LoraSamples& samples,
                     const Projections& projections) {
  size_t adapters = SIZE_MAX;
  bool dropout = false;
  for (const auto& p : projections) {
    adapters = std::min(adapters, p.adapters.size());
    for (const LoraAdapter& ad : p.adapters) dropout = dropout || ad.dropout.p > 0;
  }
  return check.samples(samples, x, adapters, dropout);
}

}  // namespace

Status check_group_forward(const LayerNames& names, const ExecContext& ctx,
                           const LoraQkvArgs& args) {
  Checker check(names.op, ctx.device);
  LORAACCEL_RETURN_IF_ERROR(check.context(ctx));
  LORAACCEL_RETURN_IF_ERROR(check.input(args.x));
  if (args.projections.empty())
    return check.fail(StatusCode::kInvalidArgument, "no projections, expected at least one");
  int64_t rank = 0;
  for (size_t j = 0; j < args.projections.size(); ++j) {
    const LoraProjection& p = args.projections[j];
    check.set_layer(names.layer(j));
    LORAACCEL_RETURN_IF_ERROR(
        check.layer(args.x, p.w, p.adapters, p.packed_w, WeightUse::kForward));
    if (p.bias.defined()) {
      LORAACCEL_RETURN_IF_ERROR(check.vector("bias", p.bias, p.w.rows(), "N"));
      LORAACCEL_RETURN_IF_ERROR(check.bias_dtype("bias", p.bias, args.x.dtype, "x"));
    }
    LORAACCEL_RETURN_IF_ERROR(check.matrix("y", p.y, args.x.rows(), p.w.rows(), "M, N"));
    LORAACCEL_RETURN_IF_ERROR(check.dtype("y", p.y, args.x.dtype, "x"));
    LORAACCEL_RETURN_IF_ERROR(apart_from_all(check, "y", p.y, {args.x, p.bias}, args.projections));
    rank += total_rank(p.adapters);
  }
  check.set_layer(names.all);
  LORAACCEL_RETURN_IF_ERROR(check_samples(check, args.x, args.samples, args.projections));
  if (rank == 0) return Status();
  LORAACCEL_RETURN_IF_ERROR(check.hidden(args.h, args.x, rank));
  return apart_from_all(check, "hidden", args.h, {args.x}, args.projections);
}

namespace {

Status check_gradients(const Checker& check, const LoraQkvBackwardArgs& args,
                       const LoraProjectionBackward& p, bool* needs_hidden) {
  const DType dtype = args.x.dtype;
  if (p.dy.defined()) {
    LORAACCEL_RETURN_IF_ERROR(check.matrix("grad", p.dy, args.x.rows(), p.w.rows(), "M, N"));
    LORAACCEL_RETURN_IF_ERROR(check.dtype("grad", p.dy, dtype, "x"));
  }
  if (p.dw.defined()) {
    LORAACCEL_RETURN_IF_ERROR(check.matrix("grad_weight", p.dw, p.w.rows(), p.w.cols(), "N, K"));
    LORAACCEL_RETURN_IF_ERROR(check.dtype("grad_weight", p.dw, dtype, "weight"));
  }
  if (p.dbias.defined()) {
    LORAACCEL_RETURN_IF_ERROR(check.vector("grad_bias", p.dbias, p.w.rows(), "N"));
    LORAACCEL_RETURN_IF_ERROR(check.bias_dtype("grad_bias", p.dbias, dtype, "weight"));
  }
  return check.adapter_gradients(p.adapters, p.da, p.db, needs_hidden);
}

}  // namespace

Status check_group_backward(const LayerNames& names, const ExecContext& ctx,
                            const LoraQkvBackwardArgs& args) {
  Checker check(names.op, ctx.device);
  LORAACCEL_RETURN_IF_ERROR(check.context(ctx));
  LORAACCEL_RETURN_IF_ERROR(check.input(args.x));
  if (args.projections.empty())
    return check.fail(StatusCode::kInvalidArgument, "no projections, expected at least one");
  bool needs_hidden = false;
  int64_t rank = 0;
  for (size_t j = 0; j < args.projections.size(); ++j) {
    const LoraProjectionBackward& p = args.projections[j];
    check.set_layer(names.layer(j));
    LORAACCEL_RETURN_IF_ERROR(
        check.layer(args.x, p.w, p.adapters, p.packed_w, WeightUse::kInputGradient));
    LORAACCEL_RETURN_IF_ERROR(check_gradients(check, args, p, &needs_hidden));
    rank += total_rank(p.adapters);
  }
  check.set_layer(names.all);
  LORAACCEL_RETURN_IF_ERROR(check_samples(check, args.x, args.samples, args.projections));
  if (args.dx.defined()) {
    LORAACCEL_RETURN_IF_ERROR(
        check.matrix("grad_x", args.dx, args.x.rows(), args.x.cols(), "M, K"));
    LORAACCEL_RETURN_IF_ERROR(check.dtype("grad_x", args.dx, args.x.dtype, "x"));
  }
  if (needs_hidden) LORAACCEL_RETURN_IF_ERROR(check.hidden(args.h, args.x, rank));
  const TensorView hidden = needs_hidden ? args.h : TensorView();
  for (const LoraProjectionBackward& source : args.projections) {
    const auto inputs = {source.dy, args.x, source.w, hidden};
    LORAACCEL_RETURN_IF_ERROR(check.apart("grad_x", args.dx, inputs, source.adapters));
    for (const LoraProjectionBackward& p : args.projections) {
      LORAACCEL_RETURN_IF_ERROR(check.apart("grad_weight", p.dw, inputs, source.adapters));
      LORAACCEL_RETURN_IF_ERROR(check.apart("grad_bias", p.dbias, inputs, source.adapters));
      for (size_t i = 0; i < p.adapters.size(); ++i) {
        LORAACCEL_RETURN_IF_ERROR(check.apart("grad_A", p.da[i], inputs, source.adapters));
        LORAACCEL_RETURN_IF_ERROR(check.apart("grad_B", p.db[i], inputs, source.adapters));
      }
    }
  }
  return Status();
}

namespace {

// Threads that pay: a share of the work below some microseconds costs more to hand out than to do. The result of our
// own kernels does not depend on their number.
ExecContext with_useful_threads(const ExecContext& ctx, double multiplications) {
  constexpr double kPerThread = 1e6;
  ExecContext limited = ctx;
  const double useful = std::max(1.0, multiplications / kPerThread);
  if (useful < ctx.num_threads) limited.num_threads = static_cast<int>(useful);
  return limited;
}

template <class Args>
double multiplications(const Args& args) {
  double sum = 0;
  for (const auto& p : args.projections) {
    const double rank = static_cast<double>(total_rank(p.adapters));
    const auto inputs = static_cast<double>(p.w.cols());
    const auto outputs = static_cast<double>(p.w.rows());
    sum += static_cast<double>(args.x.rows()) * (inputs * outputs + rank * (inputs + outputs));
  }
  return sum;
}

template <class Args, class Declines, class Run>
Status run_kernel(const char* op, const ExecContext& ctx, const Args& args,
                  const Declines& declines, const Run& run) {
  const auto list =
      ctx.device == DeviceType::kCUDA ? lora_linear_cuda_kernels() : lora_linear_kernels();
  Status status;
  const auto* kernel = choose_kernel<LoraLinearKernel>(
      op, list, ctx, [&](const LoraLinearKernel& k) { return (k.*declines)(ctx, args); }, &status);
  if (kernel == nullptr) return status;
  return (kernel->*run)(with_useful_threads(ctx, multiplications(args)), op, args);
}

}  // namespace

std::string LayerNames::layer(size_t j) const {
  if (single) return {};
  return names.empty() ? "projection " + std::to_string(j) : names[j];
}

Status run_group_forward(const char* op, const ExecContext& ctx, const LoraQkvArgs& args) {
  return run_kernel(op, ctx, args, &LoraLinearKernel::declines_forward, &LoraLinearKernel::forward);
}

Status run_group_backward(const char* op, const ExecContext& ctx, const LoraQkvBackwardArgs& args) {
  return run_kernel(op, ctx, args, &LoraLinearKernel::declines_backward,
                    &LoraLinearKernel::backward);
}

Status group_forward(const LayerNames& names, const ExecContext& ctx, const LoraQkvArgs& args) {
  return without_exceptions(names.op, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check_group_forward(names, ctx, args));
    return run_group_forward(names.op, ctx, args);
  });
}

Status group_backward(const LayerNames& names, const ExecContext& ctx,
                      const LoraQkvBackwardArgs& args) {
  return without_exceptions(names.op, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check_group_backward(names, ctx, args));
    return run_group_backward(names.op, ctx, args);
  });
}

Status lora_qkv_forward(const ExecContext& ctx, const LoraQkvArgs& args) {
  return group_forward({.op = "lora_qkv"}, ctx, args);
}

Status lora_qkv_backward(const ExecContext& ctx, const LoraQkvBackwardArgs& args) {
  return group_backward({.op = "lora_qkv_backward"}, ctx, args);
}

Status lora_linear_forward(const ExecContext& ctx, const LoraLinearArgs& args) {
  LoraProjection projection;
  projection.w = args.w;
  projection.bias = args.bias;
  projection.adapters = args.adapters;
  projection.y = args.y;
  projection.packed_w = args.packed_w;
  return group_forward({.op = "lora_linear", .single = true}, ctx,
                       {args.x, {&projection, 1}, args.h, args.samples});
}

Status lora_linear_backward(const ExecContext& ctx, const LoraLinearBackwardArgs& args) {
  const LayerNames names = {.op = "lora_linear_backward", .single = true};
  if (!args.dy.defined()) {
    return Checker(names.op, ctx.device)
        .fail(StatusCode::kShapeMismatch, "grad has shape (undefined), expected [M, N]");
  }
  LoraProjectionBackward projection;
  projection.dy = args.dy;
  projection.w = args.w;
  projection.adapters = args.adapters;
  projection.dw = args.grads.dw;
  projection.dbias = args.grads.dbias;
  projection.da = args.grads.da;
  projection.db = args.grads.db;
  projection.packed_w = args.packed_w;
  return group_backward(names, ctx,
                        {args.x, {&projection, 1}, args.h, args.grads.dx, args.samples});
}

}  // namespace loraaccel
