#include <nlohmann/json.hpp>

#include "cpu/cpu_features.h"
#include "images/image_kernels.h"
#include "lora/lora_linear_kernels.h"
#include "loraaccel/exec_context.h"
#include "loraaccel/kernels.h"
#include "loraaccel/version.h"

namespace loraaccel {
namespace {

#ifdef __clang__
constexpr const char* kCompiler = __VERSION__;  // names clang itself
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

}  // namespace

std::vector<std::string> cpu_features() {
  const CpuFeatures& f = cpu_features_detected();
  std::vector<std::string> names;
  if (f.sse42) names.emplace_back("sse4.2");
  if (f.avx2) names.insert(names.end(), {"avx2", "fma", "f16c"});
  if (f.avx512) names.emplace_back("avx512");
  if (f.avx512_bf16) names.emplace_back("avx512_bf16");
  if (f.amx_bf16) names.emplace_back("amx_bf16");
  if (f.amx_fp16) names.emplace_back("amx_fp16");
  if (f.neon) names.emplace_back("neon");
  if (f.neon_bf16) names.emplace_back("neon_bf16");
  return names;
}

std::vector<KernelInfo> list_kernels(bool host_lends_gemm) {
  std::vector<KernelInfo> list;
  for (const auto kernels : {lora_linear_cuda_kernels(), lora_linear_kernels()}) {
    for (const LoraLinearKernel& kernel : kernels) {
      const char* why_not = kernel.unavailable(host_lends_gemm);
      list.push_back(
          {"lora_linear", kernel.name, why_not == nullptr, why_not == nullptr ? "" : why_not});
    }
  }
  for (const ImageKernel& kernel : image_kernels()) {
    const char* why_not = kernel.unavailable();
    list.push_back(
        {"resize_image", kernel.name, why_not == nullptr, why_not == nullptr ? "" : why_not});
  }
  return list;
}

std::string describe_json() {
  nlohmann::json kernels = nlohmann::json::array();
  for (const KernelInfo& k : list_kernels()) {
    kernels.push_back(
        {{"op", k.op}, {"name", k.name}, {"available", k.available}, {"reason", k.reason}});
  }
  nlohmann::json report = {
      {"version", LORAACCEL_VERSION}, {"compiler", kCompiler}, {"cpu_features", cpu_features()},
      {"num_threads", num_threads()}, {"kernels", kernels},
  };
  return report.dump();
}

}  // namespace loraaccel
