#include "images/image_kernels.h"

namespace loraaccel {

std::span<const ImageKernel> image_kernels() {
  static const ImageKernel list[] = {image_kernel_avx2(), image_kernel_ref()};
  return list;
}

}  // namespace loraaccel
