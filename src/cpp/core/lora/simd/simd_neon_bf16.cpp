// NEON with the bf16 instructions (BFDOT).
#include "lora/simd/simd.h"

namespace loraaccel {
const LoraSimd* lora_simd_neon_bf16() { return nullptr; }
}  // namespace loraaccel
