#include "kernel_choice.h"

#include <cstdlib>
#include <cstring>

namespace loraaccel {

const char* forced_kernel() {
  const char* name = std::getenv("LORAACCEL_FORCE_KERNEL");
  if (name == nullptr || *name == '\0' || std::strcmp(name, "auto") == 0) return nullptr;
  return name;
}

}  // namespace loraaccel
