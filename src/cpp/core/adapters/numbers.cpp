#include "adapters/numbers.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstring>

#include "half.h"

namespace loraaccel {
namespace {

template <class T>
T load(const void* data, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * static_cast<int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

// E5M2 is the upper byte of a binary16.
float from_e5m2(uint8_t bits) { return to_float(Float16{static_cast<uint16_t>(bits << 8)}); }

float from_e4m3(uint8_t bits) {
  const int exponent = (bits >> 3) & 15;
  const int fraction = bits & 7;
  float value;
  if (exponent == 15 && fraction == 7) {
    value = std::nanf("");
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(fraction), -9);
  } else {
    value = std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  }
  return (bits & 0x80U) != 0 ? -value : value;
}

const std::array<float, 256>& fp8_values(FileDType dtype) {
  static const auto make = [](float (*f)(uint8_t)) {
    std::array<float, 256> values;
    for (size_t i = 0; i < values.size(); ++i) values[i] = f(static_cast<uint8_t>(i));
    return values;
  };
  static const std::array<float, 256> e5m2 = make(from_e5m2);
  static const std::array<float, 256> e4m3 = make(from_e4m3);
  return dtype == FileDType::kF8E5M2 ? e5m2 : e4m3;
}

}  // namespace

std::string number_text(double value) {
  std::array<char, 40> text;
  const auto result = std::to_chars(text.data(), text.data() + text.size(), value);
  return std::string(text.data(), result.ptr);
}

std::string shape_words(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

bool is_float_dtype(FileDType dtype) {
  switch (dtype) {
    case FileDType::kF64:
    case FileDType::kF32:
    case FileDType::kF16:
    case FileDType::kBF16:
    case FileDType::kF8E4M3:
    case FileDType::kF8E5M2:
      return true;
    default:
      return false;
  }
}

bool is_integer_dtype(FileDType dtype) {
  switch (dtype) {
    case FileDType::kBool:
    case FileDType::kU8:
    case FileDType::kI8:
    case FileDType::kU16:
    case FileDType::kI16:
    case FileDType::kU32:
    case FileDType::kI32:
    case FileDType::kU64:
    case FileDType::kI64:
      return true;
    default:
      return false;
  }
}

bool element_value(FileDType dtype, const void* data, int64_t index, double* value) {
  switch (dtype) {
    case FileDType::kF64:
      *value = load<double>(data, index);
      return true;
    case FileDType::kF32:
      *value = load<float>(data, index);
      return true;
    case FileDType::kF16:
      *value = to_float(load<Float16>(data, index));
      return true;
    case FileDType::kBF16:
      *value = to_float(load<BFloat16>(data, index));
      return true;
    case FileDType::kF8E4M3:
    case FileDType::kF8E5M2:
      *value = fp8_values(dtype)[load<uint8_t>(data, index)];
      return true;
    case FileDType::kI64:
      *value = static_cast<double>(load<int64_t>(data, index));
      return true;
    case FileDType::kU64:
      *value = static_cast<double>(load<uint64_t>(data, index));
      return true;
    case FileDType::kI32:
      *value = load<int32_t>(data, index);
      return true;
    case FileDType::kU32:
      *value = load<uint32_t>(data, index);
      return true;
    case FileDType::kI16:
      *value = load<int16_t>(data, index);
      return true;
    case FileDType::kU16:
      *value = load<uint16_t>(data, index);
      return true;
    case FileDType::kI8:
      *value = load<int8_t>(data, index);
      return true;
    case FileDType::kU8:
    case FileDType::kBool:
      *value = load<uint8_t>(data, index);
      return true;
    default:
      return false;
  }
}

bool widen_elements(FileDType dtype, const void* data, int64_t count, float* out) {
  switch (dtype) {
    case FileDType::kF32:
      std::memcpy(out, data, static_cast<size_t>(count) * sizeof(float));
      return true;
    case FileDType::kF16:
      for (int64_t i = 0; i < count; ++i) out[i] = to_float(load<Float16>(data, i));
      return true;
    case FileDType::kBF16:
      for (int64_t i = 0; i < count; ++i) out[i] = to_float(load<BFloat16>(data, i));
      return true;
    case FileDType::kF8E4M3:
    case FileDType::kF8E5M2: {
      const std::array<float, 256>& values = fp8_values(dtype);
      for (int64_t i = 0; i < count; ++i) out[i] = values[load<uint8_t>(data, i)];
      return true;
    }
    default:
      for (int64_t i = 0; i < count; ++i) {
        double value = 0;
        if (!element_value(dtype, data, i, &value)) return false;
        out[i] = static_cast<float>(value);
      }
      return true;
  }
}

}  // namespace loraaccel
