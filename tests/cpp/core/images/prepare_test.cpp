#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "half.h"
#include "loraaccel/images.h"
#include "support/host.h"

namespace loraaccel::test {
namespace {

uint32_t bits_of(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}

// 256 x 1 pixels: red v, green 255 - v, blue 7, alpha v.
std::vector<uint8_t> all_values() {
  std::vector<uint8_t> pixels;
  for (int v = 0; v < 256; ++v) {
    for (const int c : {v, 255 - v, 7, v}) pixels.push_back(static_cast<uint8_t>(c));
  }
  return pixels;
}

PrepareArgs args_for(const std::vector<uint8_t>& pixels, void* out) {
  PrepareArgs args;
  args.source = {pixels.data(), {256, 1}, 4, 1024};
  args.size = {256, 1};
  args.crop = {0, 0, {256, 1}};
  args.out = out;
  return args;
}

TEST(Prepare, EveryValueAsTorchNormalisesIt) {
  const auto pixels = all_values();
  std::vector<float> out(3 * 256);
  std::vector<float> mask(256);
  PrepareArgs args = args_for(pixels, out.data());
  args.mask = mask.data();
  TestHost host;
  ASSERT_TRUE(prepare_images(host.context(), std::span(&args, 1)).ok());
  EXPECT_EQ(bits_of(out[0]), 0xBF800000U);
  EXPECT_EQ(bits_of(out[1]), 0xBF7DFDFEU);
  EXPECT_EQ(bits_of(out[127]), 0xBB808080U);
  EXPECT_EQ(bits_of(out[128]), 0x3B808100U);
  EXPECT_EQ(bits_of(out[254]), 0x3F7DFDFEU);
  EXPECT_EQ(bits_of(out[255]), 0x3F800000U);
  for (int v = 0; v < 256; ++v) {
    const float quotient = static_cast<float>(v) / 127.5F;
    EXPECT_EQ(out[v], quotient - 1.0F) << v;
    EXPECT_EQ(out[256 + v], out[255 - v]);
    EXPECT_EQ(out[512 + v], out[7]);
    EXPECT_EQ(mask[v], static_cast<float>(v) / 255.0F);
  }
}

TEST(Prepare, SixteenBitsAreTheRoundedFloats) {
  const auto pixels = all_values();
  std::vector<float> floats(3 * 256);
  std::vector<Float16> halves(3 * 256);
  std::vector<BFloat16> bfloats(3 * 256);
  PrepareArgs all[3] = {args_for(pixels, floats.data()), args_for(pixels, halves.data()),
                        args_for(pixels, bfloats.data())};
  all[1].dtype = DType::kFloat16;
  all[2].dtype = DType::kBFloat16;
  TestHost host;
  ASSERT_TRUE(prepare_images(host.context(2), all).ok());
  for (size_t i = 0; i < floats.size(); ++i) {
    Float16 half;
    BFloat16 bfloat;
    from_float(floats[i], &half);
    from_float(floats[i], &bfloat);
    EXPECT_EQ(halves[i].bits, half.bits) << i;
    EXPECT_EQ(bfloats[i].bits, bfloat.bits) << i;
  }
}

TEST(Prepare, FlipOrderOfColoursAndNumbersOfOnesOwn) {
  const auto pixels = all_values();
  std::vector<float> out(3 * 256);
  PrepareArgs args = args_for(pixels, out.data());
  args.flip = true;
  args.bgr = true;
  args.mean[2] = 0.25F;
  args.std[2] = 2.0F;
  TestHost host;
  ASSERT_TRUE(prepare_images(host.context(), std::span(&args, 1)).ok());
  for (int x = 0; x < 256; ++x) {
    EXPECT_EQ(out[512 + x], (static_cast<float>(255 - x) / 255.0F - 0.25F) / 2.0F);
    EXPECT_EQ(out[x], (7.0F / 255.0F - 0.5F) / 0.5F);
  }
}

TEST(Prepare, GreyIsThreeTimesAndAMaskWithoutAlphaIsOne) {
  const std::vector<uint8_t> pixels{0, 51, 102, 255};
  std::vector<float> out(12);
  std::vector<float> mask(4);
  PrepareArgs args;
  args.source = {pixels.data(), {2, 2}, 1, 2};
  args.size = {2, 2};
  args.crop = {0, 0, {2, 2}};
  args.out = out.data();
  args.mask = mask.data();
  TestHost host;
  ASSERT_TRUE(prepare_images(host.context(), std::span(&args, 1)).ok());
  for (int c = 0; c < 3; ++c) {
    EXPECT_EQ(out[c * 4], -1.0F);
    EXPECT_EQ(out[c * 4 + 3], 1.0F);
  }
  EXPECT_EQ(mask, std::vector<float>(4, 1.0F));
}

TEST(Prepare, ErrorsBeforeAnythingIsWritten) {
  const auto pixels = all_values();
  std::vector<float> out(3 * 256, 5.0F);
  TestHost host;
  const auto code = [&](auto change) {
    PrepareArgs args[2] = {args_for(pixels, out.data()), args_for(pixels, out.data())};
    change(&args[1]);
    const StatusCode result = prepare_images(host.context(), args).code();
    EXPECT_EQ(out, std::vector<float>(3 * 256, 5.0F));
    return result;
  };
  EXPECT_EQ(code([](PrepareArgs* a) { a->dtype = DType::kFloat64; }),
            StatusCode::kUnsupportedDtype);
  EXPECT_EQ(code([](PrepareArgs* a) { a->out = nullptr; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](PrepareArgs* a) { a->std[1] = 0; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](PrepareArgs* a) { a->crop.size.width = 257; }), StatusCode::kInvalidArgument);
}

TEST(Prepare, NoImagesIsNothing) {
  TestHost host;
  EXPECT_TRUE(prepare_images(host.context(), {}).ok());
}

TEST(Prepare, VI2OverWhite) {
  const std::vector<uint8_t> rgba{200, 10, 30, 0, 0, 0, 255, 128};
  std::vector<uint8_t> rgb(6);
  flatten_over_white(rgba.data(), 2, rgb.data());
  EXPECT_EQ(rgb, (std::vector<uint8_t>{255, 255, 255, 127, 127, 255}));
}

}  // namespace
}  // namespace loraaccel::test
