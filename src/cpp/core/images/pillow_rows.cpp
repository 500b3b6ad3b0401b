// Pillow's resampling: two passes with 8-bit pixels between them, and premultiplied colours where there is alpha.
#include "images/resize_rows.h"
#include "images/source_rows.h"
#include "images/taps.h"

namespace loraaccel {
namespace {

void premultiply(const uint8_t* in, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i, in += 4, out += 4) {
    const uint32_t alpha = in[3];
    for (int c = 0; c < 3; ++c) {
      const uint32_t t = in[c] * alpha + 128;
      out[c] = static_cast<uint8_t>(((t >> 8) + t) >> 8);
    }
    out[3] = in[3];
  }
}

void unpremultiply(uint8_t* pixels, int64_t count) {
  for (int64_t i = 0; i < count; ++i, pixels += 4) {
    const uint32_t alpha = pixels[3];
    if (alpha == 0 || alpha == 255) continue;
    for (int c = 0; c < 3; ++c)
      pixels[c] = static_cast<uint8_t>(std::min<uint32_t>(255, 255 * pixels[c] / alpha));
  }
}

class PillowRows : public RowMaker {
 public:
  explicit PillowRows(const ResizeJob& job)
      : channels_(job.source.channels),
        source_width_(job.source.size.width),
        crop_(job.crop),
        rows_(premultiplied(job.source)) {
    const PillowFilter filter =
        job.rules.method == ResizeMethod::kBox ? PillowFilter::kBox : PillowFilter::kLanczos;
    const ImageSize from = job.source.size;
    const ImageSize to = job.size;
    if (from.width != to.width)
      across_ = pillow_taps(filter, from.width, to.width, crop_.x, crop_.x + crop_.size.width);
    if (from.height != to.height)
      down_ = pillow_taps(filter, from.height, to.height, crop_.y, crop_.y + crop_.size.height);
    down_first_ = job.rules.pillow13_order && from.height > to.height &&
                  from.height - to.height > 2 * (from.width - to.width);
  }

  void make(const ImageKernel& kernel, int64_t begin, int64_t end,
            const RowSink& sink) const override {
    if (across_.first.empty()) {
      make_down(kernel, begin, end, sink);
    } else if (down_.first.empty()) {
      make_across(kernel, begin, end, sink);
    } else if (down_first_) {
      make_down_across(kernel, begin, end, sink);
    } else {
      make_across_down(kernel, begin, end, sink);
    }
  }

 private:
  // Rows of pixels, each with slack behind it.
  struct Rows {
    Rows(int64_t count, int64_t bytes)
        : stride(bytes + kSlackBytes), pixels(static_cast<size_t>(count * stride)) {}
    uint8_t* at(int64_t i) { return pixels.data() + i * stride; }
    int64_t stride;
    std::vector<uint8_t> pixels;
  };

  ImageView premultiplied(const ImageView& image) {
    if (image.channels != 4) return image;
    const int64_t bytes = image.size.width * 4;
    premultiplied_.resize(static_cast<size_t>(bytes * image.size.height));
    for (int64_t y = 0; y < image.size.height; ++y)
      premultiply(image.data + y * image.row_bytes, image.size.width,
                  premultiplied_.data() + y * bytes);
    return {premultiplied_.data(), image.size, 4, bytes};
  }

  int64_t out_bytes() const { return crop_.size.width * channels_; }

  void hand_on(const RowSink& sink, int64_t y, uint8_t* row) const {
    if (channels_ == 4) unpremultiply(row, crop_.size.width);
    sink(y, row);
  }

  // Row y from the rows that `row` gives, by the vertical taps.
  template <class Row>
  void filter_down(const ImageKernel& kernel, int64_t y, int64_t bytes, const Row& row,
                   std::vector<const uint8_t*>* in, uint8_t* out) const {
    const auto i = static_cast<size_t>(y);
    in->clear();
    for (int64_t j = 0; j < down_.count[i]; ++j) in->push_back(row(down_.first[i] + j));
    kernel.filter_rows(down_.weights.data() + y * down_.stride, down_.count[i], in->data(), bytes,
                       out);
  }

  void make_down(const ImageKernel& kernel, int64_t begin, int64_t end, const RowSink& sink) const {
    Rows out(1, out_bytes());
    std::vector<const uint8_t*> in;
    const auto row = [this](int64_t y) { return rows_.row(y) + crop_.x * channels_; };
    for (int64_t y = begin; y < end; ++y) {
      filter_down(kernel, y, out_bytes(), row, &in, out.at(0));
      hand_on(sink, y, out.at(0));
    }
  }

  void make_across(const ImageKernel& kernel, int64_t begin, int64_t end,
                   const RowSink& sink) const {
    Rows out(kRowGroup, out_bytes());
    for (int64_t y = begin; y < end; y += kRowGroup) {
      const auto count = static_cast<int>(std::min<int64_t>(kRowGroup, end - y));
      const uint8_t* in[kRowGroup];
      uint8_t* to[kRowGroup];
      for (int i = 0; i < count; ++i) {
        in[i] = rows_.row(crop_.y + y + i);
        to[i] = out.at(i);
      }
      kernel.filter_columns(across_.view(), channels_, in, count, to);
      for (int i = 0; i < count; ++i) hand_on(sink, y + i, to[i]);
    }
  }

  void make_down_across(const ImageKernel& kernel, int64_t begin, int64_t end,
                        const RowSink& sink) const {
    const int64_t bytes = source_width_ * channels_;
    Rows between(kRowGroup, bytes);
    Rows out(kRowGroup, out_bytes());
    std::vector<const uint8_t*> in;
    const auto row = [this](int64_t y) { return rows_.row(y); };
    for (int64_t y = begin; y < end; y += kRowGroup) {
      const auto count = static_cast<int>(std::min<int64_t>(kRowGroup, end - y));
      const uint8_t* from[kRowGroup];
      uint8_t* to[kRowGroup];
      for (int i = 0; i < count; ++i) {
        filter_down(kernel, y + i, bytes, row, &in, between.at(i));
        from[i] = between.at(i);
        to[i] = out.at(i);
      }
      kernel.filter_columns(across_.view(), channels_, from, count, to);
      for (int i = 0; i < count; ++i) hand_on(sink, y + i, to[i]);
    }
  }

  void make_across_down(const ImageKernel& kernel, int64_t begin, int64_t end,
                        const RowSink& sink) const {
    if (begin >= end) return;
    const int64_t capacity = down_.stride + kRowGroup;
    Rows ring(capacity, out_bytes());
    Rows out(1, out_bytes());
    std::vector<const uint8_t*> in;
    const auto row = [&](int64_t y) -> const uint8_t* { return ring.at(y % capacity); };
    const auto last = static_cast<size_t>(end - 1);
    const int64_t needed = down_.first[last] + down_.count[last];
    int64_t next = down_.first[static_cast<size_t>(begin)];
    for (int64_t y = begin; y < end; ++y) {
      const auto i = static_cast<size_t>(y);
      next = std::max(next, down_.first[i]);
      while (next < down_.first[i] + down_.count[i]) {
        const auto count = static_cast<int>(std::min<int64_t>(kRowGroup, needed - next));
        const uint8_t* from[kRowGroup];
        uint8_t* to[kRowGroup];
        for (int k = 0; k < count; ++k) {
          from[k] = rows_.row(next + k);
          to[k] = ring.at((next + k) % capacity);
        }
        kernel.filter_columns(across_.view(), channels_, from, count, to);
        next += count;
      }
      filter_down(kernel, y, out_bytes(), row, &in, out.at(0));
      hand_on(sink, y, out.at(0));
    }
  }

  int channels_;
  int64_t source_width_;
  ImageCrop crop_;
  std::vector<uint8_t> premultiplied_;
  SourceRows rows_;
  FixedTaps across_;  // empty where the width stays
  FixedTaps down_;    // empty where the height stays
  bool down_first_ = false;
};

}  // namespace

std::unique_ptr<RowMaker> make_pillow_rows(const ResizeJob& job) {
  return std::make_unique<PillowRows>(job);
}

}  // namespace loraaccel
