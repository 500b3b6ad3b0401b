// What the headers of image files say, of each format: for sizes, and for who may decode the file.
#pragma once

#include <cstdint>
#include <span>

#include "loraaccel/images.h"

namespace loraaccel {

using Bytes = std::span<const uint8_t>;

struct JpegFacts {
  ImageSize size;
  int orientation = 1;
  int frame = 0;          // the marker of its frame: 0xC0 baseline, 0xC1 extended, 0xC2 progressive
  int precision = 0;      // bits
  int components = 0;     // 1 grey, 3 colours, 4 CMYK or YCCK
  bool complete = false;  // every segment is there, up to the marker that ends the image
};
JpegFacts read_jpeg_facts(Bytes bytes);

struct PngFacts {
  ImageSize size;
  int orientation = 1;
  int depth = 0;
  int color = 0;              // 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGB and alpha
  int palette = 0;            // entries
  bool transparency = false;  // tRNS
  bool animated = false;
  bool complete = false;  // every chunk is there, up to IEND
};
PngFacts read_png_facts(Bytes bytes);

struct WebpFacts {
  ImageSize size;
  int orientation = 1;
  bool alpha = false;
  bool animated = false;
  bool complete = false;  // as many bytes as the header says
};
WebpFacts read_webp_facts(Bytes bytes);

ImageFormat image_format(Bytes bytes);

}  // namespace loraaccel
