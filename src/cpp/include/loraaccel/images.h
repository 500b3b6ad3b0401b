// Images on their way to training: buckets, sizes from headers, resizing, and the last pass into a batch.
// Pixels are uint8, rows from top to bottom, channels interleaved (HWC); sizes are in pixels, width before height.
// Results are exactly those of the libraries that trainers use, which each function names. Decoding: images_opencv.h.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "loraaccel/dtype.h"
#include "loraaccel/exec_context.h"
#include "loraaccel/status.h"

namespace loraaccel {

struct ImageSize {
  int64_t width = 0;
  int64_t height = 0;
  friend auto operator<=>(const ImageSize&, const ImageSize&) = default;
};

// ---- buckets: sd-scripts' rules, the same in 0.8, 0.9.1 and main -------------------------------------------------------

// The sizes of at most max_area's pixels between min_size and max_size, multiples of step, sorted; and the square.
// kInvalidArgument where a number is not positive, or min_size is above max_size.
Status bucket_resolutions(ImageSize max_resolution, int64_t min_size, int64_t max_size,
                          int64_t step, std::vector<ImageSize>* out);

struct BucketChoice {
  ImageSize bucket;
  ImageSize resized;       // at least as large as the bucket; what is beyond it is cropped
  double ratio_error = 0;  // width / height of the bucket, less that of the image
};

// The bucket of an image that may be enlarged: of `resolutions`, the one with its own size, else the first with the nearest
// ratio. kInvalidArgument where a size is not positive or there are no resolutions.
Status choose_bucket(ImageSize image, std::span<const ImageSize> resolutions, BucketChoice* out);

// The bucket of an image that is never enlarged: its own size, or as many pixels as max_resolution has; rounded down to
// multiples of step. An image narrower than step gets a bucket of width 0, as in sd-scripts.
// kInvalidArgument also where the bucket, or what leads to it, is less than a step high (there sd-scripts divides by zero).
Status choose_bucket_without_enlarging(ImageSize image, ImageSize max_resolution, int64_t step,
                                       BucketChoice* out);

// left, top, right, bottom of the image in its bucket, as SDXL is told them: of a fit *into* the bucket.
struct CropBox {
  double left = 0;
  double top = 0;
  double right = 0;
  double bottom = 0;
};
Status bucket_crop_box(ImageSize bucket, ImageSize image, CropBox* out);

// ---- headers ---------------------------------------------------------------------------------------------------------

enum class ImageFormat : int8_t { kUnknown = 0, kPng, kJpeg, kWebp, kBmp };

struct ImageHeader {
  ImageFormat format = ImageFormat::kUnknown;  // of the first bytes, whatever the name says
  ImageSize size;                              // as stored: before any rotation that EXIF asks for
  int orientation = 1;  // EXIF's, 1 to 8; 1 where there is none or it is none of these
};

// What the file's headers say, without decoding. `bytes` may be the beginning of a file.
// kMalformedFile where the format is known and the size is not among the bytes, or zero. kUnknown is no error.
Status read_image_header(std::span<const uint8_t> bytes, ImageHeader* out);

// ---- resizing --------------------------------------------------------------------------------------------------------

struct ImageView {
  const uint8_t* data = nullptr;
  ImageSize size;
  int channels = 3;       // 1, 3 or 4 (the fourth is alpha)
  int64_t row_bytes = 0;  // from one row to the next
};

enum class ResizeMethod : int8_t {
  kNearest,  // OpenCV's INTER_NEAREST_EXACT
  kLinear,   // OpenCV's INTER_LINEAR
  kArea,     // OpenCV's INTER_AREA
  kBox,      // Pillow's BOX, and with alpha through premultiplied colours
  kLanczos,  // Pillow's LANCZOS, the same
};

struct ResizeRules {
  ResizeMethod method = ResizeMethod::kArea;
  // Pillow 13 does the vertical pass first where the height shrinks by more than twice what the width does.
  bool pillow13_order = true;
  // OpenCV 5 samples kNearest as Pillow does; OpenCV 4 did not.
  bool opencv5_nearest = true;
};

// What sd-scripts takes where nothing is asked for: kArea where neither side grows, else kLanczos. Up to 0.9.1 an image
// with one side unchanged counted as growing.
ResizeMethod usual_method(ImageSize from, ImageSize to, bool as_sd_scripts_0_9_1);

// What a resize produces: columns [x, x + size.width) and rows [y, y + size.height) of the resized image.
struct ImageCrop {
  int64_t x = 0;
  int64_t y = 0;
  ImageSize size;
};

struct ResizeArgs {
  ImageView source;
  ImageSize size;  // of the whole resized image
  ResizeRules rules;
  ImageCrop crop;
  uint8_t* out = nullptr;  // crop.size, the source's channels; overlaps no input
  int64_t out_row_bytes = 0;
};

// Bit-identical to the library that ResizeMethod names, for any number of threads. A source of the same size is copied.
// kInvalidArgument for sizes that are not positive or above 2^26, channels, a crop outside the resized image, null pointers.
Status resize_image(const ExecContext& ctx, const ResizeArgs& args);

// ---- the last pass ---------------------------------------------------------------------------------------------------

struct PrepareArgs {
  ImageView source;
  ImageSize size;
  ResizeRules rules;
  ImageCrop crop;
  bool flip = false;                   // columns from right to left, after the crop
  bool bgr = false;                    // the source's first channel is blue, and out's is red
  float mean[3] = {0.5F, 0.5F, 0.5F};  // of red, green, blue
  float std[3] = {0.5F, 0.5F, 0.5F};
  DType dtype = DType::kFloat32;  // float32, float16, bfloat16
  void* out = nullptr;            // [3, crop.height, crop.width], dense; a grey source three times
  float* mask =
      nullptr;  // [crop.height, crop.width]: alpha / 255, or 1 without alpha; null: not wanted
};

// Resizes, crops, flips and normalises in one pass: ((v / 255) - mean) / std, each operation rounded to float32 as torch
// does, and then to dtype, to nearest even. Images are prepared side by side; one by itself in bands of rows.
// Errors: as resize_image; kUnsupportedDtype. All arguments are checked before anything is written.
Status prepare_images(const ExecContext& ctx, std::span<const PrepareArgs> images);

// ---- alpha -----------------------------------------------------------------------------------------------------------

// RGB over a white background, `count` pixels of RGBA: (v a + 255 (255 - a)) / 255, rounded to nearest. In place is allowed
// where out == rgba.
void flatten_over_white(const uint8_t* rgba, int64_t count, uint8_t* out);

}  // namespace loraaccel
