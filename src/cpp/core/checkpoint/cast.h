// Conversion between the floating-point types of files, as tensors are written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "loraaccel/file_dtype.h"

namespace loraaccel {

// F64, F32, F16, BF16.
bool can_cast_from(FileDType dtype);
// Those, F8_E4M3 and F8_E5M2.
bool can_cast_to(FileDType dtype);

struct CastCounts {
  uint64_t zeros = 0;       // were not zero, and are
  uint64_t infinities = 0;  // were finite, and are infinite, or NaN in a type without infinities
};

// Converts `count` elements, rounding once, to nearest even; any alignment, no overlap. NaN stays NaN, -0 stays -0.
// Adds to *counts.
void cast_elements(FileDType from, const void* source, FileDType to, void* destination,
                   size_t count, CastCounts* counts);

// The variants of what matters most, float to 16 bits. At most kCastBlock elements at a time.
constexpr size_t kCastBlock = 1024;
struct CastVariant {
  const char* name;
  void (*to_f16)(const float* source, uint16_t* destination, size_t count, CastCounts* counts);
  void (*to_bf16)(const float* source, uint16_t* destination, size_t count, CastCounts* counts);
};
// Best first; the last is plain code. An entry without functions is not compiled, or not for this CPU.
std::span<const CastVariant> cast_variants();

// Of cast_avx2.cpp and cast_neon.cpp: without functions on other processors. The caller asks the CPU.
CastVariant cast_avx2();
CastVariant cast_neon();

}  // namespace loraaccel
