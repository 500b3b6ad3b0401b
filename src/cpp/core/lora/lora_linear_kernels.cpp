#include "lora/lora_linear_kernels.h"

#include "cpu/cpu_features.h"
#include "kernel_choice.h"
#include "lora/lora_linear_simd.h"
#include "lora/operands.h"

namespace loraaccel {
namespace {

// Below this many rows packing W costs more than a borrowed GEMM loses (measured on Zen 5, 384 to
// 1280 columns: see benchmarks/README.md). Without a GEMM to borrow our own serves every size.
constexpr int64_t kWideMinRows = 2;

const char* missing_avx512(bool = false) {
  if (lora_simd_avx512() == nullptr) return "not part of this build";
  return cpu_features_detected().avx512 ? nullptr : "the CPU lacks AVX-512 F, BW, DQ or VL";
}

const char* missing_avx2(bool = false) {
  if (lora_simd_avx2() == nullptr) return "not part of this build";
  return cpu_features_detected().avx2 ? nullptr : "the CPU lacks AVX2, FMA or F16C";
}

const char* always_there(bool) { return nullptr; }

const char* needs_lender(bool host_lends_gemm) {
  return host_lends_gemm ? nullptr : "the host lends no GEMM (inside torch it does)";
}

const char* wide_declines(const ExecContext& ctx, const TensorView& x) {
  if (x.dtype == DType::kFloat64) return "the operands are float64";
  if (ctx.gemm == nullptr || forced_kernel() != nullptr) return nullptr;
  if (x.dtype != DType::kFloat32) {
    return "the operands are 16-bit, and the host lends a GEMM for them";
  }
  if (x.rows() < kWideMinRows) {
    return "fewer rows than pay for packing W, and the host lends a GEMM";
  }
  return nullptr;
}

const char* outputs_decline(const TensorView& out) {
  return !out.defined() || has_unit_columns(out) ? nullptr
                                                 : "the columns of an output are not neighbours";
}

const char* wide_forward_declines(const ExecContext& ctx, const LoraLinearArgs& args) {
  if (const char* why = wide_declines(ctx, args.x)) return why;
  return outputs_decline(args.y);
}

const char* wide_backward_declines(const ExecContext& ctx, const LoraLinearBackwardArgs& args) {
  if (const char* why = wide_declines(ctx, args.x)) return why;
  if (const char* why = outputs_decline(args.grads.dx)) return why;
  return outputs_decline(args.grads.dw);
}

template <const char* (*Missing)(bool), auto Declines>
const char* unless_missing(const ExecContext& ctx, const auto& args) {
  if (const char* why = Missing(false)) return why;
  return Declines(ctx, args);
}

const char* borrowed_forward_declines(const ExecContext& ctx, const LoraLinearArgs& args) {
  if (const char* why = needs_lender(ctx.gemm != nullptr)) return why;
  return outputs_decline(args.y);
}

const char* borrowed_backward_declines(const ExecContext& ctx, const LoraLinearBackwardArgs& args) {
  if (const char* why = needs_lender(ctx.gemm != nullptr)) return why;
  return outputs_decline(args.grads.dx);
}

template <class Args>
const char* never_declines(const ExecContext&, const Args&) {
  return nullptr;
}

template <const LoraSimd* (*Table)()>
Status wide_forward(const ExecContext& ctx, const LoraLinearArgs& args) {
  return lora_linear_forward_simd(*Table(), ctx, args);
}

template <const LoraSimd* (*Table)()>
Status wide_backward(const ExecContext& ctx, const LoraLinearBackwardArgs& args) {
  return lora_linear_backward_simd(*Table(), ctx, args);
}

constexpr LoraLinearKernel kKernels[] = {
    {"avx512", missing_avx512, unless_missing<missing_avx512, wide_forward_declines>,
     wide_forward<lora_simd_avx512>, unless_missing<missing_avx512, wide_backward_declines>,
     wide_backward<lora_simd_avx512>},
    {"avx2", missing_avx2, unless_missing<missing_avx2, wide_forward_declines>,
     wide_forward<lora_simd_avx2>, unless_missing<missing_avx2, wide_backward_declines>,
     wide_backward<lora_simd_avx2>},
    {"torch", needs_lender, borrowed_forward_declines, lora_linear_forward_borrowed,
     borrowed_backward_declines, lora_linear_backward_borrowed},
    {"portable", always_there, wide_forward_declines, wide_forward<lora_simd_portable>,
     wide_backward_declines, wide_backward<lora_simd_portable>},
    {"ref", always_there, never_declines<LoraLinearArgs>, lora_linear_forward_ref,
     never_declines<LoraLinearBackwardArgs>, lora_linear_backward_ref},
};

}  // namespace

std::span<const LoraLinearKernel> lora_linear_kernels() { return kKernels; }

const LoraSimd& lora_simd_best() {
  if (missing_avx512() == nullptr) return *lora_simd_avx512();
  if (missing_avx2() == nullptr) return *lora_simd_avx2();
  return *lora_simd_portable();
}

}  // namespace loraaccel
