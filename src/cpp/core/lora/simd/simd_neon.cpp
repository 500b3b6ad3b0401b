// NEON of 64-bit Arm.
#include "lora/simd/simd.h"

namespace loraaccel {
const LoraSimd* lora_simd_neon() { return nullptr; }
}  // namespace loraaccel
