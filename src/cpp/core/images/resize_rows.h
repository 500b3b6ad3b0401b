// The rows of a resized image, made one after the other and handed on: the fused passes keep no whole image.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "images/image_kernels.h"
#include "loraaccel/images.h"

namespace loraaccel {

// row: crop.size.width pixels of the source's channels, valid during the call. y counts from the crop's first row.
using RowSink = std::function<void(int64_t y, const uint8_t* row)>;

class RowMaker {
 public:
  RowMaker() = default;
  RowMaker(const RowMaker&) = delete;
  RowMaker& operator=(const RowMaker&) = delete;
  virtual ~RowMaker() = default;

  // Rows [begin, end) of the crop, in order. At once from several threads, for other rows.
  virtual void make(const ImageKernel& kernel, int64_t begin, int64_t end,
                    const RowSink& sink) const = 0;
};

// What is to be resized: arguments that have been checked.
struct ResizeJob {
  ImageView source;
  ImageSize size;
  ResizeRules rules;
  ImageCrop crop;
};

// Reads the source's memory as long as it lives. Throws std::bad_alloc.
std::unique_ptr<RowMaker> make_row_maker(const ResizeJob& job);

// Of area_rows.cpp and pillow_rows.cpp: for both axes shrinking; for sizes that differ.
std::unique_ptr<RowMaker> make_area_rows(const ResizeJob& job);
std::unique_ptr<RowMaker> make_pillow_rows(const ResizeJob& job);

// The same message for every function that resizes. `op` begins it.
Status check_resize(const char* op, const ResizeJob& job);

}  // namespace loraaccel
