#include "images/taps.h"

#include <algorithm>
#include <cmath>

namespace loraaccel {
namespace {

double lanczos(double t) {
  if (!(t >= -3.0 && t < 3.0)) return 0;
  const auto sinc = [](double v) {
    if (v == 0) return 1.0;
    v *= 3.14159265358979323846;
    return std::sin(v) / v;
  };
  return sinc(t) * sinc(t / 3.0);
}

double box(double t) { return t > -0.5 && t <= 0.5 ? 1.0 : 0.0; }

// As a C cast for what is not negative; less than zero is raised to zero by the caller.
int64_t floor_of(double v) { return static_cast<int64_t>(std::floor(v)); }

int16_t to_int16(float v) {
  const long rounded = std::lrint(v);
  return static_cast<int16_t>(std::clamp(rounded, -32768L, 32767L));
}

}  // namespace

FixedTaps pillow_taps(PillowFilter filter, int64_t source, int64_t target, int64_t begin,
                      int64_t end) {
  const double scale = static_cast<double>(source) / static_cast<double>(target);
  const double wide = std::max(scale, 1.0);
  const double support = (filter == PillowFilter::kLanczos ? 3.0 : 0.5) * wide;
  const double narrow = 1.0 / wide;
  FixedTaps taps;
  const auto most = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
  taps.stride = (most + 3) / 4 * 4;
  const int64_t outputs = end - begin;
  taps.weights.resize(static_cast<size_t>(outputs * taps.stride));
  taps.parts.resize(static_cast<size_t>(outputs * taps.stride * 2));
  std::vector<double> row(static_cast<size_t>(taps.stride));
  for (int64_t i = 0; i < outputs; ++i) {
    const double center = (static_cast<double>(begin + i) + 0.5) * scale;
    const int64_t first = std::max<int64_t>(0, floor_of(center - support + 0.5));
    const int64_t last = std::min(source, floor_of(center + support + 0.5));
    const int64_t count = last - first;
    double sum = 0;
    for (int64_t j = 0; j < count; ++j) {
      const double t = (static_cast<double>(j + first) - center + 0.5) * narrow;
      row[static_cast<size_t>(j)] = filter == PillowFilter::kLanczos ? lanczos(t) : box(t);
      sum += row[static_cast<size_t>(j)];
    }
    int32_t* weights = taps.weights.data() + i * taps.stride;
    for (int64_t j = 0; j < count; ++j) {
      double weight = row[static_cast<size_t>(j)];
      if (sum != 0) weight /= sum;
      weights[j] = static_cast<int32_t>((weight < 0 ? -0.5 : 0.5) + weight * (1 << 22));
    }
    int16_t* parts = taps.parts.data() + i * taps.stride * 2;
    for (int64_t j = 0; j < taps.stride; ++j) {
      parts[j / 4 * 8 + j % 4] = static_cast<int16_t>(weights[j] >> 8);
      parts[j / 4 * 8 + 4 + j % 4] = static_cast<int16_t>(weights[j] & 255);
    }
    taps.first.push_back(first);
    taps.count.push_back(count);
  }
  return taps;
}

FloatTaps area_taps(int64_t source, int64_t target, int64_t begin, int64_t end) {
  const double scale = 1.0 / (static_cast<double>(target) / static_cast<double>(source));
  std::vector<std::vector<float>> rows;
  FloatTaps taps;
  for (int64_t i = begin; i < end; ++i) {
    const double from = static_cast<double>(i) * scale;
    const double to = from + scale;
    const double cell = std::min(scale, static_cast<double>(source) - from);
    auto s1 = static_cast<int64_t>(std::ceil(from));
    const int64_t s2 = std::min(static_cast<int64_t>(std::floor(to)), source - 1);
    s1 = std::min(s1, s2);
    std::vector<float> row;
    int64_t first = s1;
    if (static_cast<double>(s1) - from > 1e-3) {
      first = s1 - 1;
      row.push_back(static_cast<float>((static_cast<double>(s1) - from) / cell));
    }
    for (int64_t s = s1; s < s2; ++s) row.push_back(static_cast<float>(1.0 / cell));
    const double rest = to - static_cast<double>(s2);
    if (rest > 1e-3) row.push_back(static_cast<float>(std::min(std::min(rest, 1.0), cell) / cell));
    taps.first.push_back(first);
    taps.count.push_back(static_cast<int64_t>(row.size()));
    taps.stride = std::max(taps.stride, taps.count.back());
    rows.push_back(std::move(row));
  }
  taps.weights.resize(rows.size() * static_cast<size_t>(taps.stride));
  for (size_t i = 0; i < rows.size(); ++i) {
    std::copy(rows[i].begin(), rows[i].end(),
              taps.weights.begin() + static_cast<int64_t>(i) * taps.stride);
  }
  return taps;
}

LinearTaps linear_taps(int64_t source, int64_t target, int64_t begin, int64_t end, bool area,
                       bool clamp) {
  const double inverse = static_cast<double>(target) / static_cast<double>(source);
  const double scale = 1.0 / inverse;
  LinearTaps taps;
  for (int64_t i = begin; i < end; ++i) {
    int64_t first = 0;
    float fraction = 0;
    if (area) {
      first = static_cast<int64_t>(std::floor(static_cast<double>(i) * scale));
      fraction =
          static_cast<float>(static_cast<double>(i + 1) - static_cast<double>(first + 1) * inverse);
      fraction = fraction <= 0 ? 0.0F : fraction - std::floor(fraction);
    } else {
      fraction = static_cast<float>((static_cast<double>(i) + 0.5) * scale - 0.5);
      first = static_cast<int64_t>(std::floor(fraction));
      fraction -= static_cast<float>(first);
    }
    if (clamp && first < 0) {
      first = 0;
      fraction = 0;
    }
    if (clamp && first >= source - 1) {
      first = source - 1;
      fraction = 0;
    }
    taps.first.push_back(first);
    taps.weights.push_back(to_int16((1.0F - fraction) * 2048.0F));
    taps.weights.push_back(to_int16(fraction * 2048.0F));
  }
  return taps;
}

std::vector<int64_t> nearest_taps(int64_t source, int64_t target, int64_t begin, int64_t end,
                                  bool opencv5) {
  std::vector<int64_t> taps;
  if (opencv5) {  // as Pillow does: a sum, with its rounding
    const double step = static_cast<double>(source) / static_cast<double>(target);
    double at = step * 0.5;
    for (int64_t i = 0; i < end; ++i) {
      if (i >= begin) taps.push_back(std::min(static_cast<int64_t>(at), source - 1));
      at += step;
    }
    return taps;
  }
  const int64_t step = ((source << 16) + target / 2) / target;
  for (int64_t i = begin; i < end; ++i)
    taps.push_back(std::min((step * i + step / 2 - source % 2) >> 16, source - 1));
  return taps;
}

}  // namespace loraaccel
