// Both 16-bit types against slow arithmetic on their definition: sign, exponent, fraction.
#include "half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "support/random.h"

namespace loraaccel::test {
namespace {

struct BFloat16Format {
  using Type = BFloat16;
  static constexpr int kFractionBits = 7;
  static constexpr int kBias = 127;
};
struct Float16Format {
  using Type = Float16;
  static constexpr int kFractionBits = 10;
  static constexpr int kBias = 15;
};

template <class Format>
class Half : public ::testing::Test {
 protected:
  using Type = typename Format::Type;
  static constexpr int kFraction = Format::kFractionBits;
  static constexpr int kMinExponent = 1 - Format::kBias;  // of the smallest normal number
  static constexpr uint16_t kInfinityBits =
      static_cast<uint16_t>(((1 << (15 - kFraction)) - 1) << kFraction);

  static Type of_bits(int bits) { return {static_cast<uint16_t>(bits)}; }
  static bool is_nan(uint16_t bits) { return (bits & 0x7FFF) > kInfinityBits; }

  // The number that the bits stand for.
  static double value(uint16_t bits) {
    const int exponent = (bits & 0x7FFF) >> kFraction;
    const int fraction = bits & ((1 << kFraction) - 1);
    double magnitude;
    if (exponent == 0) {
      magnitude = std::ldexp(fraction, kMinExponent - kFraction);
    } else {
      magnitude = std::ldexp((1 << kFraction) + fraction, exponent - Format::kBias - kFraction);
    }
    if ((bits & 0x7FFF) == kInfinityBits) magnitude = std::numeric_limits<double>::infinity();
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
  }

  // Nearest, ties to the even fraction: v is divided by the spacing around it, which is a power of two, so exactly.
  static double rounded(double v) {
    if (v == 0 || std::isinf(v)) return v;
    const int spacing = std::max(std::ilogb(v), kMinExponent) - kFraction;
    const double result = std::ldexp(std::nearbyint(std::ldexp(v, -spacing)), spacing);
    return std::abs(result) >= std::ldexp(1.0, Format::kBias + 1)
               ? std::copysign(std::numeric_limits<double>::infinity(), v)
               : result;
  }

  template <class From>
  static void expect_rounds(From v) {
    Type got;
    from_float(v, &got);
    const double expected = rounded(static_cast<double>(v));
    if (value(got.bits) != expected || std::signbit(value(got.bits)) != std::signbit(expected)) {
      ADD_FAILURE() << v << " became " << value(got.bits) << ", expected " << expected;
    }
  }
};
using Formats = ::testing::Types<BFloat16Format, Float16Format>;
TYPED_TEST_SUITE(Half, Formats);

TYPED_TEST(Half, EveryNumberIsReadExactly) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const float f = to_float(TestFixture::of_bits(bits));
    if (TestFixture::is_nan(static_cast<uint16_t>(bits))) {
      ASSERT_TRUE(std::isnan(f)) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(f), TestFixture::value(static_cast<uint16_t>(bits))) << bits;
      ASSERT_EQ(std::signbit(f), (bits & 0x8000) != 0) << bits;
    }
  }
}

TYPED_TEST(Half, EveryNumberSurvivesTheRoundTrip) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const float f = to_float(TestFixture::of_bits(bits));
    typename TestFixture::Type from_single, from_double;
    from_float(f, &from_single);
    from_float(static_cast<double>(f), &from_double);
    if (std::isnan(f)) {
      ASSERT_TRUE(TestFixture::is_nan(from_single.bits)) << bits;
      ASSERT_TRUE(TestFixture::is_nan(from_double.bits)) << bits;
    } else {
      ASSERT_EQ(from_single.bits, bits);
      ASSERT_EQ(from_double.bits, bits);
    }
  }
}

// Between each two neighbours: the tie, and the next float and double on either side of it.
TYPED_TEST(Half, TiesGoToEven) {
  constexpr double kUp = std::numeric_limits<double>::infinity();
  for (int bits = 0; bits < TestFixture::kInfinityBits; ++bits) {
    const double low = TestFixture::value(static_cast<uint16_t>(bits));
    double high = TestFixture::value(static_cast<uint16_t>(bits + 1));
    if (std::isinf(high)) high = 2 * low - TestFixture::value(static_cast<uint16_t>(bits - 1));
    const double tie = low / 2 + high / 2;
    for (const double sign : {1.0, -1.0}) {
      const double v = sign * tie;
      TestFixture::expect_rounds(v);
      TestFixture::expect_rounds(std::nextafter(v, kUp));
      TestFixture::expect_rounds(std::nextafter(v, -kUp));
      const auto f = static_cast<float>(v);
      if (static_cast<double>(f) != v) continue;  // below bfloat16's smallest number
      TestFixture::expect_rounds(f);
      TestFixture::expect_rounds(std::nextafterf(f, std::numeric_limits<float>::infinity()));
      TestFixture::expect_rounds(std::nextafterf(f, -std::numeric_limits<float>::infinity()));
    }
  }
}

// A double that lies beside a tie by less than a float can tell: rounding it to float first would make it the tie.
TYPED_TEST(Half, DoublesAreRoundedOnce) {
  Random random(7);
  for (int i = 0; i < 200000; ++i) {
    const auto bits = static_cast<uint16_t>(random.below(TestFixture::kInfinityBits - 1));
    const double tie = (TestFixture::value(bits) + TestFixture::value(bits + 1)) / 2;
    const double beside =
        tie * (1 + std::ldexp(random.real(), -26 - static_cast<int>(random.below(24))));
    TestFixture::expect_rounds(beside);
    TestFixture::expect_rounds(-beside);
  }
}

TYPED_TEST(Half, RandomNumbers) {
  Random random(8);
  for (int i = 0; i < 300000; ++i) {
    const double v = std::ldexp(random.real(), static_cast<int>(random.below(300)) - 160);
    TestFixture::expect_rounds(v);
    TestFixture::expect_rounds(static_cast<float>(v));
  }
}

TYPED_TEST(Half, OverflowIsInfinite) {
  const double largest = TestFixture::value(TestFixture::kInfinityBits - 1);
  const double below = TestFixture::value(TestFixture::kInfinityBits - 2);
  const double limit = largest + (largest - below) / 2;  // the first number that is rounded away
  TestFixture::expect_rounds(std::nextafter(limit, 0.0));
  TestFixture::expect_rounds(limit);
  TestFixture::expect_rounds(std::numeric_limits<double>::max());
  TestFixture::expect_rounds(-std::numeric_limits<double>::max());
  TestFixture::expect_rounds(std::numeric_limits<float>::max());
  TestFixture::expect_rounds(std::numeric_limits<double>::infinity());
  TestFixture::expect_rounds(-std::numeric_limits<float>::infinity());
}

TYPED_TEST(Half, TinyNumbersKeepTheirSign) {
  TestFixture::expect_rounds(std::numeric_limits<double>::denorm_min());
  TestFixture::expect_rounds(-std::numeric_limits<double>::denorm_min());
  TestFixture::expect_rounds(-std::numeric_limits<float>::denorm_min());
  TestFixture::expect_rounds(-0.0);
  TestFixture::expect_rounds(-0.0F);
}

// A NaN whose payload lies only in the bits that are cut off must not become infinite.
TYPED_TEST(Half, NanStaysNan) {
  for (const uint32_t bits :
       {0x7F800001U, 0xFF800001U, 0x7FC00000U, 0x7FFFFFFFU, 0xFFFFFFFFU, 0x7F801000U}) {
    float f;
    memcpy(&f, &bits, sizeof f);
    typename TestFixture::Type got;
    from_float(f, &got);
    EXPECT_TRUE(TestFixture::is_nan(got.bits)) << std::hex << bits << " became " << got.bits;
    EXPECT_EQ((got.bits & 0x8000) != 0, (bits >> 31) != 0);
    from_float(static_cast<double>(f), &got);
    EXPECT_TRUE(TestFixture::is_nan(got.bits)) << std::hex << bits << " became " << got.bits;
  }
}

}  // namespace
}  // namespace loraaccel::test
