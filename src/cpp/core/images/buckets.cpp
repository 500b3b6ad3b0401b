// The arithmetic of buckets. All divisions are of doubles, in the order in which sd-scripts' Python does them.
#include <algorithm>
#include <cmath>
#include <set>

#include "loraaccel/images.h"

namespace loraaccel {
namespace {

std::string text(ImageSize size) {
  return std::to_string(size.width) + "x" + std::to_string(size.height);
}

constexpr int64_t kLargestSide = int64_t{1} << 26;

Status check_size(const char* op, const char* name, ImageSize size) {
  if (size.width > 0 && size.height > 0 && size.width <= kLargestSide &&
      size.height <= kLargestSide)
    return {};
  return Status(StatusCode::kInvalidArgument, std::string(op) + ": " + name + " " + text(size) +
                                                  ", expected sides of 1 to " +
                                                  std::to_string(kLargestSide));
}

double ratio(ImageSize size) {
  return static_cast<double>(size.width) / static_cast<double>(size.height);
}

int64_t round_half_up(double v) { return static_cast<int64_t>(std::floor(v + 0.5)); }

}  // namespace

Status bucket_resolutions(ImageSize max_resolution, int64_t min_size, int64_t max_size,
                          int64_t step, std::vector<ImageSize>* out) {
  constexpr const char* kOp = "make_bucket_resolutions";
  LORAACCEL_RETURN_IF_ERROR(check_size(kOp, "max_reso", max_resolution));
  if (step < 1 || min_size < 1 || max_size < min_size || max_size > kLargestSide) {
    return Status(StatusCode::kInvalidArgument,
                  std::string(kOp) + ": min_size " + std::to_string(min_size) + ", max_size " +
                      std::to_string(max_size) + ", step " + std::to_string(step) +
                      ", expected step >= 1 and 1 <= min_size <= max_size");
  }
  const int64_t area = max_resolution.width * max_resolution.height;
  std::set<ImageSize> sizes;
  const auto square = static_cast<int64_t>(std::floor(std::sqrt(static_cast<double>(area)) /
                                                      static_cast<double>(step))) *
                      step;
  sizes.insert({square, square});
  for (int64_t width = min_size; width <= max_size; width += step) {
    const int64_t height = std::min(max_size, area / width / step * step);
    if (height < min_size) continue;
    sizes.insert({width, height});
    sizes.insert({height, width});
  }
  out->assign(sizes.begin(), sizes.end());
  return {};
}

Status choose_bucket(ImageSize image, std::span<const ImageSize> resolutions, BucketChoice* out) {
  constexpr const char* kOp = "select_bucket";
  LORAACCEL_RETURN_IF_ERROR(check_size(kOp, "an image of", image));
  if (resolutions.empty())
    return Status(StatusCode::kInvalidArgument,
                  std::string(kOp) + ": no bucket resolutions, expected at least one");
  for (const ImageSize& size : resolutions)
    LORAACCEL_RETURN_IF_ERROR(check_size(kOp, "a bucket of", size));
  const double image_ratio = ratio(image);
  ImageSize bucket = resolutions.front();
  double smallest = std::fabs(ratio(bucket) - image_ratio);
  for (const ImageSize& size : resolutions) {
    if (size == image) {
      bucket = size;
      break;
    }
    const double error = std::fabs(ratio(size) - image_ratio);
    if (error < smallest) {
      bucket = size;
      smallest = error;
    }
  }
  const double scale = image_ratio > ratio(bucket)
                           ? static_cast<double>(bucket.height) / static_cast<double>(image.height)
                           : static_cast<double>(bucket.width) / static_cast<double>(image.width);
  out->bucket = bucket;
  out->resized = {round_half_up(static_cast<double>(image.width) * scale),
                  round_half_up(static_cast<double>(image.height) * scale)};
  out->ratio_error = ratio(bucket) - image_ratio;
  return {};
}

Status choose_bucket_without_enlarging(ImageSize image, ImageSize max_resolution, int64_t step,
                                       BucketChoice* out) {
  constexpr const char* kOp = "select_bucket";
  LORAACCEL_RETURN_IF_ERROR(check_size(kOp, "an image of", image));
  LORAACCEL_RETURN_IF_ERROR(check_size(kOp, "max_reso", max_resolution));
  if (step < 1)
    return Status(StatusCode::kInvalidArgument,
                  std::string(kOp) + ": step " + std::to_string(step) + ", expected 1 or more");
  const double image_ratio = ratio(image);
  const int64_t area = max_resolution.width * max_resolution.height;
  ImageSize resized = image;
  if (image.width * image.height > area) {
    const double width = std::sqrt(static_cast<double>(area) * image_ratio);
    const double height = static_cast<double>(area) / width;
    const auto to_steps = [step](double v) {
      const int64_t rounded = round_half_up(v);
      return rounded - rounded % step;
    };
    const int64_t whole_width = to_steps(width);
    const int64_t height_for_it = to_steps(static_cast<double>(whole_width) / image_ratio);
    const int64_t whole_height = to_steps(height);
    const int64_t width_for_it = to_steps(static_cast<double>(whole_height) * image_ratio);
    if (height_for_it == 0 || whole_height == 0) {
      return Status(StatusCode::kInvalidArgument,
                    std::string(kOp) + ": an image of " + text(image) + ", which reduced to " +
                        std::to_string(area) + " pixels is less than a step of " +
                        std::to_string(step) + " high, expected a ratio nearer to 1");
    }
    const double by_width = std::fabs(ratio({whole_width, height_for_it}) - image_ratio);
    const double by_height = std::fabs(ratio({width_for_it, whole_height}) - image_ratio);
    if (by_width < by_height) {
      resized = {whole_width, round_half_up(static_cast<double>(whole_width) / image_ratio)};
    } else {
      resized = {round_half_up(static_cast<double>(whole_height) * image_ratio), whole_height};
    }
  }
  out->resized = resized;
  out->bucket = {resized.width - resized.width % step, resized.height - resized.height % step};
  if (out->bucket.height == 0) {
    return Status(StatusCode::kInvalidArgument,
                  std::string(kOp) + ": an image of " + text(image) + ", which makes a bucket of " +
                      text(out->bucket) + ", expected at least a step of " + std::to_string(step) +
                      " of height");
  }
  out->ratio_error = ratio(out->bucket) - image_ratio;
  return {};
}

Status bucket_crop_box(ImageSize bucket, ImageSize image, CropBox* out) {
  constexpr const char* kOp = "get_crop_ltrb";
  LORAACCEL_RETURN_IF_ERROR(check_size(kOp, "a bucket of", bucket));
  LORAACCEL_RETURN_IF_ERROR(check_size(kOp, "an image of", image));
  auto width = static_cast<double>(bucket.width);
  auto height = static_cast<double>(bucket.height);
  if (ratio(bucket) > ratio(image)) {
    width = height * ratio(image);
  } else {
    height = width / ratio(image);
  }
  out->left = std::floor((static_cast<double>(bucket.width) - width) / 2);
  out->top = std::floor((static_cast<double>(bucket.height) - height) / 2);
  out->right = out->left + width;
  out->bottom = out->top + height;
  return {};
}

}  // namespace loraaccel
