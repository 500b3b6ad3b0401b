// Conformance: every kernel of the list against the oracle, over sizes, types and layouts.
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "support/kernel_fixture.h"
#include "support/random.h"

namespace loraaccel::test {
namespace {

// The edges of every register tile, panel and block: multiples of 2, 3, 6, 8, 14, 16, 32 and 64, one less, one more.
constexpr int64_t kRows[] = {1, 2, 5, 6, 7, 13, 14, 15, 28, 29, 57, 65};
constexpr int64_t kWidths[] = {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 257, 300};
constexpr int64_t kRanks[] = {1, 2, 7, 8, 9, 16, 17, 64, 256};
constexpr DType kDtypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};

// The types that adapters may have beside operands of this one.
std::vector<DType> adapter_dtypes(DType x) {
  if (x == DType::kFloat64) return {DType::kFloat64};
  return {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
}

// One adapter, three of different ranks, or none.
std::vector<AdapterCase> adapters(int count, DType dtype, std::array<double, 3> dropouts = {}) {
  const std::vector<AdapterCase> all = {
      {3, dropouts[0], dtype, 2.0}, {8, dropouts[1], dtype, -0.5}, {1, dropouts[2], dtype, 1.25}};
  return {all.begin(), all.begin() + count};
}

using LoraLinear = LoraLinearKernels;
INSTANTIATE_TEST_SUITE_P(Kernel, LoraLinear, every_kernel(), kernel_test_name);

TEST_P(LoraLinear, Sizes) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    LoraCase base;
    base.dtype = dtype;
    base.adapters = {{7, 0, dtype, 1.5}};
    for (const int64_t m : kRows) {
      LoraCase c = base;
      c.m = m;
      check(c);
    }
    for (const int64_t width : kWidths) {
      LoraCase c = base;
      c.k = width;
      check(c);
      c = base;
      c.n = width;
      check(c);
    }
    for (const int64_t rank : kRanks) {
      LoraCase c = base;
      c.adapters[0].rank = rank;
      check(c);
    }
  }
}

// Longer than the blocks in which a sum over rows, columns or ranks is split.
TEST_P(LoraLinear, LongSums) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
    LoraCase c;
    c.dtype = dtype;
    c.m = 600;
    c.k = 40;
    c.adapters = {{2, 0.3, dtype, 1.0}, {2, 0, dtype, 1.0}};
    check(c);
    c.m = 3;
    c.k = 4500;
    check(c);
    c.k = 20;
    c.n = 4500;
    check(c);
    c.m = 130;  // several blocks of rows over several panels
    c.k = 300;
    c.n = 150;
    check(c);
  }
}

// Each way of splitting the work: panels packed where they are multiplied, in one pass over the sum or several, or for
// all threads before; the left factor read where it lies, or copied (rows a multiple of 2 KiB apart); few rows of a
// weight that comes from memory.
TEST_P(LoraLinear, WaysThroughTheProduct) {
  struct Size {
    int64_t m, k, n;
  };
  for (const Size& size : {Size{33, 2200, 20}, Size{37, 20, 2200}, Size{300, 4500, 7},
                           Size{300, 7, 4500}, Size{40, 1024, 33}, Size{300, 4608, 7}}) {
    LoraCase c;
    c.m = size.m;
    c.k = size.k;
    c.n = size.n;
    c.adapters = {{5, 0, DType::kFloat32, 1.5}};
    check(c);
    c.dtype = DType::kBFloat16;
    check(c);
  }
  LoraCase large;
  large.m = 17;
  large.k = large.n = 2100;
  check(large);
}

TEST_P(LoraLinear, Types) {
  for (const DType dtype : kDtypes) {
    for (const DType adapter_dtype : adapter_dtypes(dtype)) {
      for (const int count : {0, 1, 3}) {
        for (const bool bias : {false, true}) {
          LoraCase c;
          c.dtype = dtype;
          c.bias = bias;
          c.m = 9;
          c.k = 70;
          c.n = 35;
          c.adapters = adapters(count, adapter_dtype);
          check(c);
        }
      }
    }
  }
}

TEST_P(LoraLinear, AdaptersOfDifferentTypes) {
  LoraCase c;
  c.dtype = DType::kBFloat16;
  c.adapters = {
      {4, 0.3, DType::kFloat32, 1.0}, {2, 0, DType::kFloat16, -1.0}, {3, 0, DType::kBFloat16, 0.0}};
  check(c);
}

TEST_P(LoraLinear, Dropout) {
  const std::array<double, 3> rates[] = {{0.3, 0, 0}, {0, 0.3, 1}, {1, 1, 1}, {0.3, 0.5, 0.9}};
  for (const DType dtype : kDtypes) {
    for (const std::array<double, 3>& p : rates) {
      for (const int64_t k : {1, 63, 64, 65, 300}) {
        LoraCase c;
        c.dtype = dtype;
        c.m = 8;
        c.k = k;
        c.adapters = adapters(p[1] == 0 ? 1 : 3, dtype, p);
        check(c);
      }
    }
  }
}

TEST_P(LoraLinear, LayoutsOfInputs) {
  for (const DType dtype : kDtypes) {
    for (const Layout layout : kInputLayouts) {
      LoraCase c;
      c.dtype = dtype;
      c.m = 7;
      c.k = 37;
      c.adapters = adapters(3, dtype, {0, 0.3, 0});
      c.x = layout;
      check(c);
      c.x = Layout::kDense;
      c.w = layout;
      check(c);
    }
  }
}

TEST_P(LoraLinear, LayoutsOfOutputs) {
  for (const DType dtype : kDtypes) {
    for (const Layout layout : kOutputLayouts) {
      LoraCase c;
      c.dtype = dtype;
      c.m = 7;
      c.k = 37;
      c.adapters = adapters(3, dtype, {0, 0.3, 0});
      c.adapters_out = layout;
      check(c);
      c.adapters_out = Layout::kDense;
      c.dw = layout;
      check(c);
      c.dw = Layout::kDense;
      c.y = layout;
      check(c);
    }
  }
}

// Rows that are padded or misaligned are as good as dense ones: no kernel has a reason to decline them.
TEST_P(LoraLinear, ServesUnitColumns) {
  for (const Layout layout : {Layout::kPadded, Layout::kMisaligned}) {
    LoraCase c;
    c.y = c.dw = c.x = c.w = layout;
    const LoraProblem problem(c);
    TestHost host;
    EXPECT_TRUE(problem.forward(context(&host), kernel_->name).status.ok());
    EXPECT_TRUE(problem.backward(context(&host), kernel_->name).status.ok());
  }
}

TEST_P(LoraLinear, EmptySizes) {
  for (const DType dtype : kDtypes) {
    for (const double p : {0.0, 0.3, 1.0}) {
      LoraCase c;
      c.dtype = dtype;
      c.adapters = adapters(3, dtype, {p, 0, p});
      LoraCase no_rows = c;
      no_rows.m = 0;
      check(no_rows);
      LoraCase no_inputs = c;
      no_inputs.k = 0;
      check(no_inputs);
      LoraCase no_outputs = c;
      no_outputs.n = 0;
      check(no_outputs);
    }
  }
}

TEST_P(LoraLinear, OnlyWantedGradients) {
  LoraCase c;
  c.adapters = adapters(3, DType::kFloat32, {0, 0.3, 0});
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    c.dtype = dtype;
    for (AdapterCase& ad : c.adapters) {
      ad.dtype = dtype;
    }
    const LoraProblem problem(c);
    for (int mask = 0; mask < 32; ++mask) {
      SCOPED_TRACE(describe(c) + " mask " + std::to_string(mask));
      check_backward(problem, {(mask & 1) != 0, (mask & 2) != 0, (mask & 4) != 0, (mask & 8) != 0,
                               (mask & 16) != 0});
    }
  }
}

TEST_P(LoraLinear, RandomCases) {
  Random random(2024);
  for (int i = 0; i < 400; ++i) {
    LoraCase c;
    c.seed = static_cast<uint64_t>(i);
    c.m = random.pick<int64_t>(kRows);
    c.k = random.pick<int64_t>(kWidths);
    c.n = random.pick<int64_t>(kWidths);
    c.dtype = random.pick<DType>(kDtypes);
    c.bias = random.below(2) == 0;
    c.x = random.pick<Layout>(kInputLayouts);
    c.w = random.pick<Layout>(kInputLayouts);
    if (random.below(3) == 0) c.y = random.pick<Layout>(kOutputLayouts);
    if (random.below(3) == 0) c.dw = random.pick<Layout>(kOutputLayouts);
    c.adapters_out = random.pick<Layout>(kOutputLayouts);
    const std::vector<DType> types = adapter_dtypes(c.dtype);
    c.adapters.clear();
    for (int64_t left = random.below(4); left > 0; --left) {
      AdapterCase ad;
      ad.rank = random.pick<int64_t>(std::span(kRanks).first(8));
      ad.dropout = random.below(2) == 0 ? 0 : 0.3;
      ad.dtype = random.pick<DType>(types);
      ad.scale = 2 * random.real();
      c.adapters.push_back(ad);
    }
    check(c);
  }
}

}  // namespace
}  // namespace loraaccel::test
