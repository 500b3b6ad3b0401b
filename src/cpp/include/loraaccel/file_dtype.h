// Element types of safetensors files. More than the kernels compute with (dtype.h): a file must be carried as it is.
#pragma once

#include <cstdint>
#include <string_view>

namespace loraaccel {

// In ascending order of the format's rank: files list their tensors by descending rank, then by name.
enum class FileDType : int8_t {
  kBool,
  kF4,  // two elements in a byte
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,  // "e4m3fn": no infinities, largest number 448
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,  // a pair of F32
  kF64,
  kI64,
  kU64,
};
constexpr int kNumFileDTypes = static_cast<int>(FileDType::kU64) + 1;

// As files spell it: "F32", "BF16", "F8_E4M3". Never null.
const char* file_dtype_name(FileDType dtype) noexcept;
// False where no type is spelled so; names are case-sensitive.
bool parse_file_dtype(std::string_view name, FileDType* dtype) noexcept;
// 4, 6, 8, 16, 32 or 64.
int file_dtype_bits(FileDType dtype) noexcept;

}  // namespace loraaccel
