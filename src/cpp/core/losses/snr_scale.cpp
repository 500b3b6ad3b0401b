// What the samples' losses take by timestep. Single loops: B is the size of a batch.
#include <cmath>

#include "half.h"
#include "losses/loss_call.h"
#include "losses/loss_checks.h"

namespace loraaccel {
namespace {

Status check(const char* op, const ExecContext& ctx, const int64_t* timesteps, int64_t count,
             const TensorView& table, const TensorView& out) {
  const LossChecker checker(op, ctx.device);
  LORAACCEL_RETURN_IF_ERROR(checker.context(ctx));
  LORAACCEL_RETURN_IF_ERROR(checker.dense_vector("the table", table, table.rows(), "T"));
  LORAACCEL_RETURN_IF_ERROR(checker.dense_vector("the result", out, count, "B"));
  if (count > 0 && timesteps == nullptr)
    return checker.fail(StatusCode::kInvalidArgument, "timesteps is null");
  for (int64_t b = 0; b < count; ++b) {
    if (timesteps[b] >= 0 && timesteps[b] < table.rows()) continue;
    return checker.fail(StatusCode::kInvalidArgument, "timestep " + std::to_string(timesteps[b]) +
                                                          " of sample " + std::to_string(b) +
                                                          ", expected one from 0 to " +
                                                          std::to_string(table.rows() - 1));
  }
  return checker.apart("the result", out, {table});
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

template <class T>
T threshold_of(T cumulative, T c) {
  const T root = 1 + std::sqrt((1 - cumulative) / cumulative);
  return (1 - c) / (root * root) + c;
}

}  // namespace

Status snr_scale(const ExecContext& ctx, const SnrScaleArgs& args) {
  constexpr const char* kOp = "snr_scale";
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(
        check(kOp, ctx, args.timesteps, args.count, args.table, args.factors));
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

Status huber_threshold(const ExecContext& ctx, const HuberThresholdArgs& args) {
  constexpr const char* kOp = "huber_threshold";
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(
        check(kOp, ctx, args.timesteps, args.count, args.table, args.thresholds));
    for (int64_t b = 0; b < args.count; ++b) {
      const double a = read_number(args.table.dtype, args.table.data, args.timesteps[b]);
      const double c =
          args.table.dtype == DType::kFloat64
              ? threshold_of<double>(a, args.huber_c)
              : threshold_of<float>(static_cast<float>(a), static_cast<float>(args.huber_c));
      write_number(args.thresholds.dtype, args.thresholds.data, b, c);
    }
    return Status();
  });
}

}  // namespace loraaccel
