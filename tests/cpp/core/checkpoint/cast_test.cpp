#include "checkpoint/cast.h"

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "half.h"

namespace loraaccel::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

float float_of(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

template <class From, class To>
std::vector<To> cast(FileDType from, const std::vector<From>& values, FileDType to,
                     CastCounts* counts) {
  std::vector<To> out(values.size());
  cast_elements(from, values.data(), to, out.data(), values.size(), counts);
  return out;
}

std::vector<uint16_t> floats_to_16(const std::vector<float>& values, FileDType to,
                                   CastCounts* counts) {
  return cast<float, uint16_t>(FileDType::kF32, values, to, counts);
}

float half_value(uint16_t bits) { return to_float(Float16{bits}); }
float bf16_value(uint16_t bits) { return to_float(BFloat16{bits}); }

TEST(Cast, VN4SmallValuesThatFp16CannotHoldAreCounted) {
  const std::vector<float> values = {1e-8F, 2.98e-8F, 3.0e-8F, 5.9e-8F, 6.1e-5F};
  CastCounts counts;
  const auto half = floats_to_16(values, FileDType::kF16, &counts);
  EXPECT_EQ(half, (std::vector<uint16_t>{0, 0, 1, 1, 0x03FF}));
  EXPECT_EQ(half_value(half[4]), 1023 * 0x1p-24F);
  EXPECT_EQ(counts.zeros, 2U);
  EXPECT_EQ(counts.infinities, 0U);
  counts = {};
  for (const uint16_t bits : floats_to_16(values, FileDType::kBF16, &counts)) EXPECT_NE(bits, 0);
  EXPECT_EQ(counts.zeros, 0U);
}

TEST(Cast, VW7RoundsToNearestEvenAndCountsNewInfinities) {
  CastCounts counts;
  const auto half = floats_to_16({65519.99F, 65520.0F, 1e5F, 65020.0F, -0.0F, kInf, -kInf, 1e-40F},
                                 FileDType::kF16, &counts);
  EXPECT_EQ(half_value(half[0]), 65504.0F);
  EXPECT_EQ(half_value(half[1]), kInf);
  EXPECT_EQ(half_value(half[2]), kInf);
  EXPECT_EQ(half_value(half[3]), 65024.0F);
  EXPECT_EQ(half[4], 0x8000);
  EXPECT_EQ(half_value(half[5]), kInf);
  EXPECT_EQ(half_value(half[6]), -kInf);
  EXPECT_EQ(half[7], 0);
  EXPECT_EQ(counts.infinities, 2U) << "infinities that were there do not count";
  EXPECT_EQ(counts.zeros, 1U) << "nor do zeros";
  counts = {};
  const auto bf16 =
      floats_to_16({1.00390625F, 1.01171875F, FLT_MAX, -0.0F}, FileDType::kBF16, &counts);
  EXPECT_EQ(bf16_value(bf16[0]), 1.0F);
  EXPECT_EQ(bf16_value(bf16[1]), 1.015625F);
  EXPECT_EQ(bf16_value(bf16[2]), kInf);
  EXPECT_EQ(bf16[3], 0x8000);
  EXPECT_EQ(counts.infinities, 1U);
}

TEST(Cast, VW7NanStaysNan) {
  for (const uint32_t bits : {0x7F800001U, 0xFF800001U, 0x7FC00000U, 0x7FFFFFFFU, 0x7F80FFFFU}) {
    for (const FileDType to : {FileDType::kF16, FileDType::kBF16}) {
      CastCounts counts;
      const uint16_t out = floats_to_16({float_of(bits)}, to, &counts)[0];
      EXPECT_TRUE(std::isnan(to == FileDType::kF16 ? half_value(out) : bf16_value(out))) << bits;
      EXPECT_EQ(counts.infinities + counts.zeros, 0U);
    }
  }
}

TEST(Cast, VariantsAgreeForAllHighHalvesAndChosenLowHalves) {
  const CastVariant& plain = cast_variants().back();
  std::vector<float> values(kCastBlock);
  std::vector<uint16_t> expected(kCastBlock);
  std::vector<uint16_t> found(kCastBlock);
  for (const uint32_t low : {0x0000U, 0x0001U, 0x1000U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
    for (uint32_t high = 0; high < 0x10000; high += kCastBlock) {
      for (uint32_t i = 0; i < kCastBlock; ++i) values[i] = float_of((high + i) << 16 | low);
      for (const CastVariant& v : cast_variants()) {
        if (v.to_f16 == nullptr) continue;
        for (const bool bf16 : {false, true}) {
          CastCounts a;
          CastCounts b;
          (bf16 ? plain.to_bf16 : plain.to_f16)(values.data(), expected.data(), kCastBlock, &a);
          (bf16 ? v.to_bf16 : v.to_f16)(values.data(), found.data(), kCastBlock, &b);
          ASSERT_EQ(found, expected) << v.name << " " << high << " " << low;
          ASSERT_EQ(a.zeros, b.zeros);
          ASSERT_EQ(a.infinities, b.infinities);
        }
      }
    }
  }
}

// The plain code against arithmetic in double: the nearest of the two neighbours, ties to the even one.
TEST(Cast, PlainCodeIsNearestEven) {
  for (const bool bf16 : {false, true}) {
    const auto value = [&](uint32_t bits) -> double {
      const auto h = static_cast<uint16_t>(bits);
      return bf16 ? bf16_value(h) : half_value(h);
    };
    const uint32_t last = bf16 ? 0x7F7F : 0x7BFF;
    std::vector<float> values;
    std::vector<uint16_t> expected;
    for (uint32_t bits = 0; bits < last; ++bits) {
      const double low = value(bits);
      const double high = value(bits + 1);
      const auto middle = static_cast<float>(low + (high - low) / 2);
      values.insert(values.end(), {static_cast<float>(low), middle, std::nextafter(middle, 0.0F),
                                   std::nextafter(middle, kInf)});
      const auto even = static_cast<uint16_t>(bits % 2 == 0 ? bits : bits + 1);
      expected.insert(expected.end(),
                      {static_cast<uint16_t>(bits), even, static_cast<uint16_t>(bits),
                       static_cast<uint16_t>(bits + 1)});
    }
    CastCounts counts;
    const auto found = floats_to_16(values, bf16 ? FileDType::kBF16 : FileDType::kF16, &counts);
    for (size_t i = 0; i < found.size(); ++i)
      ASSERT_EQ(found[i], expected[i]) << bf16 << " " << values[i];
    EXPECT_EQ(counts.infinities, 0U);
    EXPECT_EQ(counts.zeros, 2U) << "the tie at half of the least number, and what is below it";
  }
}

TEST(Cast, DoublesAreRoundedOnce) {
  // Through float, this would become the tie 1 + 2^-11 and go to 1.
  const double above_tie = 1 + std::ldexp(1.0, -11) + std::ldexp(1.0, -40);
  CastCounts counts;
  auto half = cast<double, uint16_t>(FileDType::kF64, {above_tie, 1e300, -1e300, 1e-300},
                                     FileDType::kF16, &counts);
  EXPECT_EQ(half[0], 0x3C01);
  EXPECT_EQ(half[1], 0x7C00);
  EXPECT_EQ(half[2], 0xFC00);
  EXPECT_EQ(half[3], 0);
  EXPECT_EQ(counts.infinities, 2U);
  EXPECT_EQ(counts.zeros, 1U);
  counts = {};
  const auto floats =
      cast<double, float>(FileDType::kF64, {0.1, 1e300, 1e-300, -0.0}, FileDType::kF32, &counts);
  EXPECT_EQ(floats[0], 0.1F);
  EXPECT_EQ(floats[1], kInf);
  EXPECT_EQ(floats[2], 0.0F);
  EXPECT_TRUE(std::signbit(floats[3]));
  EXPECT_EQ(counts.infinities, 1U);
  EXPECT_EQ(counts.zeros, 1U);
}

TEST(Cast, WideningIsExact) {
  std::vector<uint16_t> all(0x10000);
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const FileDType from : {FileDType::kF16, FileDType::kBF16}) {
    CastCounts counts;
    const auto floats = cast<uint16_t, float>(from, all, FileDType::kF32, &counts);
    const auto doubles = cast<uint16_t, double>(from, all, FileDType::kF64, &counts);
    const auto back = cast<float, uint16_t>(FileDType::kF32, floats, from, &counts);
    for (size_t i = 0; i < all.size(); ++i) {
      if (std::isnan(floats[i])) {
        ASSERT_TRUE(std::isnan(doubles[i]));
        continue;
      }
      ASSERT_EQ(static_cast<double>(floats[i]), doubles[i]);
      ASSERT_EQ(back[i], all[i]);
    }
    EXPECT_EQ(counts.zeros + counts.infinities, 0U);
  }
}

double f8_value(uint32_t bits, int fraction, int bias) {
  const auto exponent = static_cast<int>(bits >> fraction);
  const double digits = bits & ((1U << fraction) - 1);
  if (exponent == 0) return std::ldexp(digits, 1 - bias - fraction);
  return std::ldexp(digits + (1 << fraction), exponent - bias - fraction);
}

// Every number of the type, and the ties between neighbours.
TEST(Cast, VW7EightBitFloatsAreNearestEven) {
  struct Type {
    FileDType dtype;
    int fraction, bias;
    uint32_t last, beyond;  // largest number, and what is above it
  };
  for (const Type& t :
       {Type{FileDType::kF8E4M3, 3, 7, 0x7E, 0x7F}, Type{FileDType::kF8E5M2, 2, 15, 0x7B, 0x7C}}) {
    for (uint32_t bits = 0; bits < t.last; ++bits) {
      const double low = f8_value(bits, t.fraction, t.bias);
      const double high = f8_value(bits + 1, t.fraction, t.bias);
      const auto middle = static_cast<float>((low + high) / 2);
      CastCounts counts;
      const std::vector<float> values = {static_cast<float>(low), std::nextafter(middle, 0.0F),
                                         middle, std::nextafter(middle, kInf), -middle};
      const auto found = cast<float, uint8_t>(FileDType::kF32, values, t.dtype, &counts);
      const uint32_t even = bits + bits % 2;
      EXPECT_EQ(found,
                (std::vector<uint8_t>{static_cast<uint8_t>(bits), static_cast<uint8_t>(bits),
                                      static_cast<uint8_t>(even), static_cast<uint8_t>(bits + 1),
                                      static_cast<uint8_t>(even | 0x80)}))
          << file_dtype_name(t.dtype) << " " << bits;
    }
    CastCounts counts;
    const auto special = cast<float, uint8_t>(
        FileDType::kF32, {1e6F, kInf, -kInf, float_of(0x7FC00000), -0.0F, 1e-30F}, t.dtype,
        &counts);
    EXPECT_EQ(special,
              (std::vector<uint8_t>{static_cast<uint8_t>(t.beyond), static_cast<uint8_t>(t.beyond),
                                    static_cast<uint8_t>(t.beyond | 0x80), 0x7F, 0x80, 0}));
    EXPECT_EQ(counts.infinities, 1U);
    EXPECT_EQ(counts.zeros, 1U);
  }
  // 448 is the largest e4m3fn, 464 the tie above it, whose even neighbour it is.
  CastCounts counts;
  EXPECT_EQ(
      (cast<float, uint8_t>(FileDType::kF32, {448, 464, 465, 480}, FileDType::kF8E4M3, &counts)),
      (std::vector<uint8_t>{0x7E, 0x7E, 0x7F, 0x7F}));
  EXPECT_EQ(counts.infinities, 2U);
}

TEST(Cast, AnyAlignmentAndLength) {
  std::vector<char> source(4 * 3000 + 3);
  std::vector<char> to(2 * 3000 + 1);
  for (size_t i = 0; i < 3000; ++i) {
    const float v = static_cast<float>(i) - 1500;
    std::memcpy(source.data() + 3 + 4 * i, &v, sizeof v);
  }
  for (const size_t count : {0U, 1U, 7U, 8U, 1023U, 1024U, 1025U, 3000U}) {
    CastCounts counts;
    std::fill(to.begin(), to.end(), '\x55');
    cast_elements(FileDType::kF32, source.data() + 3, FileDType::kF16, to.data() + 1, count,
                  &counts);
    for (size_t i = 0; i < 3000; ++i) {
      uint16_t bits;
      std::memcpy(&bits, to.data() + 1 + 2 * i, sizeof bits);
      ASSERT_EQ(i < count ? half_value(bits) : 0.0F,
                i < count ? static_cast<float>(i) - 1500 : 0.0F);
      if (i < count) continue;
      ASSERT_EQ(bits, 0x5555) << "written beyond the end";
    }
  }
}

TEST(Cast, OneVariantAtLeastRunsHere) {
  EXPECT_NE(cast_variants().back().to_f16, nullptr);
  EXPECT_STREQ(cast_variants().back().name, "plain");
#if defined(__aarch64__)
  EXPECT_STREQ(cast_neon().name, "neon");
  EXPECT_NE(cast_neon().to_f16, nullptr);
#endif
}

}  // namespace
}  // namespace loraaccel::test
