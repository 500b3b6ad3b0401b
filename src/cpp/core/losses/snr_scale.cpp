// Factors of the samples' losses by their signal-to-noise ratio. One loop: B is the size of a batch.
#include <cmath>

#include "half.h"
#include "losses/loss_call.h"
#include "losses/loss_checks.h"

namespace loraaccel {
namespace {

constexpr const char* kOp = "snr_scale";

Status check(const ExecContext& ctx, const SnrScaleArgs& args) {
  const LossChecker checker(kOp, ctx.device);
  LORAACCEL_RETURN_IF_ERROR(checker.context(ctx));
  LORAACCEL_RETURN_IF_ERROR(
      checker.dense_vector("the SNR table", args.table, args.table.rows(), "T"));
  LORAACCEL_RETURN_IF_ERROR(checker.dense_vector("factors", args.factors, args.count, "B"));
  if (args.count > 0 && args.timesteps == nullptr)
    return checker.fail(StatusCode::kInvalidArgument, "timesteps is null");
  for (int64_t b = 0; b < args.count; ++b) {
    if (args.timesteps[b] >= 0 && args.timesteps[b] < args.table.rows()) continue;
    return checker.fail(StatusCode::kInvalidArgument,
                        "timestep " + std::to_string(args.timesteps[b]) + " of sample " +
                            std::to_string(b) + ", expected one from 0 to " +
                            std::to_string(args.table.rows() - 1));
  }
  return checker.apart("factors", args.factors, {args.table});
}

// The smaller one, and NaN where one is.
template <class T>
T minimum(T a, T b) {
  return a != a || a < b ? a : b;
}

template <class T>
T factor_of(const SnrScaleArgs& args, T snr) {
  const T limited = minimum(snr, static_cast<T>(1000));
  const T scale = limited / (limited + 1);
  T factor = 1;
  if (args.min_snr_gamma > 0)
    factor *=
        minimum(snr, static_cast<T>(args.min_snr_gamma)) / (args.v_prediction ? snr + 1 : snr);
  if (args.scale_v_pred_like_noise_pred) factor *= scale;
  if (args.v_pred_like_loss != 0) factor *= 1 + static_cast<T>(args.v_pred_like_loss) / scale;
  if (args.debiased_estimation)
    factor *= args.v_prediction ? 1 / (limited + 1) : 1 / std::sqrt(limited);
  return factor;
}

}  // namespace

Status snr_scale(const ExecContext& ctx, const SnrScaleArgs& args) {
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check(ctx, args));
    for (int64_t b = 0; b < args.count; ++b) {
      const double snr = read_number(args.table.dtype, args.table.data, args.timesteps[b]);
      const double factor = args.table.dtype == DType::kFloat64
                                ? factor_of<double>(args, snr)
                                : factor_of<float>(args, static_cast<float>(snr));
      write_number(args.factors.dtype, args.factors.data, b, factor);
    }
    return Status();
  });
}

}  // namespace loraaccel
