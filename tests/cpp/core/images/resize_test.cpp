#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "images/image_kernels.h"
#include "images/taps.h"
#include "loraaccel/images.h"
#include "support/host.h"

namespace loraaccel::test {
namespace {

struct Image {
  ImageSize size;
  int channels = 1;
  std::vector<uint8_t> pixels;

  ImageView view() const { return {pixels.data(), size, channels, size.width * channels}; }
};

Image random_image(ImageSize size, int channels, uint32_t seed) {
  std::mt19937 random(seed);
  Image image{size, channels, {}};
  image.pixels.resize(static_cast<size_t>(size.width * size.height * channels));
  for (uint8_t& v : image.pixels) v = static_cast<uint8_t>(random() >> 24);
  return image;
}

ResizeArgs whole(const Image& image, ImageSize size, ResizeRules rules, std::vector<uint8_t>* out) {
  out->assign(static_cast<size_t>(size.width * size.height * image.channels), 0xEE);
  ResizeArgs args;
  args.source = image.view();
  args.size = size;
  args.rules = rules;
  args.crop = {0, 0, size};
  args.out = out->data();
  args.out_row_bytes = size.width * image.channels;
  return args;
}

std::vector<uint8_t> resized(const Image& image, ImageSize size, ResizeRules rules,
                             int threads = 1) {
  TestHost host;
  std::vector<uint8_t> out;
  const ResizeArgs args = whole(image, size, rules, &out);
  const Status status = resize_image(host.context(threads), args);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return out;
}

std::vector<uint8_t> row_to(const std::vector<uint8_t>& row, int64_t width, ResizeRules rules) {
  const Image image{{static_cast<int64_t>(row.size()), 1}, 1, row};
  return resized(image, {width, 1}, rules);
}

using Row = std::vector<uint8_t>;
constexpr ResizeRules kArea{ResizeMethod::kArea};
constexpr ResizeRules kLinear{ResizeMethod::kLinear};
constexpr ResizeRules kBox{ResizeMethod::kBox};
constexpr ResizeRules kLanczos{ResizeMethod::kLanczos};

TEST(Resize, AreaOfKnownRows) {
  Image ramp{{4, 4}, 1, {}};
  for (int i = 0; i < 16; ++i) ramp.pixels.push_back(static_cast<uint8_t>(10 * i));
  EXPECT_EQ(resized(ramp, {2, 2}, kArea), (Row{25, 45, 105, 125}));
  const Row row{0, 60, 120, 180, 240};
  EXPECT_EQ(row_to(row, 2, kArea), (Row{48, 192}));
  EXPECT_EQ(row_to(row, 3, kArea), (Row{24, 120, 216}));
  EXPECT_EQ(row_to(row, 4, kArea), (Row{12, 84, 156, 228}));
  EXPECT_EQ(row_to({1, 2, 4, 7, 8, 9}, 3, kArea), (Row{2, 6, 8}));
  EXPECT_EQ(row_to({1, 2, 4, 7, 8, 9}, 2, kArea), (Row{2, 8}));
}

TEST(Resize, OtherMethodsOfAKnownRow) {
  const Row row{0, 100, 200, 50};
  EXPECT_EQ(row_to(row, 8, kLinear), (Row{0, 25, 75, 125, 175, 163, 88, 50}));
  EXPECT_EQ(row_to(row, 6, kArea), (Row{0, 50, 100, 200, 125, 50}));
  EXPECT_EQ(row_to(row, 8, kLanczos), (Row{0, 13, 60, 146, 207, 169, 83, 27}));
  EXPECT_EQ(row_to(row, 2, kLanczos), (Row{71, 130}));
  EXPECT_EQ(row_to(row, 2, kBox), (Row{50, 125}));
  EXPECT_EQ(row_to(row, 3, kBox), (Row{0, 150, 50}));
}

TEST(Resize, VI5DownscalingIsAntiAliased) {
  Image board{{8, 8}, 1, {}};
  for (int i = 0; i < 64; ++i) board.pixels.push_back((i / 8 + i) % 2 == 0 ? 0 : 255);
  EXPECT_EQ(resized(board, {2, 2}, kBox), (Row{128, 128, 128, 128}));
  const Row impulse{0, 0, 0, 255, 0, 0, 0, 0};
  EXPECT_EQ(row_to(impulse, 2, kBox), (Row{64, 0}));
  EXPECT_EQ(row_to(impulse, 2, kLanczos), (Row{51, 29}));
  EXPECT_EQ(row_to({0, 255}, 8, kLanczos), (Row{0, 0, 28, 93, 162, 227, 255, 255}));
  EXPECT_EQ(usual_method({100, 100}, {100, 50}, false), ResizeMethod::kArea);
  EXPECT_EQ(usual_method({100, 100}, {100, 50}, true), ResizeMethod::kLanczos);
  EXPECT_EQ(usual_method({100, 100}, {101, 50}, false), ResizeMethod::kLanczos);
}

// Every kernel against ref, byte for byte, around the widths of vectors.
class ImageKernels : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    for (const ImageKernel& kernel : image_kernels()) {
      if (GetParam() == kernel.name && kernel.unavailable() != nullptr)
        GTEST_SKIP() << kernel.unavailable();
    }
    setenv("LORAACCEL_FORCE_KERNEL", GetParam().c_str(), 1);
  }
  void TearDown() override { unsetenv("LORAACCEL_FORCE_KERNEL"); }
};

TEST_P(ImageKernels, EqualRef) {
  const ImageSize sizes[] = {{1, 1}, {1, 40}, {33, 1}, {5, 7}, {16, 16}, {31, 65}, {97, 130}};
  for (const int channels : {1, 3, 4}) {
    for (const ImageSize& from : sizes) {
      const Image image = random_image(from, channels, 7);
      for (const ImageSize& to : sizes) {
        for (const ResizeMethod method :
             {ResizeMethod::kArea, ResizeMethod::kBox, ResizeMethod::kLanczos}) {
          for (const bool pillow13 : {false, true}) {
            const ResizeRules rules{method, pillow13};
            setenv("LORAACCEL_FORCE_KERNEL", "ref", 1);
            const auto expected = resized(image, to, rules);
            setenv("LORAACCEL_FORCE_KERNEL", GetParam().c_str(), 1);
            EXPECT_EQ(resized(image, to, rules, 3), expected)
                << from.width << "x" << from.height << " to " << to.width << "x" << to.height
                << ", method " << static_cast<int>(method) << ", channels " << channels;
          }
        }
      }
    }
  }
}

TEST_P(ImageKernels, SayWhichRan) {
  TestHost host;
  std::vector<uint8_t> out;
  const Image image = random_image({9, 9}, 3, 1);
  const Status status = resize_image(host.context(), whole(image, {4, 4}, kLanczos, &out));
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(host.kernel_ran, GetParam());
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const ImageKernel& kernel : image_kernels()) names.emplace_back(kernel.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Kernel, ImageKernels, testing::ValuesIn(kernel_names()),
                         [](const auto& kernel) { return kernel.param; });

TEST(Resize, CropsAreParts) {
  const Image image = random_image({60, 45}, 3, 3);
  for (const ResizeMethod method :
       {ResizeMethod::kNearest, ResizeMethod::kLinear, ResizeMethod::kArea, ResizeMethod::kBox,
        ResizeMethod::kLanczos}) {
    for (const ImageSize& to : {ImageSize{23, 19}, ImageSize{60, 19}, ImageSize{90, 100}}) {
      const auto full = resized(image, to, {method});
      TestHost host;
      std::vector<uint8_t> out;
      ResizeArgs args = whole(image, to, {method}, &out);
      args.crop = {5, 3, {11, 13}};
      args.out_row_bytes = 11 * 3;
      const Status status = resize_image(host.context(2), args);
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (int64_t y = 0; y < 13; ++y) {
        EXPECT_TRUE(std::equal(out.begin() + y * 33, out.begin() + (y + 1) * 33,
                               full.begin() + ((3 + y) * to.width + 5) * 3))
            << static_cast<int>(method) << " row " << y;
      }
    }
  }
}

TEST(Resize, ErrorsBeforeAnythingIsWritten) {
  TestHost host;
  std::vector<uint8_t> out;
  const Image image = random_image({6, 5}, 3, 3);
  const auto code = [&](auto change) {
    ResizeArgs args = whole(image, {3, 3}, kArea, &out);
    change(&args);
    const StatusCode result = resize_image(host.context(), args).code();
    EXPECT_EQ(out, Row(27, 0xEE));
    return result;
  };
  EXPECT_EQ(code([](ResizeArgs* a) { a->size = {0, 3}; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](ResizeArgs* a) { a->source.channels = 2; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](ResizeArgs* a) { a->source.data = nullptr; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](ResizeArgs* a) { a->source.row_bytes = 17; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](ResizeArgs* a) { a->crop.x = 1; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](ResizeArgs* a) { a->crop.y = -1; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](ResizeArgs* a) { a->out_row_bytes = 8; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](ResizeArgs* a) { a->size.width = INT64_C(1) << 40; }),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace loraaccel::test
