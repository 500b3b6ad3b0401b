#include "random/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "support/philox_reference.h"
#include "support/random.h"

namespace loraaccel::test {
namespace {

struct KnownAnswer {
  Counter counter;
  Key key;
  Counter output;
};

// philox4x32 with 10 rounds, from the table of known answers of Random123 (the authors' library).
constexpr KnownAnswer kKnownAnswers[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U}},
    {{0xffffffffU, 0xffffffffU, 0xffffffffU, 0xffffffffU},
     {0xffffffffU, 0xffffffffU},
     {0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU}},
    {{0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U},
     {0xa4093822U, 0x299f31d0U},
     {0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U}},
};

TEST(Philox, ReferenceOfTheseTests) {
  for (const KnownAnswer& known : kKnownAnswers) {
    EXPECT_EQ(philox4x32_10(known.counter, known.key), known.output);
  }
}

// The counter's four words are lane and group, row, row, offset: each known answer is four columns of a mask.
TEST(Philox, KnownAnswers) {
  for (const KnownAnswer& known : kKnownAnswers) {
    const uint64_t seed = (uint64_t{known.key[1]} << 32) | known.key[0];
    const auto row = static_cast<int64_t>((uint64_t{known.counter[2]} << 32) | known.counter[1]);
    const int64_t group = known.counter[0] / 16;
    const int64_t lane = known.counter[0] % 16;
    for (int64_t word = 0; word < 4; ++word) {
      EXPECT_EQ(dropout_word(seed, known.counter[3], row, 64 * group + 16 * word + lane),
                known.output[static_cast<size_t>(word)]);
    }
  }
}

TEST(Philox, WordsFollowTheNote) {
  Random random(3);
  for (int i = 0; i < 2000; ++i) {
    const uint64_t seed = random.bits();
    const uint64_t offset = random.bits();
    const auto row = static_cast<int64_t>(random.bits() >> 1);
    const int64_t col = random.below(int64_t{1} << 34);
    const double p = std::abs(random.real());
    EXPECT_EQ(dropout_word(seed, offset, row, col) >= dropout_threshold(p),
              dropout_keeps(p, seed, offset, row, col));
  }
}

TEST(Philox, EveryPartOfTheKeyMatters) {
  const uint32_t word = dropout_word(1, 2, 3, 4);
  for (int bit = 0; bit < 64; ++bit) {
    EXPECT_NE(dropout_word(1 ^ (uint64_t{1} << bit), 2, 3, 4), word) << "seed, bit " << bit;
    EXPECT_NE(dropout_word(1, 2 ^ (uint64_t{1} << bit), 3, 4), word) << "offset, bit " << bit;
  }
  for (int bit = 0; bit < 63; ++bit) {
    EXPECT_NE(dropout_word(1, 2, 3 ^ (int64_t{1} << bit), 4), word) << "row, bit " << bit;
  }
  for (int bit = 0; bit < 34; ++bit) {  // 32 bits of groups and lanes, four words of 16 lanes
    EXPECT_NE(dropout_word(1, 2, 3, 4 ^ (int64_t{1} << bit)), word) << "column, bit " << bit;
  }
}

TEST(Philox, ThresholdsAtTheEnds) {
  EXPECT_EQ(dropout_threshold(0), 0U);
  EXPECT_EQ(dropout_threshold(1), uint64_t{1} << 32);  // above every word: nothing is kept
  EXPECT_EQ(dropout_threshold(0.5), uint64_t{1} << 31);
  EXPECT_EQ(dropout_keep_scale(0), 1.0F);
  EXPECT_EQ(dropout_keep_scale(0.5), 2.0F);
  EXPECT_EQ(dropout_keep_scale(1), 0.0F);
}

// The number of dropped elements is binomial: its mean lies within four standard deviations of p.
TEST(Philox, MeanOfTheMask) {
  constexpr int64_t kRows = 500;
  constexpr int64_t kCols = 1000;
  for (const double p : {0.01, 0.1, 0.5, 0.9}) {
    const uint64_t threshold = dropout_threshold(p);
    double dropped = 0;
    for (int64_t m = 0; m < kRows; ++m) {
      for (int64_t k = 0; k < kCols; ++k) dropped += dropout_word(42, 0, m, k) < threshold;
    }
    constexpr double kCount = kRows * kCols;
    EXPECT_NEAR(dropped / kCount, p, 4 * std::sqrt(p * (1 - p) / kCount));
  }
}

// Neighbours in any direction, and masks of neighbouring offsets, agree as often as independent ones would.
TEST(Philox, NeighboursAreIndependent) {
  constexpr int64_t kCount = 200000;
  const auto agreement = [](int64_t row, int64_t col, uint64_t offset) {
    const uint64_t threshold = dropout_threshold(0.5);
    double same = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      const int64_t m = i / 500;
      const int64_t k = i % 500;
      same += (dropout_word(7, 0, m, k) < threshold) ==
              (dropout_word(7, offset, m + row, k + col) < threshold);
    }
    return same / kCount;
  };
  const double four_sigma = 4 * std::sqrt(0.25 / kCount);
  EXPECT_NEAR(agreement(0, 1, 0), 0.5, four_sigma);
  EXPECT_NEAR(agreement(0, 16, 0), 0.5, four_sigma);
  EXPECT_NEAR(agreement(0, 64, 0), 0.5, four_sigma);
  EXPECT_NEAR(agreement(1, 0, 0), 0.5, four_sigma);
  EXPECT_NEAR(agreement(0, 0, 1), 0.5, four_sigma);
}

}  // namespace
}  // namespace loraaccel::test
