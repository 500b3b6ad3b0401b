// Entry of the binary cross entropy: checks once, runs.
#include <cmath>

#include "losses/loss_call.h"
#include "losses/loss_checks.h"

namespace loraaccel {
namespace {

constexpr const char* kOp = "bce_with_logits";

Status check(const ExecContext& ctx, const BceWithLogitsArgs& args) {
  const LossChecker checker(kOp, ctx.device);
  LORAACCEL_RETURN_IF_ERROR(checker.context(ctx));
  LORAACCEL_RETURN_IF_ERROR(checker.inputs("input", args.x, args.target));
  LORAACCEL_RETURN_IF_ERROR(checker.broadcast("weight", args.weight));
  LORAACCEL_RETURN_IF_ERROR(checker.broadcast("pos_weight", args.pos_weight));
  if (!(args.label_smoothing >= 0 && args.label_smoothing <= 1)) {
    return checker.fail(StatusCode::kInvalidArgument, "label_smoothing is " +
                                                          std::to_string(args.label_smoothing) +
                                                          ", expected a number from 0 to 1");
  }
  if (!(args.focal_gamma >= 0) || std::isinf(args.focal_gamma)) {
    return checker.fail(
        StatusCode::kInvalidArgument,
        "focal_gamma is " + std::to_string(args.focal_gamma) + ", expected a number of at least 0");
  }
  if (args.reduction == LossReduction::kSamples)
    return checker.fail(StatusCode::kInvalidArgument,
                        "the reduction is to samples, expected none, mean or sum");
  return checker.outputs(args.x, args.target, args.reduction, args.upstream, args.loss, args.grad);
}

}  // namespace

Status bce_with_logits(const ExecContext& ctx, const BceWithLogitsArgs& args) {
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check(ctx, args));
    LossCall call;
    call.kind = args.focal_gamma > 0 ? LossKind::kFocalBce : LossKind::kBce;
    call.x = args.x;
    call.target = args.target;
    call.weight = args.weight;
    call.pos_weight = args.pos_weight;
    call.upstream = args.upstream;
    call.smoothing = args.label_smoothing;
    call.focal_gamma = args.focal_gamma;
    // As a number of the targets' type, as which it would be stored among them.
    char rounded[sizeof(double)];
    write_number(args.target.dtype, rounded, 0, args.ignore_index);
    call.ignore_index = read_number(args.target.dtype, rounded, 0);
    call.reduction = args.reduction;
    call.mean_of_kept = args.mean_of_kept;
    call.loss = args.loss;
    call.grad = args.grad;
    return run_loss(ctx, kOp, call);
  });
}

}  // namespace loraaccel
