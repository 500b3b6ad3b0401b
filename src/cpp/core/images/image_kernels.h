// The inner loops of resizing, once for each instruction set.
#pragma once

#include <cstdint>
#include <span>

namespace loraaccel {

// Kernels may read up to this many bytes past the last pixel that they need of a source row, and write up to kSlackBytes
// past the last pixel of an output row. What they read there does not matter.
constexpr int64_t kSlackBytes = 64;
// Rows that columns are filtered of at a time.
constexpr int kRowGroup = 4;

// Taps of one axis (taps.h) as plain memory: units of one instruction set share no inline code with others.
struct FixedTapsView {
  const int64_t* first;
  const int64_t* count;
  int64_t outputs;
  int64_t stride;
  const int32_t* weights;
  const int16_t* parts;
};
struct FloatTapsView {
  const int64_t* first;
  const int64_t* count;
  int64_t outputs;
  int64_t stride;
  const float* weights;
};

struct ImageKernel {
  const char* name;
  const char* (*unavailable)();  // null, or why this CPU cannot run it

  // out[y][x] = clip((2^21 + sum_j weights[x][j] in[y][first[x] + j]) >> 22), for every channel; y < num_rows <= kRowGroup.
  void (*filter_columns)(const FixedTapsView& taps, int channels, const uint8_t* const* in,
                         int num_rows, uint8_t* const* out);
  // out[i] = clip((2^21 + sum_j weights[j] in[j][i]) >> 22), i < count. `weights`: count_taps of them.
  void (*filter_rows)(const int32_t* weights, int64_t count_taps, const uint8_t* const* in,
                      int64_t count, uint8_t* out);
  // out[y][x] = ((w0 p0 + w1 p1) + w2 p2) + ..., each product and each sum rounded to float; y < num_rows <= 2.
  void (*area_columns)(const FloatTapsView& taps, int channels, const uint8_t* const* in,
                       int num_rows, float* const* out);
  // sum[i] = first ? weight in[i] : sum[i] + weight in[i]
  void (*area_add)(float weight, const float* in, int64_t count, bool first, float* sum);
  // To nearest even, clipped to 0 ... 255.
  void (*area_store)(const float* sum, int64_t count, uint8_t* out);
};

// Best first; the last is `ref`, plain loops.
std::span<const ImageKernel> image_kernels();

// Of the files of that name. The caller asks the CPU first; on processors of other kinds the first is empty.
ImageKernel image_kernel_avx2();
ImageKernel image_kernel_ref();

}  // namespace loraaccel
