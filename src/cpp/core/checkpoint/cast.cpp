#include "checkpoint/cast.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "cpu/cpu_features.h"
#include "half.h"

namespace loraaccel {
namespace cast_plain_body {
namespace {

void round_to_f16(const float* source, uint16_t* destination, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    Float16 half;
    from_float(source[i], &half);
    destination[i] = half.bits;
  }
}

#include "checkpoint/cast-inl.h"

}  // namespace
}  // namespace cast_plain_body

namespace {

// 8-bit floats with kFraction bits of fraction and kBias; kInfinite: e5m2, else e4m3fn, whose only special number is NaN.
template <int kFraction, int kBias, bool kInfinite>
uint8_t to_f8(float v) {
  const uint32_t bits = cast_plain_body::bits_of(v);
  const uint32_t sign = bits >> 31 << 7;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  constexpr uint32_t kNan = 0x7F;
  constexpr uint32_t kInfinity = kInfinite ? 0x7C : kNan;
  if (magnitude > 0x7F800000U) return static_cast<uint8_t>(sign | kNan);
  constexpr int kShift = 23 - kFraction;
  uint32_t result;
  if (magnitude < static_cast<uint32_t>(127 + 1 - kBias) << 23) {
    // Subnormal, in units of 2^(1 - kBias - kFraction): adding 2^23 of them rounds to even at the last bit.
    const float unit = std::ldexp(1.0F, kBias - 1 + kFraction);
    result = cast_plain_body::bits_of(std::fabs(v) * unit + 8388608.0F) - 0x4B000000U;
  } else {
    const uint32_t rounded = magnitude + (1U << (kShift - 1)) - 1 + ((magnitude >> kShift) & 1U);
    result = (rounded - (static_cast<uint32_t>(127 - kBias) << 23)) >> kShift;
  }
  return static_cast<uint8_t>(sign | std::min(result, kInfinity));
}

template <int kFraction, int kBias, bool kInfinite>
void to_f8_block(const float* source, uint8_t* destination, size_t count, CastCounts* counts) {
  for (size_t i = 0; i < count; ++i) {
    destination[i] = to_f8<kFraction, kBias, kInfinite>(source[i]);
    const int magnitude = destination[i] & 0x7F;
    if (magnitude == 0 && source[i] != 0) ++counts->zeros;
    if (magnitude >= (kInfinite ? 0x7C : 0x7F) && std::isfinite(source[i])) ++counts->infinities;
  }
}

// A double on the way to a narrower type than float: one that float cannot hold is still finite.
float narrow(double v) {
  if (std::isfinite(v) && std::fabs(v) > FLT_MAX)
    return std::copysign(FLT_MAX, static_cast<float>(v));
  return round_to_odd(v);
}

template <class T>
T load(const void* source, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(source) + i * sizeof(T), sizeof value);
  return value;
}

void to_floats(FileDType from, const void* source, float* out, size_t count) {
  switch (from) {
    case FileDType::kF64:
      for (size_t i = 0; i < count; ++i) out[i] = narrow(load<double>(source, i));
      return;
    case FileDType::kF16:
      for (size_t i = 0; i < count; ++i) out[i] = to_float(load<Float16>(source, i));
      return;
    case FileDType::kBF16:
      for (size_t i = 0; i < count; ++i) out[i] = to_float(load<BFloat16>(source, i));
      return;
    default:
      std::memcpy(out, source, count * sizeof(float));
  }
}

const CastVariant& best_variant() {
  static const CastVariant& best = []() -> const CastVariant& {
    const auto all = cast_variants();
    return *std::find_if(all.begin(), all.end(),
                         [](const CastVariant& v) { return v.to_f16 != nullptr; });
  }();
  return best;
}

// From floats, to any of the types but F32.
void from_floats(const float* source, FileDType to, void* destination, size_t count,
                 CastCounts* counts) {
  uint16_t half[kCastBlock];
  uint8_t f8[kCastBlock];
  double wide[kCastBlock];
  switch (to) {
    case FileDType::kF16:
      best_variant().to_f16(source, half, count, counts);
      std::memcpy(destination, half, count * sizeof(uint16_t));
      return;
    case FileDType::kBF16:
      best_variant().to_bf16(source, half, count, counts);
      std::memcpy(destination, half, count * sizeof(uint16_t));
      return;
    case FileDType::kF8E4M3:
      to_f8_block<3, 7, false>(source, f8, count, counts);
      std::memcpy(destination, f8, count);
      return;
    case FileDType::kF8E5M2:
      to_f8_block<2, 15, true>(source, f8, count, counts);
      std::memcpy(destination, f8, count);
      return;
    default:
      for (size_t i = 0; i < count; ++i) wide[i] = source[i];
      std::memcpy(destination, wide, count * sizeof(double));
  }
}

void doubles_to_floats(const void* source, float* out, size_t count, CastCounts* counts) {
  for (size_t i = 0; i < count; ++i) {
    const auto v = load<double>(source, i);
    out[i] = static_cast<float>(v);
    if (out[i] == 0 && v != 0) ++counts->zeros;
    if (std::isinf(out[i]) && std::isfinite(v)) ++counts->infinities;
  }
}

}  // namespace

bool can_cast_from(FileDType dtype) {
  return dtype == FileDType::kF64 || dtype == FileDType::kF32 || dtype == FileDType::kF16 ||
         dtype == FileDType::kBF16;
}

bool can_cast_to(FileDType dtype) {
  return can_cast_from(dtype) || dtype == FileDType::kF8E4M3 || dtype == FileDType::kF8E5M2;
}

std::span<const CastVariant> cast_variants() {
  static const CpuFeatures& cpu = cpu_features_detected();
  static const CastVariant variants[] = {
      cpu.avx2 ? cast_avx2() : CastVariant{"avx2", nullptr, nullptr},
      cpu.neon ? cast_neon() : CastVariant{"neon", nullptr, nullptr},
      {"plain", cast_plain_body::to_f16, cast_plain_body::to_bf16},
  };
  return variants;
}

void cast_elements(FileDType from, const void* source, FileDType to, void* destination,
                   size_t count, CastCounts* counts) {
  const auto from_size = static_cast<size_t>(file_dtype_bits(from) / 8);
  const auto to_size = static_cast<size_t>(file_dtype_bits(to) / 8);
  const auto* p = static_cast<const char*>(source);
  auto* q = static_cast<char*>(destination);
  if (from == to) {
    std::memcpy(q, p, count * to_size);
    return;
  }
  float floats[kCastBlock];
  while (count > 0) {
    const size_t n = std::min(count, kCastBlock);
    if (from == FileDType::kF64 && to == FileDType::kF32) {
      doubles_to_floats(p, floats, n, counts);
    } else {
      to_floats(from, p, floats, n);
    }
    if (to == FileDType::kF32) {
      std::memcpy(q, floats, n * sizeof(float));
    } else {
      from_floats(floats, to, q, n, counts);
    }
    p += n * from_size;
    q += n * to_size;
    count -= n;
  }
}

}  // namespace loraaccel
