// Entry of the losses of diffusion training: checks once, runs.
#include "losses/loss_call.h"
#include "losses/loss_checks.h"

namespace loraaccel {
namespace {

constexpr const char* kOp = "diffusion_loss";

bool needs_c(DiffusionLossType type) {
  return type == DiffusionLossType::kHuber || type == DiffusionLossType::kSmoothL1;
}

Status check_huber_c(const LossChecker& checker, const DiffusionLossArgs& args) {
  if (!needs_c(args.type)) return Status();
  if (!args.huber_c.defined()) {
    return checker.fail(StatusCode::kInvalidArgument,
                        "huber_c is missing, expected a number above 0 for each sample");
  }
  LORAACCEL_RETURN_IF_ERROR(checker.dense_vector("huber_c", args.huber_c, args.pred.rows(), "B"));
  for (int64_t b = 0; b < args.huber_c.rows(); ++b) {
    const double c = read_number(args.huber_c.dtype, args.huber_c.data, b);
    if (c > 0) continue;
    return checker.fail(StatusCode::kInvalidArgument, "huber_c of sample " + std::to_string(b) +
                                                          " is " + std::to_string(c) +
                                                          ", expected a number above 0");
  }
  return Status();
}

Status check(const ExecContext& ctx, const DiffusionLossArgs& args) {
  const LossChecker checker(kOp, ctx.device);
  LORAACCEL_RETURN_IF_ERROR(checker.context(ctx));
  LORAACCEL_RETURN_IF_ERROR(checker.inputs("pred", args.pred, args.target));
  LORAACCEL_RETURN_IF_ERROR(checker.broadcast("mask", args.mask));
  LORAACCEL_RETURN_IF_ERROR(check_huber_c(checker, args));
  const int64_t samples = args.pred.rows();
  if (args.factors.defined())
    LORAACCEL_RETURN_IF_ERROR(checker.dense_vector("factors", args.factors, samples, "B"));
  if (args.per_sample.defined())
    LORAACCEL_RETURN_IF_ERROR(checker.dense_vector("per_sample", args.per_sample, samples, "B"));
  return checker.outputs(args.pred, args.target, args.reduction, args.upstream, args.loss,
                         args.grad);
}

LossKind kind_of(DiffusionLossType type) {
  switch (type) {
    case DiffusionLossType::kL1:
      return LossKind::kL1;
    case DiffusionLossType::kHuber:
      return LossKind::kHuber;
    case DiffusionLossType::kSmoothL1:
      return LossKind::kSmoothL1;
    case DiffusionLossType::kL2:
      break;
  }
  return LossKind::kL2;
}

}  // namespace

Status diffusion_loss(const ExecContext& ctx, const DiffusionLossArgs& args) {
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check(ctx, args));
    LossCall call;
    call.kind = kind_of(args.type);
    call.x = args.pred;
    call.target = args.target;
    call.weight = args.mask;
    call.factors = args.factors;
    if (needs_c(args.type)) call.huber_c = args.huber_c;
    call.upstream = args.upstream;
    call.reduction = args.reduction;
    call.mean_of_kept = args.mean_of_kept;
    call.loss = args.loss;
    call.per_sample = args.per_sample;
    call.grad = args.grad;
    return run_loss(ctx, kOp, call);
  });
}

}  // namespace loraaccel
