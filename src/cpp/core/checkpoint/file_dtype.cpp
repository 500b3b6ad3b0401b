#include "loraaccel/file_dtype.h"

#include <cstddef>

namespace loraaccel {
namespace {

struct Row {
  const char* name;
  int bits;
};

constexpr Row kRows[kNumFileDTypes] = {
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
};

bool is_known(FileDType dtype) {
  return static_cast<int>(dtype) >= 0 && static_cast<int>(dtype) < kNumFileDTypes;
}

}  // namespace

const char* file_dtype_name(FileDType dtype) noexcept {
  return is_known(dtype) ? kRows[static_cast<size_t>(dtype)].name : "unknown";
}

int file_dtype_bits(FileDType dtype) noexcept {
  return is_known(dtype) ? kRows[static_cast<size_t>(dtype)].bits : 0;
}

bool parse_file_dtype(std::string_view name, FileDType* dtype) noexcept {
  for (int i = 0; i < kNumFileDTypes; ++i) {
    if (name != kRows[i].name) continue;
    *dtype = static_cast<FileDType>(i);
    return true;
  }
  return false;
}

}  // namespace loraaccel
