// The columns of a convolution's right factor: element (k, p) is what term k = (channel, row, column of the kernel) of
// output pixel p multiplies, zero outside the image.
#pragma once

#include <vector>

#include "lora/simd/simd.h"
#include "loraaccel/lora_conv2d.h"

namespace loraaccel {

class PixelColumns {
 public:
  // One image.
  PixelColumns(const ConvShape& shape, DType dtype, const void* image)
      : shape_(shape), dtype_(dtype), image_(image) {}

  // Terms [begin, begin + depth) of `count` pixels from `col` on, as a panel of words.
  void pack(const LoraSimd& simd, int64_t col, int count, int64_t begin, int64_t depth, bool pairs,
            void* panel) const {
    std::vector<PixelRun> runs;
    std::vector<size_t> first{0};
    const int64_t places = shape_.kernel[0] * shape_.kernel[1];
    runs.reserve(static_cast<size_t>(places) * 4);
    std::vector<PixelPlace> all(static_cast<size_t>(places));
    for (int64_t place = 0; place < places; ++place) {
      all[static_cast<size_t>(place)].full = add_runs(place, col, count, &runs) == simd.width;
      first.push_back(runs.size());
    }
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].runs = runs.data() + first[i];
      all[i].count = static_cast<int>(first[i + 1] - first[i]);
    }
    simd.gather({dtype_, image_, shape_.height * shape_.width, all.data(), places, begin, depth},
                pairs, panel);
  }

 private:
  // The number of pixels inside the image.
  int add_runs(int64_t place, int64_t col, int count, std::vector<PixelRun>* runs) const {
    const int64_t width = shape_.output(1);
    const int64_t u = place / shape_.kernel[1] * shape_.dilation[0] - shape_.padding[0];
    const int64_t v = place % shape_.kernel[1] * shape_.dilation[1] - shape_.padding[1];
    const size_t first = runs->size();
    int inside = 0;
    for (int j = 0; j < count; ++j) {
      const int64_t row = (col + j) / width * shape_.stride[0] + u;
      const int64_t column = (col + j) % width * shape_.stride[1] + v;
      if (row < 0 || row >= shape_.height || column < 0 || column >= shape_.width) continue;
      ++inside;
      const int64_t from = row * shape_.width + column;
      if (runs->size() > first && runs->back().to + runs->back().count == j &&
          runs->back().from + runs->back().count == from) {
        ++runs->back().count;
      } else {
        runs->push_back({j, 1, from});
      }
    }
    return inside;
  }

  const ConvShape& shape_;
  DType dtype_;
  const void* image_;
};

}  // namespace loraaccel
