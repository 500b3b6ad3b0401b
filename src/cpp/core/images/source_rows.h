// The rows of an image whose readers may read a little too far.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "images/image_kernels.h"
#include "loraaccel/images.h"

namespace loraaccel {

// row(y) is followed by kSlackBytes that may be read: the last rows are copied.
class SourceRows {
 public:
  explicit SourceRows(const ImageView& image) : image_(image) {
    const int64_t bytes = image.size.width * image.channels;
    const int64_t end = (image.size.height - 1) * image.row_bytes + bytes;
    first_copied_ = image.size.height;
    while (first_copied_ > 0 && (first_copied_ - 1) * image.row_bytes + bytes + kSlackBytes > end)
      --first_copied_;
    stride_ = bytes + kSlackBytes;
    copies_.resize(static_cast<size_t>((image.size.height - first_copied_) * stride_));
    for (int64_t y = first_copied_; y < image.size.height; ++y) {
      std::memcpy(copies_.data() + (y - first_copied_) * stride_, image.data + y * image.row_bytes,
                  static_cast<size_t>(bytes));
    }
  }

  const uint8_t* row(int64_t y) const {
    return y < first_copied_ ? image_.data + y * image_.row_bytes
                             : copies_.data() + (y - first_copied_) * stride_;
  }
  int64_t height() const { return image_.size.height; }

 private:
  ImageView image_;
  int64_t first_copied_ = 0;
  int64_t stride_ = 0;
  std::vector<uint8_t> copies_;
};

}  // namespace loraaccel
