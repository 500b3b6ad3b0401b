// What pack_weight makes: a header, then whole panels.
#pragma once

#include "lora/simd/simd.h"
#include "loraaccel/pack.h"

namespace loraaccel {

class PackedWeight {
 public:
  // Null, or why this memory does not hold w for `use`.
  static const char* mismatch(const void* memory, const TensorView& w, WeightUse use);

  PackedWeight() = default;
  explicit PackedWeight(const void* memory);
  // False where it was packed for another instruction set: the caller packs for itself.
  bool serves(const LoraSimd& simd) const {
    return width_ == simd.width && (!pairs_ || simd.pairs);
  }
  const float* panel(int64_t index) const { return panels_ + index * panel_floats_; }

 private:
  const float* panels_ = nullptr;
  int64_t panel_floats_ = 0;
  int width_ = 0;
  bool pairs_ = false;
};

}  // namespace loraaccel
