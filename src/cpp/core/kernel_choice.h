// Choice of a kernel from an explicit list, and LORAACCEL_FORCE_KERNEL.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "loraaccel/exec_context.h"

namespace loraaccel {

// The name in LORAACCEL_FORCE_KERNEL; null when it is unset, "" or "auto".
const char* forced_kernel();

// The first kernel of the list that accepts, or the forced one; null, with *status saying why, where there is none.
// `declines(kernel)` is null where the kernel accepts, else says why not. Every list ends with an entry that accepts
// whatever passed the operator's checks.
template <class Kernel, class Declines>
const Kernel* choose_kernel(const char* op, std::span<const Kernel> list, const ExecContext& ctx,
                            const Declines& declines, Status* status) {
  if (list.empty()) {
    *status =
        Status(StatusCode::kUnsupportedDevice,
               std::string(op) + ": this build has no kernels for a CUDA device, expected the CPU");
    return nullptr;
  }
  const char* forced = forced_kernel();
  std::string names;
  for (const Kernel& kernel : list) {
    if (forced != nullptr && std::string_view(forced) != kernel.name) {
      names += (names.empty() ? "" : ", ") + std::string(kernel.name);
      continue;
    }
    const char* why_not = declines(kernel);
    if (why_not == nullptr) {
      if (ctx.kernel_ran != nullptr) *ctx.kernel_ran = kernel.name;
      return &kernel;
    }
    if (forced != nullptr) {
      *status = Status(StatusCode::kKernelUnavailable,
                       std::string(op) + ": LORAACCEL_FORCE_KERNEL=" + forced +
                           ", but this kernel cannot serve the call: " + why_not);
      return nullptr;
    }
  }
  *status = forced != nullptr
                ? Status(StatusCode::kKernelUnavailable,
                         std::string(op) + ": LORAACCEL_FORCE_KERNEL=" + forced +
                             " names no kernel, expected one of: " + names)
                : Status(StatusCode::kInternal, std::string(op) + ": no kernel accepted the call");
  return nullptr;
}

}  // namespace loraaccel
