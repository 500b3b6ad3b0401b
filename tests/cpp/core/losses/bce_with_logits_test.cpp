// Binary cross entropy with logits: every kernel of the list against the formula in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "support/loss_fixture.h"

namespace loraaccel::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class BceWithLogits : public LossKernels {
 protected:
  struct Result {
    double loss, grad;
  };
  // One element, float32.
  Result one(double x, double t, double w = 1, double p = 1, BceWithLogitsArgs args = {}) {
    const auto number = [](double v) {
      return Operand::matrix(DType::kFloat32, 1, 1, Layout::kDense, [v] { return v; });
    };
    const Operand xs = number(x);
    const Operand ts = number(t);
    const Operand ws = number(w);
    const Operand ps = number(p);
    const Operand loss = Operand::vector_output(DType::kFloat32, 1);
    const Operand grad = Operand::output(DType::kFloat32, 1, 1);
    args.x = xs.view();
    args.target = ts.view();
    args.weight = {ws.view().data, DType::kFloat32, 0, 1, 1};
    args.pos_weight = {ps.view().data, DType::kFloat32, 0, 1, 1};
    args.loss = loss.view();
    args.grad = grad.view();
    const Status status = bce_with_logits(host_context(), args);
    EXPECT_TRUE(status.ok()) << status.message();
    return {loss.at(0), grad.at(0, 0)};
  }
};
INSTANTIATE_TEST_SUITE_P(Kernel, BceWithLogits, every_kernel(), kernel_test_name);

TEST_P(BceWithLogits, KnownVectors) {
  const struct {
    double x, t, w, p, loss, grad;
  } cases[] = {
      {0, 0, 1, 1, 0.693147181, 0.5},
      {0, 1, 1, 1, 0.693147181, -0.5},
      {0, 1, 1, 3, 2.07944154, -1.5},
      {2, 1, 1, 1, 0.126928011, -0.119202922},
      {2, 0, 1, 1, 2.12692801, 0.880797078},
      {-2, 1, 1, 3, 6.38078403, -2.64239123},
      {100, 0, 1, 1, 100, 1},
      {-100, 1, 1, 1, 100, -1},
      {1000, 1, 1, 1, 0, 0},
      {1.5, 0.3, 2, 2, 2.62367452, 0.925693638},
  };
  for (const auto& c : cases) {
    const Result got = one(c.x, c.t, c.w, c.p);
    EXPECT_NEAR(got.loss, c.loss, 1e-6 * std::abs(c.loss)) << c.x << " " << c.t;
    EXPECT_NEAR(got.grad, c.grad, 1e-6 * std::abs(c.grad)) << c.x << " " << c.t;
  }
}

TEST_P(BceWithLogits, ExtremeLogits) {
  for (const double x : {-1e38, -1000.0, -88.0, -87.0, -50.0, -17.0, -1e-3, -1e-30, -0.0, 1e-30,
                         1e-7, 0.5, 16.6, 17.0, 87.5, 88.5, 104.0, 1e38}) {
    for (const double t : {0.0, 0.25, 1.0, 1.5, -0.5}) {
      const double given = static_cast<float>(x);
      const LossTerm exact = bce_oracle(given, t, 1, 1);
      const Result got = one(x, t);
      // (What is below the normal numbers may be 0.)
      EXPECT_NEAR(got.loss, exact.value.value, 4e-7 * exact.value.terms + 1e-37) << x << " " << t;
      EXPECT_NEAR(got.grad, exact.slope.value, 4e-7 * exact.slope.terms + 1e-37) << x << " " << t;
    }
  }
  // No digits are lost where the loss is small.
  EXPECT_NEAR(one(20, 1).loss, std::log1p(std::exp(-20.0)), 1e-6 * 2.1e-9);
  EXPECT_NEAR(one(20, 1).grad, -1 / (1 + std::exp(20.0)), 1e-6 * 2.1e-9);
}

TEST_P(BceWithLogits, InfiniteLogitsAndNanAreAsInTheFormula) {
  EXPECT_EQ(one(kInfinity, 0).loss, kInfinity);
  EXPECT_EQ(one(kInfinity, 0).grad, 1);
  EXPECT_TRUE(std::isnan(one(kInfinity, 1).loss));  // 0 times infinity
  EXPECT_EQ(one(-kInfinity, 1).loss, kInfinity);
  EXPECT_EQ(one(-kInfinity, 1).grad, -1);
  EXPECT_TRUE(std::isnan(one(-kInfinity, 0).loss));
  EXPECT_TRUE(std::isnan(one(kNan, 0).loss));
  EXPECT_TRUE(std::isnan(one(kNan, 0).grad));
  EXPECT_TRUE(std::isnan(one(0, kNan).loss));
}

TEST_P(BceWithLogits, LabelSmoothing) {
  BceWithLogitsArgs args;
  args.label_smoothing = 0.2;
  for (const double t : {0.0, 1.0, 0.3}) {
    const LossTerm exact = bce_oracle(1.25, t * 0.8 + 0.1, 1, 2);
    EXPECT_NEAR(one(1.25, t, 1, 2, args).loss, exact.value.value, 1e-6);
    EXPECT_NEAR(one(1.25, t, 1, 2, args).grad, exact.slope.value, 1e-6);
  }
}

TEST_P(BceWithLogits, FocalFactor) {
  for (const double gamma : {0.5, 1.0, 2.0, 5.0}) {
    BceWithLogitsArgs args;
    args.focal_gamma = gamma;
    for (const double x : {-20.0, -3.0, -0.25, 0.0, 1.5, 12.0}) {
      for (const double t : {0.0, 1.0, 0.4}) {
        const auto value = [&](double v) {
          const double s = 1 / (1 + std::exp(-v));
          const double q = t / (1 + std::exp(v)) + (1 - t) * s;
          return std::pow(q, gamma) * bce_oracle(v, t, 1, 3).value.value;
        };
        const double slope = (value(x + 1e-5) - value(x - 1e-5)) / 2e-5;
        const Result got = one(x, t, 1, 3, args);
        EXPECT_NEAR(got.loss, value(x), 3e-6 * std::abs(value(x)) + 1e-30) << gamma << " " << x;
        EXPECT_NEAR(got.grad, slope, 1e-5 * std::abs(slope) + 1e-9)
            << gamma << " " << x << " " << t;
      }
    }
    EXPECT_EQ(one(1000, 1, 1, 1, args).loss, 0);
    EXPECT_EQ(one(1000, 1, 1, 1, args).grad, 0);
    EXPECT_NEAR(one(1000, 0, 1, 1, args).loss, 1000, 1e-3);
    EXPECT_NEAR(one(1000, 0, 1, 1, args).grad, 1, 1e-6);
  }
}

struct BceCase {
  int64_t b = 1, n = 100;
  DType x = DType::kFloat32, target = DType::kFloat32, weight = DType::kFloat32;
  LossReduction reduction = LossReduction::kMean;
  // {sample_stride, period, inner} of the weights; a period of 0: none
  int64_t w[3] = {0, 0, 1};
  int64_t p[3] = {0, 0, 1};
  bool upstream = false, ignore = false, kept = false;
};

class BceCases : public BceWithLogits {
 protected:
  void check(const BceCase& c);
};
INSTANTIATE_TEST_SUITE_P(Kernel, BceCases, every_kernel(), kernel_test_name);

BroadcastView broadcast_view(const Operand& o, const int64_t (&layout)[3]) {
  if (layout[1] == 0) return {};
  return {o.view().data, o.view().dtype, layout[0], layout[1], layout[2]};
}

double broadcast_value(const Operand& o, const int64_t (&layout)[3], int64_t b, int64_t i) {
  return layout[1] == 0 ? 1 : o.at(b * layout[0] + i / layout[2] % layout[1]);
}

Operand broadcast_operand(DType dtype, const int64_t (&layout)[3], int64_t b, Random* random) {
  const int64_t count = layout[1] == 0 ? 1 : (b - 1) * layout[0] + layout[1];
  return Operand::vector(dtype, count, Layout::kDense, [&] { return 1.5 + random->real(); });
}

void BceCases::check(const BceCase& c) {
  SCOPED_TRACE(std::to_string(c.b) + " x " + std::to_string(c.n) + " " + dtype_name(c.x) + " " +
               dtype_name(c.target) + " " + dtype_name(c.weight) + " reduction " +
               std::to_string(static_cast<int>(c.reduction)));
  Random random(11);
  constexpr double kIgnored = -100;
  const Operand x =
      Operand::matrix(c.x, c.b, c.n, Layout::kMisaligned, [&] { return 6 * random.real(); });
  const Operand target = Operand::matrix(c.target, c.b, c.n, Layout::kDense, [&] {
    const double v = random.real();
    return c.ignore && v > 0.5 ? kIgnored : v > 0.2 ? 1 : v > -0.5 ? 0 : v + 1;
  });
  const Operand w = broadcast_operand(c.weight, c.w, c.b, &random);
  const Operand p = broadcast_operand(c.weight, c.p, c.b, &random);
  const bool none = c.reduction == LossReduction::kNone;
  const auto real = [&] { return random.real(); };
  const Operand upstream = none ? Operand::matrix(c.x, c.b, c.n, Layout::kDense, real)
                                : Operand::vector(c.x, 1, Layout::kDense, real);
  const Operand loss = none ? Operand::output(c.x, c.b, c.n) : Operand::vector_output(c.x, 1);
  const Operand grad = Operand::output(c.x, c.b, c.n);
  BceWithLogitsArgs args;
  args.x = x.view();
  args.target = target.view();
  args.weight = broadcast_view(w, c.w);
  args.pos_weight = broadcast_view(p, c.p);
  if (c.ignore) args.ignore_index = kIgnored;
  args.mean_of_kept = c.kept;
  args.reduction = c.reduction;
  if (c.upstream) args.upstream = upstream.view();
  args.loss = loss.view();
  args.grad = grad.view();
  const Status status = bce_with_logits(host_context(), args);
  if (!serves(c.x)) {
    EXPECT_EQ(status.code(), StatusCode::kKernelUnavailable);
    EXPECT_TRUE(loss.untouched() && grad.untouched());
    return;
  }
  ASSERT_TRUE(status.ok()) << status.message();

  double kept = 0;
  for (int64_t i = 0; i < c.b * c.n; ++i) kept += target.at(i / c.n, i % c.n) == kIgnored ? 0 : 1;
  const double divisor = c.reduction != LossReduction::kMean ? 1
                         : c.kept                            ? kept
                                                             : static_cast<double>(c.b * c.n);
  const DType sums = c.x == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Exact total;
  int wrong = 0;
  for (int64_t b = 0; b < c.b; ++b) {
    for (int64_t i = 0; i < c.n; ++i) {
      const double t = target.at(b, i);
      LossTerm exact;
      if (t != kIgnored || !c.ignore) {
        exact =
            bce_oracle(x.at(b, i), t, broadcast_value(w, c.w, b, i), broadcast_value(p, c.p, b, i));
      }
      const double up = c.upstream ? (none ? upstream.at(b, i) : upstream.at(0)) : 1;
      exact.slope.value *= up / divisor;
      exact.slope.terms *= std::abs(up / divisor);
      total.value += exact.value.value;
      total.terms += exact.value.terms;
      wrong += !(std::abs(grad.at(b, i) - exact.slope.value) <=
                 tolerance(exact.slope, Pass::kBackward, c.x, sums, 1));
      if (none) {
        wrong += !(std::abs(loss.at(b, i) - exact.value.value) <=
                   tolerance(exact.value, Pass::kForward, c.x, sums, 1));
      }
    }
  }
  EXPECT_EQ(wrong, 0) << "elements out of bounds";
  if (!none) {
    total.value /= divisor;
    total.terms /= divisor;
    EXPECT_NEAR(loss.at(0), total.value, tolerance(total, Pass::kForward, c.x, sums, 1));
  }
  EXPECT_TRUE(x.untouched() && target.untouched() && w.untouched() && p.untouched());
  EXPECT_TRUE(loss.guards_intact() && grad.guards_intact());
}

TEST_P(BceCases, Sizes) {
  for (const int64_t n :
       {1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 129, 4095, 4096, 4097, 9000})
    check({.n = n});
  check({.b = 3, .n = 5000});
  check({.b = 700, .n = 33});
}

TEST_P(BceCases, TypesAndReductions) {
  constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};
  for (const DType dtype : kTypes) {
    for (const LossReduction reduction :
         {LossReduction::kNone, LossReduction::kMean, LossReduction::kSum}) {
      for (const bool upstream : {false, true}) {
        check({.n = 203,
               .x = dtype,
               .target = dtype,
               .weight = dtype,
               .reduction = reduction,
               .w = {0, 203, 1},
               .p = {0, 1, 1},
               .upstream = upstream});
      }
    }
    check({.n = 70, .x = DType::kBFloat16, .target = DType::kFloat32, .weight = DType::kFloat16});
  }
}

TEST_P(BceCases, BroadcastWeights) {
  const int64_t layouts[][3] = {{0, 1, 1},   {1, 1, 1},   {600, 600, 1}, {0, 600, 1}, {0, 6, 100},
                                {6, 6, 100}, {0, 100, 1}, {100, 100, 1}, {0, 7, 1},   {0, 2, 3}};
  for (const DType weight : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto& layout : layouts) {
      BceCase c = {.b = 2, .n = 600, .weight = weight, .reduction = LossReduction::kNone};
      std::copy_n(layout, 3, c.w);
      check(c);
      std::copy_n(layout, 3, c.p);
      check(c);
    }
  }
  check({.b = 1, .n = 9001, .w = {0, 5000, 1}, .p = {0, 10, 1000}});
  check({.b = 1, .n = 9001, .w = {0, 4097, 2}, .p = {0, 37, 1}});
}

TEST_P(BceCases, IgnoredTargets) {
  for (const bool kept : {false, true}) {
    for (const LossReduction reduction :
         {LossReduction::kNone, LossReduction::kMean, LossReduction::kSum}) {
      check({.b = 2, .n = 5000, .reduction = reduction, .ignore = true, .kept = kept});
      check({.n = 77,
             .x = DType::kBFloat16,
             .target = DType::kBFloat16,
             .reduction = reduction,
             .ignore = true,
             .kept = kept});
    }
  }
}

TEST_P(BceWithLogits, WhatIsIgnoredMayBeAnything) {
  BceWithLogitsArgs args;
  args.ignore_index = 0.1;  // compared as a float32
  args.mean_of_kept = true;
  for (const double x : {kNan, kInfinity, 3.0}) {
    const Result got = one(x, 0.1, 1, 1, args);
    EXPECT_EQ(got.loss, 0);  // the mean of nothing
    EXPECT_EQ(got.grad, 0);
  }
}

TEST_P(BceWithLogits, NoElements) {
  for (const LossReduction reduction : {LossReduction::kMean, LossReduction::kSum}) {
    const Operand loss = Operand::vector_output(DType::kFloat32, 1);
    BceWithLogitsArgs args;
    args.x = args.target = args.grad = TensorView::matrix(nullptr, DType::kFloat32, 1, 0);
    args.reduction = reduction;
    args.loss = loss.view();
    ASSERT_TRUE(bce_with_logits(host_context(), args).ok());
    if (reduction == LossReduction::kMean) {
      EXPECT_TRUE(std::isnan(loss.at(0)));
    } else {
      EXPECT_EQ(loss.at(0), 0);
    }
  }
}

TEST_P(BceWithLogits, GradientAlone) {
  const Operand x = Operand::vector(DType::kFloat32, 1, Layout::kDense, [] { return 0.0; });
  const Operand grad = Operand::vector_output(DType::kFloat32, 1);
  BceWithLogitsArgs args;
  args.x = args.target = TensorView::matrix(x.view().data, DType::kFloat32, 1, 1);
  args.grad = TensorView::matrix(grad.view().data, DType::kFloat32, 1, 1);
  ASSERT_TRUE(bce_with_logits(host_context(), args).ok());
  EXPECT_EQ(grad.at(0), 0.5);
}

TEST(BceErrors, NothingIsWritten) {
  TestHost host;
  const auto number = [] { return 0.5; };
  const Operand x = Operand::matrix(DType::kFloat32, 2, 3, Layout::kDense, number);
  const Operand padded = Operand::matrix(DType::kFloat32, 2, 3, Layout::kPadded, number);
  const Operand other = Operand::matrix(DType::kFloat32, 3, 2, Layout::kDense, number);
  const Operand loss = Operand::vector_output(DType::kFloat32, 1);
  const Operand grad = Operand::output(DType::kFloat32, 2, 3);
  BceWithLogitsArgs good;
  good.x = good.target = x.view();
  good.loss = loss.view();
  good.grad = grad.view();
  const auto expect = [&](StatusCode code, auto change) {
    BceWithLogitsArgs args = good;
    change(&args);
    const Status status = bce_with_logits(host.context(), args);
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_TRUE(status.message().starts_with("bce_with_logits: ")) << status.message();
    EXPECT_TRUE(loss.untouched() && grad.untouched());
  };
  using Args = BceWithLogitsArgs;
  expect(StatusCode::kShapeMismatch, [&](Args* a) { a->target = other.view(); });
  expect(StatusCode::kShapeMismatch, [&](Args* a) { a->grad = other.view(); });
  expect(StatusCode::kShapeMismatch, [&](Args* a) { a->loss = x.view(); });
  expect(StatusCode::kShapeMismatch, [&](Args* a) { a->x = loss.view(); });
  expect(StatusCode::kInvalidArgument, [&](Args* a) { a->x = padded.view(); });
  expect(StatusCode::kInvalidArgument, [&](Args* a) { a->target = padded.view(); });
  expect(StatusCode::kInvalidArgument, [&](Args* a) { a->target.data = nullptr; });
  expect(StatusCode::kInvalidArgument, [&](Args* a) { a->label_smoothing = 1.5; });
  expect(StatusCode::kInvalidArgument, [&](Args* a) { a->label_smoothing = kNan; });
  expect(StatusCode::kInvalidArgument, [&](Args* a) { a->focal_gamma = -1; });
  expect(StatusCode::kInvalidArgument, [&](Args* a) { a->focal_gamma = kInfinity; });
  expect(StatusCode::kInvalidArgument, [&](Args* a) { a->reduction = LossReduction::kSamples; });
  expect(StatusCode::kInvalidArgument,
         [&](Args* a) { a->weight = {x.view().data, DType::kFloat32, 0, 0, 1}; });
  expect(StatusCode::kInvalidArgument, [&](Args* a) { a->x = a->grad; });
  expect(StatusCode::kUnsupportedDevice, [&](Args* a) { a->x.device = DeviceType::kCUDA; });
  for (int64_t i = 0; i < 2; ++i) {
    TestHost poor;
    poor.fail_allocation = i;
    EXPECT_EQ(bce_with_logits(poor.context(), good).code(), StatusCode::kOutOfMemory);
    EXPECT_EQ(poor.live_bytes(), 0);
  }
}

}  // namespace
}  // namespace loraaccel::test
