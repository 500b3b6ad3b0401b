#include "adapters/merge_weight.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "half.h"
#include "loraaccel/adapter_convert.h"
#include "support/host.h"

namespace loraaccel::test {
namespace {

AdapterTensor tensor(AdapterRole role, std::vector<int64_t> shape,
                     const std::vector<float>& values) {
  AdapterTensor t;
  t.role = role;
  t.key = adapter_role_name(role);
  t.shape = std::move(shape);
  t.data = values.data();
  return t;
}

class MergeWeight : public ::testing::Test {
 protected:
  // A LoRA of rank 1 whose update is scale * [1, 2, 3]^T [1, 10].
  AdapterEntry entry(double scale) {
    AdapterEntry e;
    e.path = "layer";
    e.tensors = {tensor(AdapterRole::kUp, {3, 1}, up_), tensor(AdapterRole::kDown, {1, 2}, down_)};
    e.scale.value = scale;
    EXPECT_TRUE(complete_adapter_entry(std::nullopt, &e).ok());
    return e;
  }

  std::vector<float> up_ = {1, 2, 3};
  std::vector<float> down_ = {1, 10};
  TestHost host_;
};

TEST_F(MergeWeight, AddsStrengthTimesFactorTimesProduct) {
  const AdapterEntry e = entry(2);
  std::vector<float> w(6, 100);
  MergedWeight weight{.name = "w", .rows = 3, .columns = 2, .data = w.data()};
  const MergeWork work = {.shares = {{&e, 0.5, 0, 0, 3}}};
  ASSERT_TRUE(merge_weight(host_.context(2), work, &weight).ok());
  EXPECT_EQ(w, (std::vector<float>{101, 110, 102, 120, 103, 130}));
}

TEST_F(MergeWeight, OnlyTheRowsOfAShareChange) {
  const AdapterEntry e = entry(1);
  std::vector<float> w(10, 0);
  MergedWeight weight{.name = "w", .rows = 5, .columns = 2, .data = w.data()};
  // rows 1 and 2 of the adapter are rows 3 and 4 of the weight
  const MergeWork work = {.shares = {{&e, 1, 1, 3, 2}}};
  ASSERT_TRUE(merge_weight(host_.context(), work, &weight).ok());
  EXPECT_EQ(w, (std::vector<float>{0, 0, 0, 0, 0, 0, 2, 20, 3, 30}));
}

TEST_F(MergeWeight, SeveralAdaptersAreOneSumAndOneRounding) {
  // 2048 + 1 + 1 in float16: two roundings to even would lose both
  const AdapterEntry e = entry(1);
  Float16 large;
  from_float(2048.0F, &large);
  std::vector<Float16> w(6, large);
  MergedWeight weight{
      .name = "w", .dtype = FileDType::kF16, .rows = 3, .columns = 2, .data = w.data()};
  const MergeWork work = {.shares = {{&e, 1, 0, 0, 3}, {&e, 1, 0, 0, 3}}};
  ASSERT_TRUE(merge_weight(host_.context(), work, &weight).ok());
  EXPECT_EQ(to_float(w[0]), 2050.0F);
}

TEST_F(MergeWeight, ANumberTooLargeIsAnErrorThatNamesTheWeight) {
  up_[1] = std::numeric_limits<float>::infinity();
  const AdapterEntry e = entry(1);
  std::vector<float> w(6, 0);
  MergedWeight weight{.name = "the weight", .rows = 3, .columns = 2, .data = w.data()};
  const Status status = merge_weight(host_.context(), {.shares = {{&e, 1, 0, 0, 3}}}, &weight);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("the weight"), std::string::npos) << status.message();
}

TEST_F(MergeWeight, DeltaIsTheSameInFloat64) {
  std::vector<double> delta;
  int64_t rows = 0;
  int64_t columns = 0;
  ASSERT_TRUE(adapter_delta(entry(0.1), &delta, &rows, &columns).ok());
  EXPECT_EQ(rows, 3);
  EXPECT_EQ(columns, 2);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_DOUBLE_EQ(delta[2 * i], 0.1 * static_cast<double>(i + 1));
    EXPECT_DOUBLE_EQ(delta[2 * i + 1], static_cast<double>(i + 1));
  }
}

TEST_F(MergeWeight, DoraOfTheHandExample) {
  const std::vector<float> up = {1, 0};
  const std::vector<float> down = {0, 1};
  const std::vector<float> magnitude = {10, 2};
  AdapterEntry e;
  e.tensors = {tensor(AdapterRole::kUp, {2, 1}, up), tensor(AdapterRole::kDown, {1, 2}, down),
               tensor(AdapterRole::kDoraScale, {2, 1}, magnitude)};
  ASSERT_TRUE(complete_adapter_entry(std::nullopt, &e).ok());
  std::vector<float> w = {3, 4, 0, 1};
  MergedWeight weight{.name = "w", .rows = 2, .columns = 2, .data = w.data()};
  ASSERT_TRUE(merge_weight(host_.context(), {.shares = {{&e, 1, 0, 0, 2}}}, &weight).ok());
  const double expected[] = {5.14495755, 8.57492926, 0, 2};
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(w[i], expected[i], 1e-6);
}

}  // namespace
}  // namespace loraaccel::test
