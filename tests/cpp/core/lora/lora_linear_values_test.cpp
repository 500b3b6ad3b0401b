// Numbers that can be checked by hand, and inputs that users really send. Names in parentheses: see
// CONTRIBUTING.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/env.h"
#include "support/kernel_fixture.h"

namespace loraaccel::test {
namespace {

using LoraLinearValues = LoraLinearKernels;
INSTANTIATE_TEST_SUITE_P(Kernel, LoraLinearValues, every_kernel(), kernel_test_name);

// (VN1) The scale is alpha / r: 16 / 8 gives 64 for ones, 1 / 8 gives 4.
TEST_P(LoraLinearValues, PlainScale) {
  const std::vector<float> ones(32, 1);
  const std::vector<float> zeros(16, 0);
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  for (const double alpha : {16.0, 1.0}) {
    LoraAdapter ad;
    ad.a = TensorView::matrix(ones.data(), DType::kFloat32, 8, 4);
    ad.b = TensorView::matrix(ones.data(), DType::kFloat32, 4, 8);
    ad.scale = alpha / 8;
    std::vector<float> y(4, -1);
    std::vector<float> h(8, -1);
    LoraLinearArgs args;
    args.x = TensorView::matrix(ones.data(), DType::kFloat32, 1, 4);
    args.w = TensorView::matrix(zeros.data(), DType::kFloat32, 4, 4);
    args.adapters = {&ad, 1};
    args.y = TensorView::matrix(y.data(), DType::kFloat32, 1, 4);
    args.h = TensorView::matrix(h.data(), DType::kFloat32, 1, 8);
    TestHost host;
    const Status status = lora_linear_forward(context(&host), args);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(y, std::vector<float>(4, alpha == 16 ? 64.0F : 4.0F));
    EXPECT_EQ(h, std::vector<float>(8, 4.0F));
  }
}

// (VN5) With p = 1 the adapter contributes nothing to y, dx and dA, and its dB is zero as h is.
TEST_P(LoraLinearValues, FullDropoutLeavesTheFrozenLayer) {
  LoraCase with;
  with.adapters = {{4, 1.0, DType::kFloat32, 2.0}};
  LoraCase without = with;
  without.adapters.clear();
  const LoraProblem dropped(with);
  const LoraProblem frozen(without);
  TestHost host;
  const ExecContext ctx = context(&host);
  const auto y = dropped.forward(ctx, kernel_->name).y.read().values;
  EXPECT_EQ(y, frozen.forward(ctx, kernel_->name).y.read().values);
  const BackwardRun run = dropped.backward(ctx, kernel_->name);
  EXPECT_EQ(run.dx.read().values, frozen.backward(ctx, kernel_->name).dx.read().values);
  const auto is_zero = [](double v) { return v == 0; };
  EXPECT_TRUE(std::ranges::all_of(run.da[0].read().values, is_zero));
  EXPECT_TRUE(std::ranges::all_of(run.db[0].read().values, is_zero));
}

// The mask of a row is a function of its index: a part of the rows has the same results alone.
TEST_P(LoraLinearValues, MaskFollowsTheRowIndex) {
  LoraCase c;
  c.m = 40;
  c.adapters = {{4, 0.5, DType::kFloat32, 2.0}};
  const LoraProblem problem(c);
  TestHost host;
  const ExecContext ctx = context(&host, 2);
  const ForwardRun all = problem.forward(ctx, kernel_->name);
  ForwardRun part = problem.forward_outputs();
  LoraProblem::Views views;
  LoraLinearArgs args = problem.forward_args(part, &views);
  args.x.shape[0] = args.y.shape[0] = args.h.shape[0] = 3;
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  ASSERT_TRUE(lora_linear_forward(ctx, args).ok());
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t r = 0; r < 4; ++r) EXPECT_EQ(all.h.at(i, r), part.h.at(i, r));
  }
}

// (VS6) As many rows as a video model flattens.
TEST_P(LoraLinearValues, ManyRows) {
  constexpr int64_t kRows = 522240;
  const std::vector<float> w = {1, 2, 3, 4, -1, 0, 1, 0};
  const std::vector<float> a = {1, -1, 2, 0.5};
  const std::vector<float> b = {2, -3};
  std::vector<float> x(kRows * 4);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 251) - 125;
  std::vector<float> y(kRows * 2, -1);
  std::vector<float> h(kRows, -1);
  LoraAdapter ad;
  ad.a = TensorView::matrix(a.data(), DType::kFloat32, 1, 4);
  ad.b = TensorView::matrix(b.data(), DType::kFloat32, 2, 1);
  ad.scale = 0.5;
  LoraLinearArgs args;
  args.x = TensorView::matrix(x.data(), DType::kFloat32, kRows, 4);
  args.w = TensorView::matrix(w.data(), DType::kFloat32, 2, 4);
  args.adapters = {&ad, 1};
  args.y = TensorView::matrix(y.data(), DType::kFloat32, kRows, 2);
  args.h = TensorView::matrix(h.data(), DType::kFloat32, kRows, 1);
  TestHost host;
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  const Status status = lora_linear_forward(context(&host, 2), args);
  ASSERT_TRUE(status.ok()) << status.message();
  int64_t wrong = 0;
  for (size_t m = 0; m < kRows;
       ++m) {  // small integers and halves: exact in any order of summation
    const float* r = x.data() + 4 * m;
    const float hidden = r[0] - r[1] + 2 * r[2] + 0.5F * r[3];
    wrong += h[m] != hidden;
    wrong += y[2 * m] != r[0] + 2 * r[1] + 3 * r[2] + 4 * r[3] + hidden;
    wrong += y[2 * m + 1] != r[2] - r[0] - 1.5F * hidden;
  }
  EXPECT_EQ(wrong, 0);
}

// Infinities and NaN arrive where they belong and nowhere else: a vector kernel must not let a neighbour leak in.
TEST_P(LoraLinearValues, SpecialNumbersStayInTheirRow) {
  constexpr int64_t kM = 9;
  constexpr int64_t kK = 19;
  constexpr int64_t kN = 21;
  std::vector<float> x(kM * kK, 1);
  const std::vector<float> w(kN * kK, 0.5F);
  x[3 * kK + 18] = std::numeric_limits<float>::infinity();
  x[5 * kK + 0] = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> y(kM * kN);
  LoraLinearArgs args;
  args.x = TensorView::matrix(x.data(), DType::kFloat32, kM, kK);
  args.w = TensorView::matrix(w.data(), DType::kFloat32, kN, kK);
  args.y = TensorView::matrix(y.data(), DType::kFloat32, kM, kN);
  TestHost host;
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  ASSERT_TRUE(lora_linear_forward(context(&host), args).ok());
  for (int64_t m = 0; m < kM; ++m) {
    for (int64_t n = 0; n < kN; ++n) {
      const float v = y[static_cast<size_t>(m * kN + n)];
      if (m == 3) {
        EXPECT_EQ(v, std::numeric_limits<float>::infinity());
      } else if (m == 5) {
        EXPECT_TRUE(std::isnan(v));
      } else {
        EXPECT_EQ(v, 9.5F);
      }
    }
  }
}

}  // namespace
}  // namespace loraaccel::test
