// Which source pixels an output pixel of one axis is made of, and with what weights.
#pragma once

#include <cstdint>
#include <vector>

#include "images/image_kernels.h"

namespace loraaccel {

// Weights per output are padded with zeros to `stride`, so that loops over them have one length.
// (A kernel may read source elements for the padding, and multiplies them with zero.)

// Pillow's, of 22 fraction bits.
struct FixedTaps {
  std::vector<int64_t> first;    // source index of the first weight of each output
  std::vector<int64_t> count;    // weights of each output
  int64_t stride = 0;            // a multiple of 4
  std::vector<int32_t> weights;  // [outputs][stride]
  // The same in two parts for multiplications of 16 bits: weight = high * 256 + low, 0 <= low < 256.
  // [outputs][stride / 4][8]: four highs, then four lows.
  std::vector<int16_t> parts;

  FixedTapsView view() const {
    return {first.data(), count.data(),   static_cast<int64_t>(first.size()),
            stride,       weights.data(), parts.data()};
  }
};

enum class PillowFilter : int8_t { kBox, kLanczos };

// Of outputs [begin, end) of an axis of `source` pixels resized to `target`.
FixedTaps pillow_taps(PillowFilter filter, int64_t source, int64_t target, int64_t begin,
                      int64_t end);

// OpenCV's INTER_AREA where the axis shrinks.
struct FloatTaps {
  std::vector<int64_t> first;
  std::vector<int64_t> count;
  int64_t stride = 0;
  std::vector<float> weights;  // [outputs][stride]

  FloatTapsView view() const {
    return {first.data(), count.data(), static_cast<int64_t>(first.size()), stride, weights.data()};
  }
};
FloatTaps area_taps(int64_t source, int64_t target, int64_t begin, int64_t end);

// OpenCV's 8-bit INTER_LINEAR, and INTER_AREA where an axis grows: two neighbours, weights of 11 fraction bits.
struct LinearTaps {
  std::vector<int64_t>
      first;  // may be -1 and source - 1 where `clamp` is false: the caller then clamps both neighbours
  std::vector<int16_t> weights;  // [outputs][2]
};
LinearTaps linear_taps(int64_t source, int64_t target, int64_t begin, int64_t end, bool area,
                       bool clamp);

// OpenCV's INTER_NEAREST_EXACT: the source index of each output.
std::vector<int64_t> nearest_taps(int64_t source, int64_t target, int64_t begin, int64_t end,
                                  bool opencv5);

}  // namespace loraaccel
