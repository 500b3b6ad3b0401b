#include "images/resize_rows.h"

#include <algorithm>
#include <vector>

#include "images/taps.h"

namespace loraaccel {
namespace {

class CopiedRows : public RowMaker {
 public:
  explicit CopiedRows(const ResizeJob& job) : source_(job.source), crop_(job.crop) {}

  void make(const ImageKernel& /*kernel*/, int64_t begin, int64_t end,
            const RowSink& sink) const override {
    for (int64_t y = begin; y < end; ++y) {
      sink(y, source_.data + (crop_.y + y) * source_.row_bytes + crop_.x * source_.channels);
    }
  }

 private:
  ImageView source_;
  ImageCrop crop_;
};

class NearestRows : public RowMaker {
 public:
  explicit NearestRows(const ResizeJob& job)
      : source_(job.source),
        columns_(nearest_taps(job.source.size.width, job.size.width, job.crop.x,
                              job.crop.x + job.crop.size.width, job.rules.opencv5_nearest)),
        rows_(nearest_taps(job.source.size.height, job.size.height, job.crop.y,
                           job.crop.y + job.crop.size.height, job.rules.opencv5_nearest)) {}

  void make(const ImageKernel& /*kernel*/, int64_t begin, int64_t end,
            const RowSink& sink) const override {
    const int channels = source_.channels;
    std::vector<uint8_t> row(columns_.size() * static_cast<size_t>(channels));
    for (int64_t y = begin; y < end; ++y) {
      const uint8_t* in = source_.data + rows_[static_cast<size_t>(y)] * source_.row_bytes;
      uint8_t* out = row.data();
      for (const int64_t column : columns_)
        out = std::copy_n(in + column * channels, channels, out);
      sink(y, row.data());
    }
  }

 private:
  ImageView source_;
  std::vector<int64_t> columns_;
  std::vector<int64_t> rows_;
};

class LinearRows : public RowMaker {
 public:
  LinearRows(const ResizeJob& job, bool area)
      : source_(job.source),
        columns_(linear_taps(job.source.size.width, job.size.width, job.crop.x,
                             job.crop.x + job.crop.size.width, area, true)),
        rows_(linear_taps(job.source.size.height, job.size.height, job.crop.y,
                          job.crop.y + job.crop.size.height, area, false)) {}

  void make(const ImageKernel& /*kernel*/, int64_t begin, int64_t end,
            const RowSink& sink) const override {
    const size_t count = columns_.first.size() * static_cast<size_t>(source_.channels);
    std::vector<int32_t> filtered[2] = {std::vector<int32_t>(count), std::vector<int32_t>(count)};
    int64_t held[2] = {-1, -1};
    std::vector<uint8_t> out(count);
    for (int64_t y = begin; y < end; ++y) {
      const int64_t first = rows_.first[static_cast<size_t>(y)];
      const int32_t* in[2];
      const int64_t wanted[2] = {clamp(first), clamp(first + 1)};
      if (held[1] == wanted[0] && held[0] != wanted[0]) {
        std::swap(filtered[0], filtered[1]);
        std::swap(held[0], held[1]);
      }
      for (int k = 0; k < 2; ++k) {
        if (held[k] != wanted[k]) filter(wanted[k], filtered[k].data());
        held[k] = wanted[k];
        in[k] = filtered[k].data();
      }
      const int32_t w0 = rows_.weights[static_cast<size_t>(2 * y)];
      const int32_t w1 = rows_.weights[static_cast<size_t>(2 * y + 1)];
      for (size_t i = 0; i < count; ++i) {
        const int32_t sum = ((w0 * (in[0][i] >> 4)) >> 16) + ((w1 * (in[1][i] >> 4)) >> 16);
        out[i] = static_cast<uint8_t>(std::clamp((sum + 2) >> 2, 0, 255));
      }
      sink(y, out.data());
    }
  }

 private:
  int64_t clamp(int64_t y) const { return std::clamp<int64_t>(y, 0, source_.size.height - 1); }

  void filter(int64_t y, int32_t* out) const {
    const uint8_t* in = source_.data + y * source_.row_bytes;
    const int channels = source_.channels;
    for (size_t x = 0; x < columns_.first.size(); ++x) {
      const uint8_t* left = in + columns_.first[x] * channels;
      const uint8_t* right = columns_.first[x] + 1 < source_.size.width ? left + channels : left;
      const int32_t w0 = columns_.weights[2 * x];
      const int32_t w1 = columns_.weights[2 * x + 1];
      for (int c = 0; c < channels; ++c) *out++ = left[c] * w0 + right[c] * w1;
    }
  }

  ImageView source_;
  LinearTaps columns_;
  LinearTaps rows_;
};

std::string text(ImageSize size) {
  return std::to_string(size.width) + "x" + std::to_string(size.height);
}

constexpr int64_t kLargestSide = int64_t{1} << 26;

bool possible(ImageSize size) {
  return size.width > 0 && size.height > 0 && size.width <= kLargestSide &&
         size.height <= kLargestSide;
}

}  // namespace

ResizeMethod usual_method(ImageSize from, ImageSize to, bool as_sd_scripts_0_9_1) {
  const int64_t least = as_sd_scripts_0_9_1 ? 1 : 0;
  const bool area = from.width - to.width >= least && from.height - to.height >= least;
  return area ? ResizeMethod::kArea : ResizeMethod::kLanczos;
}

std::unique_ptr<RowMaker> make_row_maker(const ResizeJob& job) {
  const ImageSize from = job.source.size;
  if (from == job.size) return std::make_unique<CopiedRows>(job);
  const bool shrinks = from.width >= job.size.width && from.height >= job.size.height;
  // OpenCV takes halves for areas.
  const bool halves = from.width == 2 * job.size.width && from.height == 2 * job.size.height;
  switch (job.rules.method) {
    case ResizeMethod::kNearest:
      return std::make_unique<NearestRows>(job);
    case ResizeMethod::kLinear:
      if (halves) return make_area_rows(job);
      return std::make_unique<LinearRows>(job, false);
    case ResizeMethod::kArea:
      if (shrinks) return make_area_rows(job);
      return std::make_unique<LinearRows>(job, true);
    case ResizeMethod::kBox:
    case ResizeMethod::kLanczos:
      break;
  }
  return make_pillow_rows(job);
}

Status check_resize(const char* op, const ResizeJob& job) {
  const std::string name(op);
  const ImageView& source = job.source;
  const ImageCrop& crop = job.crop;
  if (!possible(source.size) || !possible(job.size)) {
    return Status(StatusCode::kInvalidArgument, name + ": an image of " + text(source.size) +
                                                    " to " + text(job.size) +
                                                    ", expected sides of 1 to 2^26");
  }
  if (source.channels != 1 && source.channels != 3 && source.channels != 4) {
    return Status(StatusCode::kInvalidArgument,
                  name + ": " + std::to_string(source.channels) + " channels, expected 1, 3 or 4");
  }
  if (source.data == nullptr || source.row_bytes < source.size.width * source.channels) {
    return Status(StatusCode::kInvalidArgument,
                  name + ": pixels at null, or rows " + std::to_string(source.row_bytes) +
                      " bytes apart, expected memory, and at least " +
                      std::to_string(source.size.width * source.channels) + " bytes");
  }
  if (crop.x < 0 || crop.y < 0 || crop.size.width < 1 || crop.size.height < 1 ||
      crop.size.width > job.size.width - crop.x || crop.size.height > job.size.height - crop.y) {
    return Status(StatusCode::kInvalidArgument,
                  name + ": a crop of " + text(crop.size) + " at (" + std::to_string(crop.x) +
                      ", " + std::to_string(crop.y) + "), expected one inside " + text(job.size));
  }
  return {};
}

}  // namespace loraaccel
