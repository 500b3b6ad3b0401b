// Entry of the adapters alone: checks once, picks once.
#include "loraaccel/lora_delta.h"

#include "lora/checks.h"
#include "lora/lora_linear_kernels.h"
#include "lora/lora_own.h"
#include "lora/lora_rank.h"
#include "lora/operands.h"
#include "lora/plain.h"

namespace loraaccel {
namespace {

// A frozen weight of the right shape, for the checks of adapters that name it.
TensorView weight_shape(const TensorView& x, int64_t outputs) {
  return TensorView::strided(nullptr, x.dtype, outputs, x.cols(), 0, 0);
}

Status check_common(const Checker& check, const ExecContext& ctx, const TensorView& x,
                    std::span<const LoraAdapter> adapters, const TensorView& out,
                    const char* out_name, const DropoutSpec& output, const LoraSamples& samples) {
  LORAACCEL_RETURN_IF_ERROR(check.context(ctx));
  LORAACCEL_RETURN_IF_ERROR(check.input(x));
  if (adapters.empty())
    return check.fail(StatusCode::kInvalidArgument, "no adapters, expected at least one");
  if (out.ndim != 2) {
    return check.fail(StatusCode::kShapeMismatch, std::string(out_name) + " has shape " +
                                                      shape_text(out) + ", expected [M, N]");
  }
  LORAACCEL_RETURN_IF_ERROR(check.matrix(out_name, out, x.rows(), out.cols(), "M, N"));
  if ((out.dtype == DType::kFloat64) != (x.dtype == DType::kFloat64)) {
    return check.fail(StatusCode::kUnsupportedDtype,
                      std::string(out_name) + " is " + dtype_name(out.dtype) + " and x " +
                          dtype_name(x.dtype) + ", expected both float64 or neither");
  }
  const TensorView w = weight_shape(x, out.cols());
  bool dropout = false;
  for (const LoraAdapter& ad : adapters) {
    LORAACCEL_RETURN_IF_ERROR(check.adapter(ad, x, w));
    dropout = dropout || ad.dropout.p > 0;
  }
  LORAACCEL_RETURN_IF_ERROR(check.probability("output_dropout", output.p));
  return check.samples(samples, x, adapters.size(), dropout);
}

Status check_forward(const ExecContext& ctx, const LoraDeltaArgs& args) {
  const Checker check("lora_delta", ctx.device);
  LORAACCEL_RETURN_IF_ERROR(check_common(check, ctx, args.x, args.adapters, args.base, "base",
                                         args.output, args.samples));
  LORAACCEL_RETURN_IF_ERROR(check.matrix("y", args.y, args.x.rows(), args.base.cols(), "M, N"));
  LORAACCEL_RETURN_IF_ERROR(check.dtype("y", args.y, args.base.dtype, "base"));
  LORAACCEL_RETURN_IF_ERROR(check.hidden(args.h, args.x, total_rank(args.adapters)));
  const bool in_place = args.y.data == args.base.data && args.y.stride[0] == args.base.stride[0] &&
                        args.y.stride[1] == args.base.stride[1];
  LORAACCEL_RETURN_IF_ERROR(check.apart(
      "y", args.y, {args.x, args.h, in_place ? TensorView() : args.base}, args.adapters));
  return check.apart("hidden", args.h, {args.x, args.base}, args.adapters);
}

Status check_backward(const ExecContext& ctx, const LoraDeltaBackwardArgs& args) {
  const Checker check("lora_delta_backward", ctx.device);
  LORAACCEL_RETURN_IF_ERROR(
      check_common(check, ctx, args.x, args.adapters, args.dy, "grad", args.output, args.samples));
  bool needs_hidden = false;
  LORAACCEL_RETURN_IF_ERROR(
      check.adapter_gradients(args.adapters, args.da, args.db, &needs_hidden));
  if (args.dx.defined()) {
    LORAACCEL_RETURN_IF_ERROR(
        check.matrix("grad_x", args.dx, args.x.rows(), args.x.cols(), "M, K"));
    LORAACCEL_RETURN_IF_ERROR(check.dtype("grad_x", args.dx, args.x.dtype, "x"));
  }
  if (needs_hidden)
    LORAACCEL_RETURN_IF_ERROR(check.hidden(args.h, args.x, total_rank(args.adapters)));
  const auto inputs = {args.dy, args.x, needs_hidden ? args.h : TensorView()};
  LORAACCEL_RETURN_IF_ERROR(check.apart("grad_x", args.dx, inputs, args.adapters));
  for (size_t i = 0; i < args.adapters.size(); ++i) {
    LORAACCEL_RETURN_IF_ERROR(check.apart("grad_A", args.da[i], inputs, args.adapters));
    LORAACCEL_RETURN_IF_ERROR(check.apart("grad_B", args.db[i], inputs, args.adapters));
  }
  return Status();
}

}  // namespace

Status lora_delta_forward(const ExecContext& ctx, const LoraDeltaArgs& args) {
  constexpr const char* kOp = "lora_delta";
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check_forward(ctx, args));
    const LoraSimd* table = nullptr;
    LORAACCEL_RETURN_IF_ERROR(
        choose_table(kOp, ctx, args.x.dtype, has_unit_columns(args.y), &table));
    return table == nullptr ? lora_delta_forward_ref(ctx, args)
                            : lora_delta_forward_own(*table, ctx, kOp, args);
  });
}

Status lora_delta_backward(const ExecContext& ctx, const LoraDeltaBackwardArgs& args) {
  constexpr const char* kOp = "lora_delta_backward";
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check_backward(ctx, args));
    const LoraSimd* table = nullptr;
    const bool unit_columns = !args.dx.defined() || has_unit_columns(args.dx);
    LORAACCEL_RETURN_IF_ERROR(choose_table(kOp, ctx, args.x.dtype, unit_columns, &table));
    return table == nullptr ? lora_delta_backward_ref(ctx, kOp, args)
                            : lora_delta_backward_own(*table, ctx, kOp, args);
  });
}

}  // namespace loraaccel
