// The files of src/data/names, compiled in.
#pragma once

#include <cstddef>

namespace loraaccel {

struct NameText {
  const char* name;  // of the file, without its ending
  const char* text;
};

extern const NameText kNameTexts[];
extern const size_t kNumNameTexts;

}  // namespace loraaccel
