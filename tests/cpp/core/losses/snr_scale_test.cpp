// Factors of the samples' losses by their signal-to-noise ratio.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "loraaccel/losses.h"
#include "support/host.h"
#include "support/operand.h"

namespace loraaccel::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Of the SNRs themselves: each is a table's only entry.
double factor(double snr, SnrScaleArgs args, DType dtype = DType::kFloat32) {
  TestHost host;
  const int64_t timestep = 0;
  const Operand table = Operand::vector(dtype, 1, Layout::kDense, [snr] { return snr; });
  const Operand out = Operand::vector_output(dtype, 1);
  args.timesteps = &timestep;
  args.count = 1;
  args.table = table.view();
  args.factors = out.view();
  const Status status = snr_scale(host.context(), args);
  EXPECT_TRUE(status.ok()) << status.message();
  return out.at(0);
}

// VL1
TEST(SnrScale, MinSnrForNoiseAndForV) {
  const double snrs[] = {1e-6, 1, 5, 25, kInfinity};
  const double noise[] = {1, 1, 1, 0.2, 0};
  const double v[] = {1e-6, 0.5, 5.0 / 6, 5.0 / 26, 0};
  for (int i = 0; i < 5; ++i) {
    EXPECT_NEAR(factor(snrs[i], {.min_snr_gamma = 5}), noise[i], 1e-7);
    EXPECT_NEAR(factor(snrs[i], {.min_snr_gamma = 5, .v_prediction = true}), v[i], 1e-7);
  }
  EXPECT_EQ(factor(25, {.min_snr_gamma = 0}), 1);  // 0 is off
  EXPECT_TRUE(std::isnan(factor(0, {.min_snr_gamma = 5})));
}

TEST(SnrScale, KnownVectors) {
  const struct {
    double snr, min_snr, min_snr_v, debiased, debiased_v;
  } cases[] = {
      {1175.47, 0.00425361557, 0.00425, 0.0316227766, 1.0 / 1001},
      {8.45389371, 0.591443443, 0.528882612, 0.343931226, 0.105776522},
      {0.381850441, 1, 0.276332684, 1.61827883, 1 / 1.381850441},
      {0.00468191671, 1, 0.00468191671 / 1.00468191671, 14.6146412, 1 / 1.00468191671},
  };
  for (const auto& c : cases) {
    EXPECT_NEAR(factor(c.snr, {.min_snr_gamma = 5}), c.min_snr, 1e-5 * c.min_snr);
    EXPECT_NEAR(factor(c.snr, {.min_snr_gamma = 5, .v_prediction = true}), c.min_snr_v,
                1e-5 * c.min_snr_v);
    EXPECT_NEAR(factor(c.snr, {.debiased_estimation = true}), c.debiased, 1e-6 * c.debiased);
    EXPECT_NEAR(factor(c.snr, {.debiased_estimation = true, .v_prediction = true}), c.debiased_v,
                1e-6);
  }
  EXPECT_NEAR(factor(8.45389371, {.scale_v_pred_like_noise_pred = true}), 0.894223478, 1e-6);
  EXPECT_NEAR(factor(8.45389371, {.v_pred_like_loss = 0.5}), 1 + 0.5 / 0.894223478, 1e-6);
}

TEST(SnrScale, AllOfThemMultiply) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    const double snr = 2.5;
    const double s = snr / (snr + 1);
    EXPECT_NEAR(factor(snr,
                       {.min_snr_gamma = 2,
                        .scale_v_pred_like_noise_pred = true,
                        .v_pred_like_loss = 0.25,
                        .debiased_estimation = true},
                       dtype),
                2 / snr * s * (1 + 0.25 / s) / std::sqrt(snr),
                dtype == DType::kFloat64 ? 1e-15 : 1e-6);
  }
}

TEST(HuberThreshold, FollowsTheSchedule) {
  TestHost host;
  const double cumulative[] = {0.99915, 0.5, 0.004660099, 0};
  const double expected[] = {0, 0, 0.103691293, 0.1};
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (int64_t t = 0; t < 4; ++t) {
      int64_t i = 0;
      const Operand table =
          Operand::vector(dtype, 4, Layout::kDense, [&] { return cumulative[i++]; });
      const Operand out = Operand::vector_output(dtype, 1);
      HuberThresholdArgs args;
      args.timesteps = &t;
      args.count = 1;
      args.table = table.view();
      args.thresholds = out.view();
      ASSERT_TRUE(huber_threshold(host.context(), args).ok());
      const double root = 1 + std::sqrt((1 - table.at(t)) / table.at(t));
      EXPECT_NEAR(out.at(0), 0.9 / (root * root) + 0.1, 3e-7);
      if (expected[t] > 0) {
        EXPECT_NEAR(out.at(0), expected[t], 1e-7);
      }
    }
  }
}

TEST(SnrScale, TimestepsOutsideTheTable) {
  TestHost host;
  const Operand table = Operand::vector(DType::kFloat32, 4, Layout::kDense, [] { return 1.0; });
  const Operand out = Operand::vector_output(DType::kFloat32, 2);
  for (const int64_t bad : {int64_t{4}, int64_t{-1}, INT64_MAX}) {
    const std::vector<int64_t> timesteps = {0, bad};
    SnrScaleArgs args;
    args.timesteps = timesteps.data();
    args.count = 2;
    args.table = table.view();
    args.factors = out.view();
    const Status status = snr_scale(host.context(), args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(std::to_string(bad)), std::string::npos) << status.message();
    HuberThresholdArgs more;
    more.timesteps = timesteps.data();
    more.count = 2;
    more.table = table.view();
    more.thresholds = out.view();
    EXPECT_EQ(huber_threshold(host.context(), more).code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(out.untouched());
  }
}

}  // namespace
}  // namespace loraaccel::test
