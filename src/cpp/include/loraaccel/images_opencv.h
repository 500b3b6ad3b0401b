// Decoding of image files, by OpenCV: in libloraaccel_opencv, which is there where OpenCV was when loraaccel was built.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "loraaccel/images.h"

namespace loraaccel {

struct DecodeRules {
  bool alpha =
      false;  // four channels, opaque where the file has no alpha; else three, and alpha is dropped
  bool rgb =
      true;  // red, green, blue; else blue, green, red, which is one pass over the pixels less
  // More pixels than twice this are refused before anything is decoded; 0: no limit. Pillow's number.
  int64_t max_pixels = 89478485;
};

struct DecodedImage {
  ImageHeader header;
  ImageView view;
  std::shared_ptr<void> pixels;  // keeps what `view` shows
  // Where OpenCV's pixels are not known to be Pillow's, what kind of file it is, such as "a CMYK JPEG": then nothing was
  // decoded, and another decoder is to be asked. Else empty.
  std::string declined;
};

// Decodes a whole file: 8-bit JPEG (grey, YCbCr), PNG of 8 bits or fewer (and RGB of 16, of which the high byte is kept),
// still WebP. EXIF's orientation is not applied, ICC profiles are not read. What else there is, and files that end early or
// do not decode, is declined. The pixels are those that Pillow makes of the file.
// kInvalidArgument for too many pixels; kOutOfMemory.
Status decode_image(std::span<const uint8_t> bytes, const DecodeRules& rules, DecodedImage* out);

// The whole of a file. kFileError with the system's error number.
Status read_whole_file(const std::string& path, std::vector<uint8_t>* out);

// OpenCV's INTER_CUBIC of a whole image; args.rules and args.crop are not read. Errors as resize_image.
Status resize_cubic(const ResizeArgs& args);

// "4.6.0"
const char* opencv_version();

}  // namespace loraaccel
