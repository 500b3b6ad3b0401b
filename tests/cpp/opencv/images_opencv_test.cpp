// OpenCV's own functions, with which loraaccel was built, as the oracle of ours; and decoding of what it encodes.
#include "loraaccel/images_opencv.h"

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <opencv2/core.hpp>
#include <opencv2/imgcodecs.hpp>
#include <opencv2/imgproc.hpp>
#include <random>

#include "loraaccel/images.h"

namespace loraaccel::test {
namespace {

cv::Mat random_matrix(int width, int height, int channels, uint32_t seed) {
  std::mt19937 random(seed);
  cv::Mat image(height, width, CV_8UC(channels));
  for (size_t i = 0; i < image.total() * image.elemSize(); ++i)
    image.data[i] = static_cast<uint8_t>(random() >> 24);
  return image;
}

ImageView view_of(const cv::Mat& image) {
  return {image.data, {image.cols, image.rows}, image.channels(), static_cast<int64_t>(image.step)};
}

TEST(OpenCV, OursAreItsResizes) {
  std::mt19937 random(5);
  const auto side = [&] { return static_cast<int>(1 + random() % 130); };
  for (int i = 0; i < 300; ++i) {
    const int channels = std::array{1, 3, 4}[random() % 3];
    const cv::Mat image = random_matrix(side(), side(), channels, random());
    const cv::Size size(side(), side());
    for (const auto& [method, flag] : {std::pair{ResizeMethod::kArea, cv::INTER_AREA},
                                       std::pair{ResizeMethod::kLinear, cv::INTER_LINEAR}}) {
      cv::Mat expected;
      cv::resize(image, expected, size, 0, 0, flag);
      cv::Mat found(size, image.type());
      ResizeArgs args;
      args.source = view_of(image);
      args.size = {size.width, size.height};
      args.rules = {method};
      args.crop = {0, 0, args.size};
      args.out = found.data;
      args.out_row_bytes = static_cast<int64_t>(found.step);
      const Status status = resize_image(default_context(), args);
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(cv::norm(expected, found, cv::NORM_INF), 0)
          << image.cols << "x" << image.rows << " to " << size.width << "x" << size.height
          << ", channels " << channels << ", method " << static_cast<int>(method);
    }
  }
}

TEST(OpenCV, DecodesWhatItEncoded) {
  const cv::Mat image = random_matrix(37, 21, 3, 1);
  std::vector<uint8_t> file;
  ASSERT_TRUE(cv::imencode(".png", image, file));
  for (const bool alpha : {false, true}) {
    DecodedImage decoded;
    const Status status = decode_image(file, {.alpha = alpha}, &decoded);
    ASSERT_TRUE(status.ok()) << status.to_string();
    ASSERT_EQ(decoded.declined, "");
    EXPECT_EQ(decoded.view.size, (ImageSize{37, 21}));
    ASSERT_EQ(decoded.view.channels, alpha ? 4 : 3);
    for (int64_t i = 0; i < 37 * 21; ++i) {
      for (int c = 0; c < 3; ++c)
        EXPECT_EQ(decoded.view.data[i * decoded.view.channels + c], image.data[i * 3 + 2 - c]);
      if (alpha) {
        EXPECT_EQ(decoded.view.data[i * 4 + 3], 255);
      }
    }
  }
}

TEST(OpenCV, BrokenFilesAreDeclinedAndNeverCrash) {
  const cv::Mat image = random_matrix(37, 21, 3, 1);
  for (const char* format : {".png", ".jpg", ".webp"}) {
    std::vector<uint8_t> file;
    ASSERT_TRUE(cv::imencode(format, image, file));
    for (size_t part = 0; part < 16; ++part) {
      const std::span<const uint8_t> some(file.data(), file.size() * part / 16);
      DecodedImage decoded;
      ASSERT_TRUE(decode_image(some, {}, &decoded).ok());
      EXPECT_NE(decoded.declined, "") << format << " " << part;
    }
    std::mt19937 random(3);
    for (int i = 0; i < 200; ++i) {
      std::vector<uint8_t> changed = file;
      changed[random() % changed.size()] = static_cast<uint8_t>(random());
      DecodedImage decoded;
      const Status status = decode_image(changed, {.max_pixels = 100000}, &decoded);
      EXPECT_TRUE(status.ok() || status.code() == StatusCode::kInvalidArgument);
    }
  }
}

TEST(OpenCV, BombsAreRefusedBeforeDecoding) {
  std::vector<uint8_t> file;
  ASSERT_TRUE(cv::imencode(".png", random_matrix(20, 10, 1, 1), file));
  DecodedImage decoded;
  EXPECT_EQ(decode_image(file, {.max_pixels = 99}, &decoded).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(decoded.pixels, nullptr);
  EXPECT_TRUE(decode_image(file, {.max_pixels = 100}, &decoded).ok());
  EXPECT_TRUE(decode_image(file, {.max_pixels = 0}, &decoded).ok());
}

TEST(OpenCV, FilesThatAreNotThere) {
  std::vector<uint8_t> bytes;
  const Status status = read_whole_file("no-such-file.png", &bytes);
  EXPECT_EQ(status.code(), StatusCode::kFileError);
  EXPECT_EQ(status.error_number(), ENOENT);
}

}  // namespace
}  // namespace loraaccel::test
