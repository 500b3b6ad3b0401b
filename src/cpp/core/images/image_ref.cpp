// Plain loops: the oracle of the other kernels, and the fallback.
#include <algorithm>
#include <cmath>

#include "images/image_kernels.h"

namespace loraaccel {
namespace {

constexpr int kFractionBits = 22;

uint8_t clip(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kFractionBits, 0, 255)); }

void filter_columns(const FixedTapsView& taps, int channels, const uint8_t* const* in, int num_rows,
                    uint8_t* const* out) {
  const int64_t outputs = taps.outputs;
  for (int y = 0; y < num_rows; ++y) {
    for (int64_t x = 0; x < outputs; ++x) {
      const int32_t* weights = taps.weights + x * taps.stride;
      const uint8_t* pixels = in[y] + taps.first[x] * channels;
      for (int c = 0; c < channels; ++c) {
        int32_t sum = 1 << (kFractionBits - 1);
        for (int64_t j = 0; j < taps.count[x]; ++j) sum += weights[j] * pixels[j * channels + c];
        out[y][x * channels + c] = clip(sum);
      }
    }
  }
}

void filter_rows(const int32_t* weights, int64_t count_taps, const uint8_t* const* in,
                 int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    int32_t sum = 1 << (kFractionBits - 1);
    for (int64_t j = 0; j < count_taps; ++j) sum += weights[j] * in[j][i];
    out[i] = clip(sum);
  }
}

void area_columns(const FloatTapsView& taps, int channels, const uint8_t* const* in, int num_rows,
                  float* const* out) {
  const int64_t outputs = taps.outputs;
  for (int y = 0; y < num_rows; ++y) {
    for (int64_t x = 0; x < outputs; ++x) {
      const float* weights = taps.weights + x * taps.stride;
      const uint8_t* pixels = in[y] + taps.first[x] * channels;
      for (int c = 0; c < channels; ++c) {
        float sum = 0;
        for (int64_t j = 0; j < taps.count[x]; ++j) {
          const float product = weights[j] * static_cast<float>(pixels[j * channels + c]);
          sum += product;
        }
        out[y][x * channels + c] = sum;
      }
    }
  }
}

void area_add(float weight, const float* in, int64_t count, bool first, float* sum) {
  if (first) {
    for (int64_t i = 0; i < count; ++i) sum[i] = weight * in[i];
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float product = weight * in[i];
    sum[i] += product;
  }
}

void area_store(const float* sum, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = static_cast<uint8_t>(std::clamp(std::lrint(sum[i]), 0L, 255L));
}

}  // namespace

ImageKernel image_kernel_ref() {
  return {"ref",          []() -> const char* { return nullptr; },
          filter_columns, filter_rows,
          area_columns,   area_add,
          area_store};
}

}  // namespace loraaccel
