#include "loraaccel/images_opencv.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <opencv2/core.hpp>
#include <opencv2/imgcodecs.hpp>
#include <opencv2/imgproc.hpp>

#include "images/headers.h"

namespace loraaccel {
namespace {

// Why this file is left to another decoder; empty where OpenCV makes of it what Pillow does.
std::string why_not(Bytes bytes, ImageFormat format, bool alpha) {
  switch (format) {
    case ImageFormat::kJpeg: {
      const JpegFacts facts = read_jpeg_facts(bytes);
      if (facts.components == 4) return "a CMYK JPEG";
      if (facts.components != 1 && facts.components != 3) return "a JPEG of unusual components";
      if (facts.precision != 8) return "a JPEG of more than 8 bits";
      if (facts.frame < 0xC0 || facts.frame > 0xC2) return "a JPEG of an unusual process";
      return facts.complete ? "" : "a JPEG that ends early";
    }
    case ImageFormat::kPng: {
      const PngFacts facts = read_png_facts(bytes);
      const bool grey = facts.color == 0 || facts.color == 4;
      if (facts.animated) return "an animated PNG";
      if (grey && facts.depth == 16) return "a grey PNG of 16 bits";
      if (alpha && facts.depth == 16) return "a PNG of 16 bits with alpha wanted";
      if (alpha && facts.transparency) return "a PNG with a transparent colour";
      if (facts.color == 3 && facts.palette < 1 << facts.depth) return "a PNG with a short palette";
      return facts.complete ? "" : "a PNG that ends early";
    }
    case ImageFormat::kWebp: {
      const WebpFacts facts = read_webp_facts(bytes);
      if (facts.animated) return "an animated WebP";
      return facts.complete ? "" : "a WebP that ends early";
    }
    case ImageFormat::kBmp:
      return "a BMP";
    case ImageFormat::kUnknown:
      break;
  }
  return "a file of another format than PNG, JPEG and WebP";
}

Status too_many_pixels(ImageSize size, int64_t max_pixels) {
  return Status(StatusCode::kInvalidArgument,
                "image: " + std::to_string(size.width) + "x" + std::to_string(size.height) +
                    " is " + std::to_string(size.width * size.height) +
                    " pixels, expected at most " + std::to_string(2 * max_pixels) +
                    " (a decompression bomb?)");
}

// Empty where OpenCV made nothing of it, or something else than the header promised.
cv::Mat decode(Bytes bytes, ImageSize size, const DecodeRules& rules) {
  const cv::Mat data(1, static_cast<int>(bytes.size()), CV_8UC1,
                     const_cast<uint8_t*>(bytes.data()));
  const int flags = rules.alpha ? static_cast<int>(cv::IMREAD_UNCHANGED)
                                : cv::IMREAD_COLOR | cv::IMREAD_IGNORE_ORIENTATION;
  cv::Mat image = cv::imdecode(data, flags);
  if (image.empty() || image.depth() != CV_8U || image.cols != size.width ||
      image.rows != size.height)
    return {};
  switch (image.channels()) {
    case 1:
      cv::cvtColor(image, image, rules.alpha ? cv::COLOR_GRAY2BGRA : cv::COLOR_GRAY2BGR);
      break;
    case 3:
      if (rules.alpha) {
        cv::cvtColor(image, image, rules.rgb ? cv::COLOR_BGR2RGBA : cv::COLOR_BGR2BGRA);
      } else if (rules.rgb) {
        cv::cvtColor(image, image, cv::COLOR_BGR2RGB);
      }
      break;
    case 4:
      if (!rules.alpha) return {};
      if (rules.rgb) cv::cvtColor(image, image, cv::COLOR_BGRA2RGBA);
      break;
    default:
      return {};
  }
  return image;
}

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

}  // namespace

Status decode_image(std::span<const uint8_t> bytes, const DecodeRules& rules, DecodedImage* out) {
  *out = {};
  if (!read_image_header(bytes, &out->header).ok()) {
    out->declined = "a file whose header says no size";
    return {};
  }
  const ImageSize size = out->header.size;
  if (rules.max_pixels > 0 && size.width > 0 &&
      size.width > 2 * rules.max_pixels / std::max<int64_t>(size.height, 1))
    return too_many_pixels(size, rules.max_pixels);
  out->declined = why_not(bytes, out->header.format, rules.alpha);
  if (!out->declined.empty()) return {};
  try {
    cv::Mat image;
    if (bytes.size() <= 0x7FFFFFFF) image = decode(bytes, size, rules);
    if (!image.empty()) {
      out->view = {image.data, size, image.channels(), static_cast<int64_t>(image.step)};
      out->pixels = std::make_shared<cv::Mat>(std::move(image));
      return {};
    }
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "image: no memory for the pixels");
  } catch (const cv::Exception& error) {
    if (error.code == cv::Error::StsNoMem)
      return Status(StatusCode::kOutOfMemory, "image: no memory for the pixels");
  } catch (const std::exception&) {  // a decoder's: as where it makes nothing of the file
    out->view = {};
  }
  out->declined = "a file that OpenCV does not decode";
  return {};
}

Status read_whole_file(const std::string& path, std::vector<uint8_t>* out) {
  const auto failed = [&path](const char* what) {
    const int error = errno;
    return Status(StatusCode::kFileError,
                  path + ": cannot be " + what + ": " + std::strerror(error), error);
  };
  const std::unique_ptr<std::FILE, CloseFile> file(std::fopen(path.c_str(), "rb"));
  if (file == nullptr) return failed("opened");
  out->clear();
  try {
    constexpr size_t kPart = size_t{1} << 20;
    size_t have = 0;
    size_t got = kPart;
    while (got == kPart) {
      if (have + kPart > out->size()) out->resize(std::max(have + kPart, 2 * out->size()));
      got = std::fread(out->data() + have, 1, kPart, file.get());
      have += got;
    }
    if (std::ferror(file.get()) != 0) return failed("read");
    out->resize(have);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, path + ": no memory for the file");
  }
  return {};
}

Status resize_cubic(const ResizeArgs& args) {
  const ImageView& source = args.source;
  if (source.size.width < 1 || source.size.height < 1 || args.size.width < 1 ||
      args.size.height < 1 || source.data == nullptr || args.out == nullptr ||
      std::max({source.size.width, source.size.height, args.size.width, args.size.height}) >
          0x7FFFFF) {
    return Status(StatusCode::kInvalidArgument,
                  "resize_cubic: sizes that are not positive or above 2^23, or no memory");
  }
  try {
    const int type = CV_8UC(source.channels);
    const cv::Mat in(static_cast<int>(source.size.height), static_cast<int>(source.size.width),
                     type, const_cast<uint8_t*>(source.data),
                     static_cast<size_t>(source.row_bytes));
    cv::Mat out(static_cast<int>(args.size.height), static_cast<int>(args.size.width), type,
                args.out, static_cast<size_t>(args.out_row_bytes));
    cv::resize(in, out, out.size(), 0, 0, cv::INTER_CUBIC);
  } catch (const std::exception& error) {
    return Status(StatusCode::kInternal, std::string("resize_cubic: OpenCV: ") + error.what());
  }
  return {};
}

const char* opencv_version() { return CV_VERSION; }

}  // namespace loraaccel
