// The kernels of lora_linear, best first.
#pragma once

#include <span>

#include "loraaccel/lora_linear.h"

namespace loraaccel {

// One way to compute the operator. The functions may assume that the operator's checks passed, and need not check again.
struct LoraLinearKernel {
  const char* name;
  // Null, or why this machine or build cannot run it.
  const char* (*unavailable)(bool host_lends_gemm);
  // Null, or why it will not serve this call.
  const char* (*declines_forward)(const ExecContext& ctx, const LoraLinearArgs& args);
  Status (*forward)(const ExecContext& ctx, const LoraLinearArgs& args);
  const char* (*declines_backward)(const ExecContext& ctx, const LoraLinearBackwardArgs& args);
  Status (*backward)(const ExecContext& ctx, const LoraLinearBackwardArgs& args);
};

// For operands on the CPU: avx512, avx2, torch, portable, ref. The last accepts everything.
std::span<const LoraLinearKernel> lora_linear_kernels();

// Plain loops with sums in double: oracle, fallback and baseline.
Status lora_linear_forward_ref(const ExecContext& ctx, const LoraLinearArgs& args);
Status lora_linear_backward_ref(const ExecContext& ctx, const LoraLinearBackwardArgs& args);

// The host's GEMM for the frozen layer, the adapters accumulated into its output.
Status lora_linear_forward_borrowed(const ExecContext& ctx, const LoraLinearArgs& args);
Status lora_linear_backward_borrowed(const ExecContext& ctx, const LoraLinearBackwardArgs& args);

struct LoraSimd;
// Our own GEMM with the rank update in its registers. Any type but float64; 16-bit operands are widened to scratch.
Status lora_linear_forward_simd(const LoraSimd& simd, const ExecContext& ctx,
                                const LoraLinearArgs& args);
Status lora_linear_backward_simd(const LoraSimd& simd, const ExecContext& ctx,
                                 const LoraLinearBackwardArgs& args);

// For operands on a CUDA device; empty where CUDA is off (no_cuda/).
std::span<const LoraLinearKernel> lora_linear_cuda_kernels();

}  // namespace loraaccel
