// The vector part of the losses: one function per instruction set, compiled from loss-inl.h. A run of elements of one
// sample comes in, the sum of their losses goes out.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "loraaccel/dtype.h"

namespace loraaccel {

enum class LossKind { kL2, kL1, kHuber, kSmoothL1, kBce, kFocalBce };

// Neighbouring numbers of any type up to 32 bits, or one number for all elements.
struct LossNumbers {
  const void* data = nullptr;  // null: `value`
  DType dtype = DType::kFloat32;
  float value = 1;
};

struct LossRun {
  LossKind kind;
  int64_t count;
  LossNumbers x, target, weight, pos_weight, upstream;
  float huber_c;
  float smoothing;     // e
  float focal_gamma;   // above 0
  float ignore_index;  // NaN: none
  // What each loss, and each gradient besides `upstream`, is multiplied by. (The sum is of losses without it.)
  float loss_scale, grad_scale;
  bool sum;  // whether the sum is wanted
  DType loss_dtype, grad_dtype;
  void* loss;  // or null
  void* grad;  // or null
};

struct LossSimd {
  double (*run)(const LossRun& run);
};

// Null where this build has none for its target.
const LossSimd* loss_simd_avx512();
const LossSimd* loss_simd_avx2();
const LossSimd* loss_simd_neon();
const LossSimd* loss_simd_portable();

}  // namespace loraaccel
