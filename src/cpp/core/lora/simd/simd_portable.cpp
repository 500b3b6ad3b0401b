// For any CPU.
#include "lora/simd/simd.h"

#include <cstring>

#include "half.h"
#include "random/philox.h"

namespace loraaccel {
namespace portable {
namespace {

#include "simd/portable_trait-inl.h"
using V = Portable;
#include "lora/simd/simd-inl.h"

}  // namespace
}  // namespace portable

const LoraSimd* lora_simd_portable() { return &portable::kTable; }

}  // namespace loraaccel
