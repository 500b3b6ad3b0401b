// Dropout of rank activations and an adapter for each sample: every kernel of the list against the oracle.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "support/env.h"
#include "support/kernel_fixture.h"

namespace loraaccel::test {
namespace {

using LoraRankMasks = LoraLinearKernels;
INSTANTIATE_TEST_SUITE_P(Kernel, LoraRankMasks, every_kernel(), kernel_test_name);

std::vector<AdapterCase> three(DType dtype) {
  return {{3, 0, dtype, 2.0}, {8, 0, dtype, -0.5}, {1, 0, dtype, 1.25}};
}

DType adapter_type(DType x) { return x == DType::kFloat64 ? x : DType::kFloat32; }

TEST_P(LoraRankMasks, HiddenAndRankDropout) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (const int64_t sample_rows : {1, 3, 36, 72}) {
      LoraCase c;
      c.dtype = dtype;
      c.m = 72;
      c.k = 40;
      c.n = 35;
      c.sample_rows = sample_rows;
      c.adapters = three(adapter_type(dtype));
      c.adapters[0].hidden_dropout = 0.4;
      c.adapters[1].rank_dropout = 0.5;
      c.adapters[2].hidden_dropout = 0.25;
      c.adapters[2].rank_dropout = 0.25;
      check(c);
      c.adapters[0].dropout = 0.3;  // with that of the input
      check(c);
    }
  }
}

// More ranks than one step of the mask's generator makes; everything dropped.
TEST_P(LoraRankMasks, GivenFactors) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (const Layout layout : {Layout::kDense, Layout::kTransposed}) {
      LoraCase c;
      c.dtype = dtype;
      c.m = 37;
      c.k = 40;
      c.n = 35;
      c.x = layout;
      c.adapters = three(adapter_type(dtype));
      c.adapters[0].given_factors = true;
      c.adapters[1].given_factors = true;
      c.adapters[1].hidden_dropout = 0.25;  // both count
      check(c);
    }
  }
}

TEST_P(LoraRankMasks, ManyRanksAndAll) {
  LoraCase c;
  c.m = 12;
  c.sample_rows = 4;
  c.adapters = {{150, 0, DType::kFloat32, 1.0, 0.2, 0.3}};
  check(c);
  c.adapters[0].hidden_dropout = 0.999999999;
  check(c);
  c.adapters[0].hidden_dropout = 0;
  c.adapters[0].rank_dropout = 0.999999999;
  check(c);
}

TEST_P(LoraRankMasks, AdapterOfEachSample) {
  const std::vector<std::vector<int64_t>> choices = {{0, 1, 2, -1, 1, 0},
                                                     {2, 2, 2, 2, 2, 2},
                                                     {-1, -1, -1, -1, -1, -1},
                                                     {-1, 0, 0, -1, 2, 2},
                                                     {1, 1, 1, 0, 0, 0}};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (const auto& choice : choices) {
      for (const int64_t sample_rows : {1, 3, 40}) {  // dot products; short runs; long ones
        LoraCase c;
        c.dtype = dtype;
        c.m = 6 * sample_rows;
        c.k = 70;
        c.n = 35;
        c.sample_rows = sample_rows;
        c.sample_adapters = choice;
        c.adapters = three(adapter_type(dtype));
        check(c);
      }
    }
  }
}

// Short runs between long ones, over several passes of the sum and in chunks of panels.
TEST_P(LoraRankMasks, RunsOfEveryLength) {
  LoraCase c;
  c.k = 4200;
  c.n = 40;
  c.adapters = three(DType::kFloat32);
  for (const int length : {1, 1, 2, 30, 1, 13, 14, 1, 70, 1, 1, 1, 20, 3})
    c.sample_adapters.insert(c.sample_adapters.end(), static_cast<size_t>(length),
                             static_cast<int64_t>(c.sample_adapters.size() % 4) - 1);
  c.m = static_cast<int64_t>(c.sample_adapters.size());
  check(c);
  c.dtype = DType::kBFloat16;
  check(c);
  c.k = 40;
  c.n = 4200;
  check(c);
}

// With hidden and rank dropout too.
TEST_P(LoraRankMasks, BothTogether) {
  LoraCase c;
  c.m = 20;
  c.sample_rows = 5;
  c.sample_adapters = {1, 0, -1, 1};
  c.adapters = {{4, 0, DType::kFloat32, 1.0, 0.3, 0.2}, {6, 0, DType::kFloat32, 2.0, 0, 0.4}};
  check(c);
}

// NaN in one sample or one adapter stays there.
TEST_P(LoraRankMasks, SamplesAreApart) {
  constexpr int64_t kRows = 4, kInputs = 20, kOutputs = 9, kRank = 2;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> x(kRows * kInputs, 1), w(kOutputs * kInputs, 0.5F), y(kRows * kOutputs);
  std::vector<float> h(kRows * 2 * kRank), good_a(kRank * kInputs, 1), good_b(kOutputs * kRank, 2);
  std::vector<float> bad_b(kOutputs * kRank, nan), dy(kRows * kOutputs, 1), da(kRank * kInputs);
  std::vector<float> db(kOutputs * kRank), dx(kRows * kInputs);
  for (int64_t k = 0; k < kInputs; ++k) x[static_cast<size_t>(kInputs + k)] = nan;  // row 1
  const auto matrix = [](std::vector<float>& v, int64_t rows, int64_t cols) {
    return TensorView::matrix(v.data(), DType::kFloat32, rows, cols);
  };
  const std::vector<int64_t> of = {0, 1, -1, 0};
  std::vector<LoraAdapter> adapters(2);
  adapters[0].a = adapters[1].a = matrix(good_a, kRank, kInputs);
  adapters[0].b = matrix(good_b, kOutputs, kRank);
  adapters[1].b = matrix(bad_b, kOutputs, kRank);
  LoraLinearArgs args;
  args.x = matrix(x, kRows, kInputs);
  args.w = matrix(w, kOutputs, kInputs);
  args.adapters = adapters;
  args.y = matrix(y, kRows, kOutputs);
  args.h = matrix(h, kRows, 2 * kRank);
  args.samples.adapter = of.data();
  TestHost host;
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  ASSERT_TRUE(lora_linear_forward(context(&host, 2), args).ok());
  for (int64_t n = 0; n < kOutputs; ++n) {
    const auto at = [&](int64_t m) { return y[static_cast<size_t>(m * kOutputs + n)]; };
    EXPECT_EQ(at(0), 0.5F * kInputs + 2.0F * kRank * kInputs);
    EXPECT_TRUE(at(1) != at(1));
    EXPECT_EQ(at(2), 0.5F * kInputs);
    EXPECT_EQ(at(3), at(0));
  }
  const std::vector<TensorView> das = {matrix(da, kRank, kInputs), {}};
  const std::vector<TensorView> dbs = {matrix(db, kOutputs, kRank), {}};
  LoraLinearBackwardArgs back;
  back.dy = matrix(dy, kRows, kOutputs);
  back.x = args.x;
  back.w = args.w;
  back.adapters = adapters;
  back.h = args.h;
  back.samples = args.samples;
  back.grads.dx = matrix(dx, kRows, kInputs);
  back.grads.da = das;
  back.grads.db = dbs;
  ASSERT_TRUE(lora_linear_backward(context(&host, 2), back).ok());
  for (const float v : da) EXPECT_EQ(v, 2.0F * 2.0F * kOutputs);
  for (const float v : db) EXPECT_EQ(v, 2.0F * kInputs);
  for (int64_t m : {0, 2, 3}) {
    for (int64_t k = 0; k < kInputs; ++k)
      EXPECT_EQ(dx[static_cast<size_t>(m * kInputs + k)],
                0.5F * kOutputs + (m == 2 ? 0.0F : 2.0F * kRank * kOutputs));
  }
}

TEST(LoraRankMasksErrors, NameWhatWasFound) {
  LoraCase c;
  c.m = 6;
  c.sample_rows = 3;
  c.adapters = {{2, 0, DType::kFloat32, 1.0}};
  const auto message = [](const LoraCase& wrong) {
    TestHost host;
    const LoraProblem problem(wrong);
    const ForwardRun run = problem.forward(host.context(1));
    EXPECT_EQ(run.status.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(run.y.untouched() && run.h.untouched());
    return std::string(run.status.message());
  };
  LoraCase wrong = c;
  wrong.sample_adapters = {0, 1};
  EXPECT_NE(message(wrong).find("sample 1 has adapter 1, expected -1 (none) to 0"),
            std::string::npos)
      << message(wrong);
  wrong.sample_adapters = {-2, 0};
  EXPECT_NE(message(wrong).find("sample 0 has adapter -2"), std::string::npos);
  wrong = c;
  wrong.sample_rows = 4;
  EXPECT_NE(message(wrong).find("samples of 4 rows, expected a divisor"), std::string::npos);
  wrong = c;
  wrong.sample_adapters = {0, 0};
  wrong.adapters[0].dropout = 0.5;
  EXPECT_NE(message(wrong).find("input_dropout"), std::string::npos);
  wrong = c;
  wrong.adapters[0].hidden_dropout = 1.5;
  EXPECT_NE(message(wrong).find("hidden_dropout is 1.5"), std::string::npos);
  wrong = c;
  wrong.adapters[0].rank_dropout = -0.5;
  EXPECT_NE(message(wrong).find("rank_dropout is -0.5"), std::string::npos);
}

}  // namespace
}  // namespace loraaccel::test
