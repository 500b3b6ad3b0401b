// The losses of diffusion training: every kernel of the list against the formulas in double.
#include <gtest/gtest.h>

#include <limits>

#include "support/loss_fixture.h"

namespace loraaccel::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr DiffusionLossType kTypes[] = {DiffusionLossType::kL2, DiffusionLossType::kL1,
                                        DiffusionLossType::kHuber, DiffusionLossType::kSmoothL1};

Operand numbers(const std::vector<double>& values, DType dtype = DType::kFloat32) {
  size_t at = 0;
  return Operand::vector(dtype, static_cast<int64_t>(values.size()), Layout::kDense,
                         [&] { return values[at++]; });
}

TensorView as_matrix(const Operand& vector, int64_t rows) {
  const TensorView& v = vector.view();
  return TensorView::matrix(v.data, v.dtype, rows, v.shape[0] / rows);
}

class DiffusionLoss : public LossKernels {
 protected:
  struct Result {
    double loss;
    std::vector<double> grad;
  };
  // One sample of float32 against targets of `target`.
  Result sample(const std::vector<double>& pred, double target, DiffusionLossArgs args = {}) {
    const Operand p = numbers(pred);
    const Operand t = numbers(std::vector<double>(pred.size(), target));
    const Operand loss = Operand::vector_output(DType::kFloat32, 1);
    const Operand grad = Operand::vector_output(DType::kFloat32, static_cast<int64_t>(pred.size()));
    args.pred = as_matrix(p, 1);
    args.target = as_matrix(t, 1);
    args.loss = loss.view();
    args.grad = as_matrix(grad, 1);
    const Status status = diffusion_loss(host_context(), args);
    EXPECT_TRUE(status.ok()) << status.message();
    Result result = {loss.at(0), {}};
    for (int64_t i = 0; i < grad.view().shape[0]; ++i) result.grad.push_back(grad.at(i));
    return result;
  }
  Result huber(double d, double c, DiffusionLossType type) {
    const Operand cs = numbers({c});
    DiffusionLossArgs args;
    args.type = type;
    args.huber_c = cs.view();
    return sample({d}, 0, args);
  }
};
INSTANTIATE_TEST_SUITE_P(Kernel, DiffusionLoss, every_kernel(), kernel_test_name);

TEST_P(DiffusionLoss, KnownVectors) {
  const struct {
    double d, c, huber, huber_grad, smooth, smooth_grad;
  } cases[] = {{0.1, 0.1, 0.00828427125, 0.141421356, 0.0828427125, 1.41421356},
               {1, 0.1, 0.180997512, 0.199007438, 1.80997512, 1.99007438},
               {3, 0.5, 2.54138127, 0.986393924, 5.08276253, 1.97278785}};
  for (const auto& c : cases) {
    const Result h = huber(c.d, c.c, DiffusionLossType::kHuber);
    EXPECT_NEAR(h.loss, c.huber, 1e-6 * c.huber);
    EXPECT_NEAR(h.grad[0], c.huber_grad, 1e-6 * c.huber_grad);
    const Result s = huber(c.d, c.c, DiffusionLossType::kSmoothL1);
    EXPECT_NEAR(s.loss, c.smooth, 1e-6 * c.smooth);
    EXPECT_NEAR(s.grad[0], c.smooth_grad, 1e-6 * c.smooth_grad);
  }
  const Result mean = sample({1, 2, 3, 4}, 1);
  EXPECT_EQ(mean.loss, 3.5);
  EXPECT_EQ(mean.grad, (std::vector<double>{0, 0.5, 1, 1.5}));
  // The same with the min-SNR factor (gamma 5) of timestep 100.
  const Operand factor = numbers({0.591443443});
  DiffusionLossArgs args;
  args.factors = factor.view();
  const Result scaled = sample({1, 2, 3, 4}, 1, args);
  EXPECT_NEAR(scaled.loss, 2.07005205, 1e-6 * 2.07);
  EXPECT_EQ(scaled.grad[0], 0);
  EXPECT_NEAR(scaled.grad[1], 0.29572172, 1e-6 * 0.296);
  EXPECT_NEAR(scaled.grad[2], 0.59144344, 1e-6 * 0.592);
  EXPECT_NEAR(scaled.grad[3], 0.88716516, 1e-6 * 0.888);
}

TEST_P(DiffusionLoss, SmallAndLargeDifferences) {
  for (const DiffusionLossType type : kTypes) {
    for (const double c : {1e-4, 0.1, 1.0, 30.0}) {
      for (const double given : {0.0, -0.0, 1e-12, -1e-7, 1e-3, -0.1, 1.0, -25.0, 1e6, -1e15}) {
        const double d = static_cast<float>(given);
        const LossTerm exact = diffusion_oracle(type, d, 1, static_cast<float>(c));
        const Result got = huber(d, c, type);
        EXPECT_NEAR(got.loss, exact.value.value, 5e-7 * exact.value.terms + 1e-37) << d << " " << c;
        EXPECT_NEAR(got.grad[0], exact.slope.value, 5e-7 * exact.slope.terms + 1e-37)
            << d << " " << c;
      }
    }
  }
  EXPECT_EQ(huber(1e30, 0.1, DiffusionLossType::kL1).loss, static_cast<double>(1e30F));
  EXPECT_EQ(huber(-kInfinity, 0.1, DiffusionLossType::kL1).grad[0], -1);
  EXPECT_TRUE(std::isnan(huber(std::nan(""), 0.1, DiffusionLossType::kL1).grad[0]));
  EXPECT_TRUE(std::isnan(huber(std::nan(""), 0.1, DiffusionLossType::kHuber).loss));
  EXPECT_GT(huber(1e30, 0.1, DiffusionLossType::kHuber).loss, 1e28);  // infinite where d^2 is
}

// VL3
TEST_P(DiffusionLoss, MeanOfAllAndMeanOfKept) {
  const Operand mask = numbers({1, 1, 0, 0});
  const Operand zeros = numbers({0, 0, 0, 0});
  DiffusionLossArgs args;
  args.type = DiffusionLossType::kL1;
  args.mask = {mask.view().data, DType::kFloat32, 4, 4, 1};
  EXPECT_EQ(sample({1, 2, 3, 4}, 0, args).loss, 0.75);
  EXPECT_EQ(sample({1, 2, 3, 4}, 0, args).grad, (std::vector<double>{0.25, 0.25, 0, 0}));
  args.mean_of_kept = true;
  EXPECT_EQ(sample({1, 2, 3, 4}, 0, args).loss, 1.5);
  EXPECT_EQ(sample({1, 2, 3, 4}, 0, args).grad, (std::vector<double>{0.5, 0.5, 0, 0}));
  for (const bool kept : {false, true}) {
    args.mean_of_kept = kept;
    args.mask.data = zeros.view().data;
    EXPECT_EQ(sample({1, 2, 3, 4}, 0, args).loss, 0);
    EXPECT_EQ(sample({1, 2, 3, 4}, 0, args).grad, (std::vector<double>{0, 0, 0, 0}));
  }
}

TEST_P(DiffusionLoss, OneOfManyKept) {
  constexpr int64_t kCount = 4096;
  std::vector<double> mask(kCount, 0);
  mask.back() = 1;
  const Operand m = numbers(mask);
  DiffusionLossArgs args;
  args.mask = {m.view().data, DType::kFloat32, kCount, kCount, 1};
  args.mean_of_kept = true;
  const Result got = sample(std::vector<double>(kCount, 3), 1, args);
  EXPECT_EQ(got.loss, 4);
  EXPECT_EQ(got.grad[kCount - 2], 0);
  EXPECT_EQ(got.grad[kCount - 1], 4);
}

struct DiffusionCase {
  DiffusionLossType type = DiffusionLossType::kHuber;
  int64_t b = 3, n = 100;
  DType pred = DType::kFloat32, target = DType::kFloat32, mask = DType::kFloat32;
  LossReduction reduction = LossReduction::kMean;
  int64_t m[3] = {0, 0, 1};  // {sample_stride, period, inner} of the mask; a period of 0: none
  bool factors = true, upstream = false, kept = false;
};

class DiffusionCases : public LossKernels {
 protected:
  void check(const DiffusionCase& c);
};
INSTANTIATE_TEST_SUITE_P(Kernel, DiffusionCases, every_kernel(), kernel_test_name);

void DiffusionCases::check(const DiffusionCase& c) {
  SCOPED_TRACE("type " + std::to_string(static_cast<int>(c.type)) + ", " + std::to_string(c.b) +
               " x " + std::to_string(c.n) + " " + dtype_name(c.pred) + " reduction " +
               std::to_string(static_cast<int>(c.reduction)) + (c.kept ? " kept" : ""));
  const DType sums = c.pred == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Random random(5);
  const auto real = [&] { return 2 * random.real(); };
  const Operand pred = Operand::matrix(c.pred, c.b, c.n, Layout::kMisaligned, real);
  const Operand target = Operand::matrix(c.target, c.b, c.n, Layout::kDense, real);
  const auto positive = [&] { return 1.1 + random.real(); };
  const Operand factors = Operand::vector(sums, c.b, Layout::kDense, positive);
  const Operand cs = Operand::vector(sums, c.b, Layout::kDense, positive);
  const bool masked = c.m[1] != 0;
  const Operand mask = Operand::vector(c.mask, masked ? (c.b - 1) * c.m[0] + c.m[1] : 1,
                                       Layout::kDense, [&] { return 0.5 + 0.5 * random.real(); });
  const auto mask_at = [&](int64_t b, int64_t i) {
    return masked ? mask.at(b * c.m[0] + i / c.m[2] % c.m[1]) : 1;
  };
  const bool none = c.reduction == LossReduction::kNone;
  const int64_t losses = c.reduction == LossReduction::kSamples ? c.b : 1;
  const Operand upstream = none ? Operand::matrix(sums, c.b, c.n, Layout::kDense, real)
                                : Operand::vector(sums, losses, Layout::kDense, real);
  const Operand loss =
      none ? Operand::output(sums, c.b, c.n) : Operand::vector_output(sums, losses);
  const Operand per_sample = Operand::vector_output(sums, c.b);
  const Operand grad = Operand::output(c.pred, c.b, c.n);
  DiffusionLossArgs args;
  args.pred = pred.view();
  args.target = target.view();
  if (c.factors) args.factors = factors.view();
  args.huber_c = cs.view();
  if (masked) args.mask = {mask.view().data, c.mask, c.m[0], c.m[1], c.m[2]};
  args.type = c.type;
  args.reduction = c.reduction;
  args.mean_of_kept = c.kept;
  if (c.upstream) args.upstream = upstream.view();
  args.loss = loss.view();
  args.per_sample = per_sample.view();
  args.grad = grad.view();
  const Status status = diffusion_loss(host_context(), args);
  if (!serves(c.pred)) {
    EXPECT_EQ(status.code(), StatusCode::kKernelUnavailable);
    EXPECT_TRUE(loss.untouched() && grad.untouched() && per_sample.untouched());
    return;
  }
  ASSERT_TRUE(status.ok()) << status.message();

  Exact mean;
  Exact sum;
  int wrong = 0;
  for (int64_t b = 0; b < c.b; ++b) {
    const double f = c.factors ? factors.at(b) : 1;
    double kept = 0;
    for (int64_t i = 0; i < c.n; ++i) kept += mask_at(b, i);
    const double divisor = c.kept ? kept : static_cast<double>(c.n);
    Exact of_sample;
    for (int64_t i = 0; i < c.n; ++i) {
      LossTerm exact =
          diffusion_oracle(c.type, pred.at(b, i) - target.at(b, i), mask_at(b, i), cs.at(b));
      double scale = f;
      if (c.reduction == LossReduction::kMean) scale = f / divisor / static_cast<double>(c.b);
      if (c.reduction == LossReduction::kSamples) scale = f / divisor;
      const double up = !c.upstream ? 1
                        : none      ? upstream.at(b, i)
                                    : upstream.at(losses == 1 ? 0 : b);
      exact.slope.value *= scale * up;
      exact.slope.terms *= std::abs(scale * up);
      // (The difference of two numbers is rounded before anything else.)
      wrong += !(std::abs(grad.at(b, i) - exact.slope.value) <=
                 tolerance(exact.slope, Pass::kBackward, c.pred, sums, 1));
      exact.value.value *= f;
      exact.value.terms *= f;
      if (none) {
        wrong += !(std::abs(loss.at(b, i) - exact.value.value) <=
                   tolerance(exact.value, Pass::kForward, sums, sums, 1));
      }
      of_sample.value += exact.value.value;
      of_sample.terms += exact.value.terms;
    }
    sum.value += of_sample.value;
    sum.terms += of_sample.terms;
    of_sample.value /= divisor;
    of_sample.terms /= divisor;
    mean.value += of_sample.value / static_cast<double>(c.b);
    mean.terms += of_sample.terms / static_cast<double>(c.b);
    EXPECT_NEAR(per_sample.at(b), of_sample.value,
                tolerance(of_sample, Pass::kForward, sums, sums, 1));
    if (c.reduction == LossReduction::kSamples) {
      EXPECT_EQ(loss.at(b), per_sample.at(b));
    }
  }
  EXPECT_EQ(wrong, 0) << "elements out of bounds";
  const Exact& total = c.reduction == LossReduction::kMean ? mean : sum;
  if (c.reduction == LossReduction::kMean || c.reduction == LossReduction::kSum) {
    EXPECT_NEAR(loss.at(0), total.value, tolerance(total, Pass::kForward, sums, sums, 1));
  }
  EXPECT_TRUE(pred.untouched() && target.untouched() && mask.untouched() && cs.untouched());
  EXPECT_TRUE(loss.guards_intact() && grad.guards_intact() && per_sample.guards_intact());
}

TEST_P(DiffusionCases, SizesOfEveryType) {
  for (const DiffusionLossType type : kTypes) {
    for (const int64_t n : {1, 7, 8, 9, 63, 64, 65, 4096, 4097, 12001})
      check({.type = type, .n = n});
  }
  check({.b = 900, .n = 40});
}

TEST_P(DiffusionCases, TypesAndReductions) {
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};
  for (const DType dtype : kDTypes) {
    for (const LossReduction reduction : {LossReduction::kNone, LossReduction::kMean,
                                          LossReduction::kSum, LossReduction::kSamples}) {
      for (const bool upstream : {false, true}) {
        check({.n = 144,
               .pred = dtype,
               .target = dtype,
               .mask = dtype,
               .reduction = reduction,
               .m = {36, 36, 1},
               .upstream = upstream,
               .kept = upstream});
      }
    }
    check({.type = DiffusionLossType::kL2, .pred = DType::kBFloat16, .target = DType::kFloat32});
  }
}

TEST_P(DiffusionCases, Masks) {
  const int64_t masks[][3] = {{400, 400, 1}, {100, 100, 1}, {0, 100, 1}, {0, 400, 1},
                              {4, 4, 100},   {1, 1, 1},     {0, 1, 1},   {0, 7, 1}};
  for (const bool kept : {false, true}) {
    for (const auto& m : masks) {
      DiffusionCase c = {.n = 400, .kept = kept};
      std::copy_n(m, 3, c.m);
      check(c);
    }
    check({.n = 4 * 4096, .m = {4096, 4096, 1}, .kept = kept});
    check({.n = 4 * 5000, .mask = DType::kBFloat16, .m = {5000, 5000, 1}, .kept = kept});
  }
}

// VL4
TEST_P(DiffusionLoss, ThreadsDoNotChangeAnything) {
  Random random(3);
  constexpr int64_t kSamples = 3;
  const Operand pred = Operand::matrix(DType::kFloat32, kSamples, 30011, Layout::kDense,
                                       [&] { return random.real(); });
  const Operand target = Operand::matrix(DType::kFloat32, kSamples, 30011, Layout::kDense,
                                         [&] { return random.real(); });
  std::vector<std::vector<char>> seen;
  for (const int threads : {1, 2, 8}) {
    const Operand loss = Operand::vector_output(DType::kFloat32, 1);
    const Operand grad = Operand::output(DType::kFloat32, kSamples, 30011);
    DiffusionLossArgs args;
    args.pred = pred.view();
    args.target = target.view();
    args.loss = loss.view();
    args.grad = grad.view();
    ASSERT_TRUE(diffusion_loss(host_context(threads), args).ok());
    seen.push_back(loss.element_bytes());
    seen.push_back(grad.element_bytes());
    EXPECT_EQ(seen[seen.size() - 2], seen[0]);
    EXPECT_EQ(seen[seen.size() - 1], seen[1]);
  }
}

// VL4: 16-bit sums would stand still, and a plain float sum would be off by its length.
TEST_P(DiffusionLoss, SumsOfManyKeepTheirDigits) {
  constexpr int64_t kCount = int64_t{1} << 20;
  const std::vector<uint16_t> halves(kCount, 0x3DCD);  // 0.1 as a bfloat16
  const std::vector<uint16_t> zeros(kCount, 0);
  const Operand loss = Operand::vector_output(DType::kFloat32, 1);
  DiffusionLossArgs args;
  args.pred = TensorView::matrix(halves.data(), DType::kBFloat16, 1, kCount);
  args.target = TensorView::matrix(zeros.data(), DType::kBFloat16, 1, kCount);
  args.type = DiffusionLossType::kL1;
  args.loss = loss.view();
  ASSERT_TRUE(diffusion_loss(host_context(), args).ok());
  EXPECT_EQ(loss.at(0), 0.10009765625);  // the mean of equal numbers is that number
}

TEST(DiffusionErrors, NothingIsWritten) {
  TestHost host;
  const Operand x = numbers({1, 2, 3, 4, 5, 6});
  const Operand c = numbers({1, 0});
  const Operand nan = numbers({1, std::nan("")});
  const Operand three = numbers({1, 1, 1});
  const Operand loss = Operand::vector_output(DType::kFloat32, 1);
  const Operand grad = Operand::output(DType::kFloat32, 2, 3);
  DiffusionLossArgs good;
  good.pred = good.target = as_matrix(x, 2);
  good.loss = loss.view();
  good.grad = grad.view();
  const auto expect = [&](StatusCode code, auto change) {
    DiffusionLossArgs args = good;
    change(&args);
    const Status status = diffusion_loss(host.context(), args);
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_TRUE(status.message().starts_with("diffusion_loss: ")) << status.message();
    EXPECT_TRUE(loss.untouched() && grad.untouched());
  };
  using Args = DiffusionLossArgs;
  expect(StatusCode::kShapeMismatch, [&](Args* a) { a->target = as_matrix(x, 3); });
  expect(StatusCode::kShapeMismatch, [&](Args* a) { a->factors = three.view(); });
  expect(StatusCode::kShapeMismatch, [&](Args* a) { a->per_sample = three.view(); });
  for (const DiffusionLossType type : {DiffusionLossType::kHuber, DiffusionLossType::kSmoothL1}) {
    expect(StatusCode::kInvalidArgument, [&](Args* a) { a->type = type; });
    expect(StatusCode::kShapeMismatch, [&](Args* a) { a->type = type, a->huber_c = three.view(); });
    expect(StatusCode::kInvalidArgument, [&](Args* a) { a->type = type, a->huber_c = c.view(); });
    expect(StatusCode::kInvalidArgument, [&](Args* a) { a->type = type, a->huber_c = nan.view(); });
  }
  expect(StatusCode::kInvalidArgument,
         [&](Args* a) { a->mask = {x.view().data, DType::kFloat32, 0, 1, 0}; });
  expect(StatusCode::kShapeMismatch, [&](Args* a) { a->upstream = three.view(); });
}

}  // namespace
}  // namespace loraaccel::test
