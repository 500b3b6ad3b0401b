// Linked instead of the CUDA kernels where CUDA is off.
#include "lora/lora_linear_kernels.h"

namespace loraaccel {

std::span<const LoraLinearKernel> lora_linear_cuda_kernels() { return {}; }

}  // namespace loraaccel
