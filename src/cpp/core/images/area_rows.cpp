// OpenCV's INTER_AREA where both axes shrink or stay.
#include <cfloat>
#include <cmath>

#include "images/resize_rows.h"
#include "images/source_rows.h"
#include "images/taps.h"

namespace loraaccel {
namespace {

// Whole numbers of source pixels, on both axes.
class AreaBlocks : public RowMaker {
 public:
  AreaBlocks(const ResizeJob& job, int64_t across, int64_t down)
      : source_(job.source), crop_(job.crop), across_(across), down_(down) {}

  void make(const ImageKernel& /*kernel*/, int64_t begin, int64_t end,
            const RowSink& sink) const override {
    const int64_t channels = source_.channels;
    const int64_t count = crop_.size.width * across_ * channels;
    std::vector<int32_t> sums(static_cast<size_t>(count));
    std::vector<uint8_t> row(static_cast<size_t>(crop_.size.width * channels));
    const float part = 1.0F / static_cast<float>(across_ * down_);
    const bool quarters = across_ == 2 && down_ == 2;
    for (int64_t y = begin; y < end; ++y) {
      std::fill(sums.begin(), sums.end(), 0);
      for (int64_t j = 0; j < down_; ++j) {
        const uint8_t* in = source_.data + ((crop_.y + y) * down_ + j) * source_.row_bytes +
                            crop_.x * across_ * channels;
        for (int64_t i = 0; i < count; ++i) sums[static_cast<size_t>(i)] += in[i];
      }
      for (int64_t x = 0; x < crop_.size.width; ++x) {
        for (int64_t c = 0; c < channels; ++c) {
          int32_t sum = 0;
          for (int64_t j = 0; j < across_; ++j)
            sum += sums[static_cast<size_t>((x * across_ + j) * channels + c)];
          row[static_cast<size_t>(x * channels + c)] = static_cast<uint8_t>(
              quarters ? (sum + 2) >> 2 : std::lrint(static_cast<float>(sum) * part));
        }
      }
      sink(y, row.data());
    }
  }

 private:
  ImageView source_;
  ImageCrop crop_;
  int64_t across_;
  int64_t down_;
};

class AreaRows : public RowMaker {
 public:
  explicit AreaRows(const ResizeJob& job)
      : rows_(job.source),
        channels_(job.source.channels),
        width_(job.crop.size.width),
        columns_(area_taps(job.source.size.width, job.size.width, job.crop.x,
                           job.crop.x + job.crop.size.width)),
        down_(area_taps(job.source.size.height, job.size.height, job.crop.y,
                        job.crop.y + job.crop.size.height)) {}

  void make(const ImageKernel& kernel, int64_t begin, int64_t end,
            const RowSink& sink) const override {
    const int64_t count = width_ * channels_;
    const int64_t padded = count + kSlackBytes;
    std::vector<float> floats(static_cast<size_t>(3 * padded));
    float* sum = floats.data();
    float* const filtered[2] = {sum + padded, sum + 2 * padded};
    std::vector<uint8_t> out(static_cast<size_t>(padded));
    int64_t cached = -2;  // the source row in filtered[0]; the next one is in filtered[1]
    for (int64_t y = begin; y < end; ++y) {
      const int64_t first = down_.first[static_cast<size_t>(y)];
      const float* weights = down_.weights.data() + y * down_.stride;
      for (int64_t j = 0; j < down_.count[static_cast<size_t>(y)]; ++j) {
        const int64_t at = first + j;
        if (at != cached && at != cached + 1) {
          const bool two = at + 1 < rows_.height();
          const uint8_t* const in[2] = {rows_.row(at), rows_.row(two ? at + 1 : at)};
          kernel.area_columns(columns_.view(), channels_, in, two ? 2 : 1, filtered);
          cached = at;
        }
        kernel.area_add(weights[j], filtered[at - cached], count, j == 0, sum);
      }
      kernel.area_store(sum, count, out.data());
      sink(y, out.data());
    }
  }

 private:
  SourceRows rows_;
  int channels_;
  int64_t width_;
  FloatTaps columns_;
  FloatTaps down_;
};

// The whole number that OpenCV takes the scale for, or 0.
int64_t whole_scale(int64_t source, int64_t target) {
  const double scale = 1.0 / (static_cast<double>(target) / static_cast<double>(source));
  const double rounded = std::nearbyint(scale);
  return std::fabs(scale - rounded) < DBL_EPSILON ? static_cast<int64_t>(rounded) : 0;
}

}  // namespace

std::unique_ptr<RowMaker> make_area_rows(const ResizeJob& job) {
  const int64_t across = whole_scale(job.source.size.width, job.size.width);
  const int64_t down = whole_scale(job.source.size.height, job.size.height);
  if (across > 0 && down > 0) return std::make_unique<AreaBlocks>(job, across, down);
  return std::make_unique<AreaRows>(job);
}

}  // namespace loraaccel
