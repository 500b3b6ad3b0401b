// Element types of tensors, and the two 16-bit floats that C++20 lacks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace loraaccel {

enum class DType : int8_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

// Storage of a bfloat16 (8 exponent bits, 7 fraction bits). Arithmetic is done in float.
struct BFloat16 {
  uint16_t bits;
};

// Storage of an IEEE binary16. Arithmetic is done in float.
struct Float16 {
  uint16_t bits;
};

constexpr size_t dtype_size_bytes(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
  }
  return 0;
}

// "float32", "float64", "bfloat16", "float16".
constexpr const char* dtype_name(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat64:
      return "float64";
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
  }
  return "unknown";
}

template <class T>
struct TypeTag {
  using type = T;
};

// Calls f(TypeTag<T>{}) with the C++ type of `dtype` and returns what f returns.
template <class F>
constexpr auto visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(TypeTag<double>{});
    case DType::kBFloat16:
      return f(TypeTag<BFloat16>{});
    case DType::kFloat16:
      return f(TypeTag<Float16>{});
    case DType::kFloat32:
      break;
  }
  return f(TypeTag<float>{});
}

}  // namespace loraaccel
