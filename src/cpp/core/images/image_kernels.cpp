#include "images/image_kernels.h"

#include "cpu/cpu_features.h"

namespace loraaccel {
namespace {

ImageKernel missing(const char* name) {
  return {
      name,    []() -> const char* { return "this build or this CPU has no such instructions"; },
      nullptr, nullptr,
      nullptr, nullptr,
      nullptr};
}

}  // namespace

std::span<const ImageKernel> image_kernels() {
  // A unit of an instruction set may use it wherever it likes: nothing of it is called on another CPU.
  static const ImageKernel list[] = {
      cpu_features_detected().avx2 ? image_kernel_avx2() : missing("avx2"), image_kernel_ref()};
  return list;
}

}  // namespace loraaccel
