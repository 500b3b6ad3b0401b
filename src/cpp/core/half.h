// Conversions between float and the 16-bit storage types, for code that is compiled for the baseline CPU.
// static, not inline: units compiled for different CPUs may include this file, and must not share one copy.
#pragma once

#include <stdint.h>
#include <string.h>

#include "loraaccel/dtype.h"

namespace loraaccel {

static inline float to_float(float v) { return v; }
static inline double to_float(double v) { return v; }

static inline float to_float(BFloat16 v) {
  const uint32_t bits = (uint32_t)v.bits << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static inline float to_float(Float16 v) {
  const uint32_t sign = (uint32_t)(v.bits & 0x8000U) << 16;
  const uint32_t exponent = (v.bits >> 10) & 0x1FU;
  const uint32_t fraction = v.bits & 0x3FFU;
  uint32_t bits;
  float f;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24 is exact in float
    f = (float)fraction * 5.9604644775390625e-8F;
    memcpy(&bits, &f, sizeof bits);
    bits |= sign;
  } else if (exponent == 31) {
    bits = sign | 0x7F800000U | (fraction << 13);
  } else {
    bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  }
  memcpy(&f, &bits, sizeof f);
  return f;
}

// Rounding is to nearest even; NaN stays NaN, overflow becomes infinity.
static inline void from_float(double v, double* out) { *out = v; }
static inline void from_float(double v, float* out) { *out = (float)v; }

static inline void from_float(float v, BFloat16* out) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  if (v != v) {
    out->bits = (uint16_t)((bits >> 16) | 0x40U);
    return;
  }
  out->bits = (uint16_t)((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

static inline void from_float(float v, Float16* out) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) {
    out->bits = (uint16_t)(sign | 0x7E00U | ((magnitude >> 13) & 0x3FFU));
  } else if (magnitude >= 0x477FF000U) {  // 65520 and above
    out->bits = (uint16_t)(sign | 0x7C00U);
  } else if (magnitude < 0x38800000U) {  // below 2^-14: subnormal, in units of 2^-24
    float scaled;
    memcpy(&scaled, &magnitude, sizeof scaled);
    scaled = scaled * 16777216.0F +
             8388608.0F;  // the fraction's last bit is now 1: the addition rounds to even
    uint32_t rounded;
    memcpy(&rounded, &scaled, sizeof rounded);
    out->bits = (uint16_t)(sign | (rounded - 0x4B000000U));
  } else {
    const uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
    out->bits = (uint16_t)(sign | ((rounded - 0x38000000U) >> 13));
  }
}

// A double is rounded once on the way to 16 bits: to float by "round to odd", which cannot meet a tie of the 16-bit
// format that was not one before.
static inline float round_to_odd(double v) {
  float f = (float)v;
  if ((double)f == v || v != v) return f;
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  if ((bits & 0x7F800000U) == 0x7F800000U) return f;
  const double back = (double)f;
  if ((bits & 1U) == 0) {  // step toward v, to the odd neighbour
    const bool away = (back < v) == (v > 0);
    bits = away ? bits + 1 : bits - 1;
    memcpy(&f, &bits, sizeof f);
  }
  return f;
}
static inline void from_float(double v, BFloat16* out) { from_float(round_to_odd(v), out); }
static inline void from_float(double v, Float16* out) { from_float(round_to_odd(v), out); }

}  // namespace loraaccel
