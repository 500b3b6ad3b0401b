// The file that takes a merge back: what the base model's file began with, and the bytes that changed.
#pragma once

#include <string>
#include <vector>

#include "loraaccel/safetensors.h"

namespace loraaccel {

// In the metadata of the merged file and of the kept one: the same for both.
constexpr const char* kIdentityKey = "loraaccel.merge";
// The tensor of the kept file that is the original's header, its length included.
constexpr const char* kHeaderName = "__loraaccel_header__";

// *identity is a hash of the bytes that are kept.
Status keep_originals(const SafetensorsReader& base, const std::vector<const TensorEntry*>& changed,
                      const std::string& path, std::string* identity);

}  // namespace loraaccel
