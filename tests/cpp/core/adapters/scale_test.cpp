#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "loraaccel/adapter.h"

namespace loraaccel::test {
namespace {

TEST(Scale, VN1IsAlphaOverRank) {
  AdapterScale scale;
  ASSERT_TRUE(resolve_scale({.alpha_tensor = 16.0, .rank = 8}, &scale).ok());
  EXPECT_EQ(scale.value, 2.0);
  EXPECT_EQ(scale.rule, ScaleRule::kAlphaTensor);
  EXPECT_EQ(scale.text, "2 = 16 / 8, the file's alpha / rank");
}

TEST(Scale, VN2IsAlphaOverTheRootOfTheRankWhereRankStabilised) {
  for (const int64_t rank : {1, 2, 3, 16, 64}) {
    AdapterScale scale;
    ASSERT_TRUE(
        resolve_scale({.config_alpha = 16.0, .rank_stabilised = true, .rank = rank}, &scale).ok());
    EXPECT_EQ(scale.value, 16.0 / std::sqrt(static_cast<double>(rank)));
    EXPECT_EQ(scale.rule, ScaleRule::kConfigAlpha);
  }
}

TEST(Scale, TheFilesAlphaIsBeforeTheConfiguration) {
  AdapterScale scale;
  const ScaleSource source = {
      .alpha_tensor = 3.0, .config_alpha = 8.0, .rank_stabilised = true, .rank = 4};
  ASSERT_TRUE(resolve_scale(source, &scale).ok());
  EXPECT_EQ(scale.value, 0.75);  // a kohya alpha has the root in it already
}

TEST(Scale, VN3IsOneWithoutAlpha) {
  for (const std::optional<double> alpha : {std::optional<double>(), std::optional<double>(0.0)}) {
    AdapterScale scale;
    ASSERT_TRUE(resolve_scale({.alpha_tensor = alpha, .rank = 64}, &scale).ok());
    EXPECT_EQ(scale.value, 1.0);
    EXPECT_EQ(scale.rule, ScaleRule::kNoAlpha);
  }
}

TEST(Scale, IsOneOfWholeFactorsUnlessAConfigurationDivides) {
  AdapterScale scale;
  ASSERT_TRUE(resolve_scale({.alpha_tensor = 7.0, .rank = 0}, &scale).ok());
  EXPECT_EQ(scale.value, 1.0);
  EXPECT_EQ(scale.rule, ScaleRule::kWholeFactors);
  ASSERT_TRUE(resolve_scale({.config_alpha = 8.0, .rank = 0, .config_rank = 16}, &scale).ok());
  EXPECT_EQ(scale.value, 0.5);
}

TEST(Scale, NamesThePattern) {
  AdapterScale scale;
  ASSERT_TRUE(resolve_scale({.config_alpha = 3.0, .pattern = "q_proj", .rank = 6}, &scale).ok());
  EXPECT_EQ(scale.rule, ScaleRule::kAlphaPattern);
  EXPECT_EQ(scale.text, "0.5 = 3 / 6, alpha_pattern q_proj");
}

TEST(Scale, RefusesAnAlphaThatIsNoNumber) {
  for (const double alpha : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    AdapterScale scale;
    EXPECT_EQ(resolve_scale({.alpha_tensor = alpha, .rank = 4}, &scale).code(),
              StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace loraaccel::test
