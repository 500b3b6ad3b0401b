// Numbers as text, and out of tensors of any type.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "loraaccel/file_dtype.h"

namespace loraaccel {

std::string number_text(double value);  // the shortest that reads back as the same number
std::string shape_words(const std::vector<int64_t>& shape);  // "[2, 3]"

// Element `index`; false for types that are no numbers of their own (F4, F6, F8_E8M0, complex).
bool element_value(FileDType dtype, const void* data, int64_t index, double* value);
// Widens `count` elements from the first on; false as above.
bool widen_elements(FileDType dtype, const void* data, int64_t count, float* out);
bool is_float_dtype(FileDType dtype);    // F64, F32, F16, BF16, F8_E4M3, F8_E5M2
bool is_integer_dtype(FileDType dtype);  // BOOL too

}  // namespace loraaccel
