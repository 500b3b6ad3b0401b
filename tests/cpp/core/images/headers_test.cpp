#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "loraaccel/images.h"

namespace loraaccel::test {
namespace {

using std::string_literals::operator""s;

ImageHeader header_of(const std::string& bytes) {
  ImageHeader header;
  const Status status =
      read_image_header({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, &header);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return header;
}

StatusCode code_of(const std::string& bytes) {
  ImageHeader header;
  return read_image_header({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, &header)
      .code();
}

const std::string kTiff = "MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"s;
const std::string kJpegFrame = "\xFF\xC0\0\x0B\x08\0\x03\0\x05\x01\x01\x11\0"s;

TEST(ImageHeader, OfEachFormat) {
  const auto png = header_of("\x89PNG\r\n\x1A\n\0\0\0\rIHDR\0\0\1\2\0\0\0\3\x08\2\0\0\0????"s);
  EXPECT_EQ(png.format, ImageFormat::kPng);
  EXPECT_EQ(png.size, (ImageSize{258, 3}));
  const auto jpeg = header_of("\xFF\xD8\xFF\xE0\0\4??"s + kJpegFrame);
  EXPECT_EQ(jpeg.format, ImageFormat::kJpeg);
  EXPECT_EQ(jpeg.size, (ImageSize{5, 3}));
  EXPECT_EQ(jpeg.orientation, 1);
  const auto lossy = header_of("RIFF\x20\0\0\0WEBPVP8 \x14\0\0\0???\x9D\1*\x40\1\x90\1??????"s);
  EXPECT_EQ(lossy.size, (ImageSize{320, 400}));
  const auto lossless = header_of("RIFF\x20\0\0\0WEBPVP8L\x14\0\0\0/\x09\x40\1\0????"s);
  EXPECT_EQ(lossless.size, (ImageSize{10, 6}));
  const auto extended = header_of("RIFF\x20\0\0\0WEBPVP8X\x0A\0\0\0\0\0\0\0\x09\0\0\x13\0\0"s);
  EXPECT_EQ(extended.size, (ImageSize{10, 20}));
  const auto bmp = header_of("BM????????????\x28\0\0\0\x07\0\0\0\xF7\xFF\xFF\xFF"s);
  EXPECT_EQ(bmp.size, (ImageSize{7, 9}));
  const auto os2 = header_of("BM????????????\x0C\0\0\0\x07\0\x09\0"s);
  EXPECT_EQ(os2.size, (ImageSize{7, 9}));
  EXPECT_EQ(header_of("GIF89a"s).format, ImageFormat::kUnknown);
}

TEST(ImageHeader, VI1OrientationOfExif) {
  const std::string exif = "\xFF\xE1\0\x1E"s + "Exif\0\0"s + kTiff;
  EXPECT_EQ(header_of("\xFF\xD8"s + exif + kJpegFrame).orientation, 6);
  for (const char invalid : {'\0', '\x09'}) {
    std::string changed = exif;
    changed[4 + 6 + 19] = invalid;
    EXPECT_EQ(header_of("\xFF\xD8"s + changed + kJpegFrame).orientation, 1);
  }
}

TEST(ImageHeader, AnyBeginningOfAFileIsRead) {
  const std::string exif = "\xFF\xE1\0\x1E"s + "Exif\0\0"s + kTiff;
  const std::string files[] = {
      "\xFF\xD8"s + exif + kJpegFrame + "\xFF\xDA\0\2\1\2\3\xFF\0\xFF\xD0\4\xFF\xD9"s,
      "\x89PNG\r\n\x1A\n\0\0\0\rIHDR\0\0\1\2\0\0\0\3\x08\2\0\0\0????\0\0\0\x1A"s + "eXIf" + kTiff,
      "RIFF\x40\0\0\0WEBPVP8X\x0A\0\0\0\x08\0\0\0\x09\0\0\x13\0\0EXIF\x1A\0\0\0"s + kTiff,
      "BM????????????\x28\0\0\0\x07\0\0\0\xF7\xFF\xFF\xFF"s};
  for (const std::string& file : files) {
    EXPECT_EQ(code_of(file), StatusCode::kOk);
    for (size_t count = 0; count <= file.size(); ++count) {
      const std::vector<uint8_t> part(file.begin(), file.begin() + static_cast<int64_t>(count));
      ImageHeader header;
      const Status status = read_image_header(part, &header);
      EXPECT_TRUE(status.ok() || status.code() == StatusCode::kMalformedFile);
      EXPECT_EQ(status.ok(), header.format == ImageFormat::kUnknown || header.size.width > 0);
    }
    for (size_t i = 2; i < file.size(); ++i) {  // hostile lengths and offsets
      for (const char byte : {'\0', '\x7F', '\xFF'}) {
        std::string changed = file;
        changed[i] = byte;
        const StatusCode code = code_of(changed);
        EXPECT_TRUE(code == StatusCode::kOk || code == StatusCode::kMalformedFile);
      }
    }
  }
}

TEST(Buckets, KnownTables) {
  std::vector<ImageSize> sizes;
  ASSERT_TRUE(bucket_resolutions({512, 512}, 256, 1024, 64, &sizes).ok());
  const std::vector<ImageSize> expected = {
      {256, 832}, {256, 896}, {256, 960}, {256, 1024}, {320, 704}, {320, 768},
      {384, 640}, {448, 576}, {512, 512}, {576, 448},  {640, 384}, {704, 320},
      {768, 320}, {832, 256}, {896, 256}, {960, 256},  {1024, 256}};
  EXPECT_EQ(sizes, expected);
  ASSERT_TRUE(bucket_resolutions({1024, 1024}, 256, 2048, 64, &sizes).ok());
  ASSERT_EQ(sizes.size(), 41U);
  EXPECT_EQ(sizes[0], (ImageSize{256, 2048}));
  EXPECT_EQ(sizes[20], (ImageSize{1024, 1024}));
  EXPECT_EQ(sizes[40], (ImageSize{2048, 512}));
  EXPECT_EQ(bucket_resolutions({0, 1}, 256, 1024, 64, &sizes).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(bucket_resolutions({64, 64}, 256, 255, 64, &sizes).code(),
            StatusCode::kInvalidArgument);
}

TEST(Buckets, ImagesWithoutABucketAreErrors) {
  BucketChoice choice;
  const ImageSize one[] = {{64, 64}};
  EXPECT_EQ(choose_bucket({0, 5}, one, &choice).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(choose_bucket({5, 5}, {}, &choice).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(choose_bucket_without_enlarging({100000, 3}, {512, 512}, 64, &choice).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(choose_bucket_without_enlarging({100, 63}, {512, 512}, 64, &choice).code(),
            StatusCode::kInvalidArgument);
  ASSERT_TRUE(choose_bucket_without_enlarging({63, 100}, {512, 512}, 64, &choice).ok());
  EXPECT_EQ(choice.bucket, (ImageSize{0, 64}));
}

}  // namespace
}  // namespace loraaccel::test
