#include "lora/lora_linear_kernels.h"

#include <atomic>

#include "cpu/cpu_features.h"
#include "kernel_choice.h"
#include "lora/lora_own.h"
#include "lora/operands.h"
#include "loraaccel/kernels.h"

namespace loraaccel {
namespace {

const char* missing_avx512_bf16(bool = false) {
  if (lora_simd_avx512_bf16() == nullptr) return "not part of this build";
  return cpu_features_detected().avx512_bf16 ? nullptr : "the CPU lacks AVX512_BF16";
}

const char* missing_avx512(bool = false) {
  if (lora_simd_avx512() == nullptr) return "not part of this build";
  return cpu_features_detected().avx512 ? nullptr : "the CPU lacks AVX-512 F, BW, DQ or VL";
}

const char* missing_avx2(bool = false) {
  if (lora_simd_avx2() == nullptr) return "not part of this build";
  return cpu_features_detected().avx2 ? nullptr : "the CPU lacks AVX2, FMA or F16C";
}

const char* missing_neon_bf16(bool = false) {
  if (lora_simd_neon_bf16() == nullptr) return "not part of this build";
  return cpu_features_detected().neon_bf16 ? nullptr : "the CPU lacks the bf16 instructions";
}

const char* missing_neon(bool = false) {
  if (lora_simd_neon() == nullptr) return "not part of this build";
  return cpu_features_detected().neon ? nullptr : "the CPU lacks NEON";
}

const char* always_there(bool) { return nullptr; }

const char* needs_lender(bool host_lends_gemm) {
  return host_lends_gemm ? nullptr : "the host lends no GEMM (inside torch it does)";
}

const char* own_declines(const ExecContext& ctx, const TensorView& x) {
  if (x.dtype == DType::kFloat64) return "the operands are float64";
  if (ctx.gemm != nullptr && x.rows() >= borrowing_rows(x.dtype) && forced_kernel() == nullptr)
    return "the host's GEMM is faster here for this type and number of rows";
  return nullptr;
}

bool all_zero(const TensorView& v) {
  return visit_dtype(v.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* data = static_cast<const T*>(v.data);
    for (int64_t i = 0; i < v.rows(); ++i) {
      for (int64_t j = 0; j < v.cols(); ++j) {
        if (to_float(data[i * v.stride[0] + j * v.stride[1]]) != 0) return false;
      }
    }
    return true;
  });
}

const char* outputs_decline(const TensorView& out) {
  return !out.defined() || has_unit_columns(out) ? nullptr
                                                 : "the columns of an output are not neighbours";
}

// What a kernel of ours and a borrowed GEMM both need.
const char* forward_outputs_decline(const LoraQkvArgs& args) {
  for (const LoraProjection& p : args.projections) {
    if (const char* why = outputs_decline(p.y)) return why;
  }
  return nullptr;
}

// No adapter changes anything yet: every B is zero, as before the first step of training. (One look, where that is not so.)
bool updates_are_zero(const LoraQkvArgs& args) {
  for (const LoraProjection& p : args.projections) {
    for (const LoraAdapter& ad : p.adapters) {
      if (ad.scale != 0 && !all_zero(ad.b)) return false;
    }
  }
  return true;
}

template <const LoraSimd* (*Table)(), const char* (*Missing)(bool)>
const char* own_forward_declines(const ExecContext& ctx, const LoraQkvArgs& args) {
  if (const char* why = Missing(false)) return why;
  if (const char* why = own_declines(ctx, args.x)) return why;
  if (ctx.gemm != nullptr && forced_kernel() == nullptr && updates_are_zero(args))
    return "the adapters are zero: the output is the host's own, bit for bit";
  return forward_outputs_decline(args);
}

template <const LoraSimd* (*Table)(), const char* (*Missing)(bool)>
const char* own_backward_declines(const ExecContext& ctx, const LoraQkvBackwardArgs& args) {
  if (const char* why = Missing(false)) return why;
  if (const char* why = own_declines(ctx, args.x)) return why;
  for (const LoraProjectionBackward& p : args.projections) {
    if (const char* why = outputs_decline(p.dw)) return why;
  }
  return outputs_decline(args.dx);
}

const char* borrowed_forward_declines(const ExecContext& ctx, const LoraQkvArgs& args) {
  if (const char* why = needs_lender(ctx.gemm != nullptr)) return why;
  return forward_outputs_decline(args);
}

const char* borrowed_backward_declines(const ExecContext& ctx, const LoraQkvBackwardArgs& args) {
  if (const char* why = needs_lender(ctx.gemm != nullptr)) return why;
  return outputs_decline(args.dx);
}

template <class Args>
const char* never_declines(const ExecContext&, const Args&) {
  return nullptr;
}

template <const LoraSimd* (*Table)()>
Status own_forward(const ExecContext& ctx, const char* op, const LoraQkvArgs& args) {
  return lora_group_forward_own(*Table(), ctx, op, args);
}

template <const LoraSimd* (*Table)()>
Status own_backward(const ExecContext& ctx, const char* op, const LoraQkvBackwardArgs& args) {
  return lora_group_backward_own(*Table(), ctx, op, args);
}

template <const LoraSimd* (*Table)(), const char* (*Missing)(bool)>
constexpr LoraLinearKernel own(const char* name) {
  return {name,
          Missing,
          own_forward_declines<Table, Missing>,
          own_forward<Table>,
          own_backward_declines<Table, Missing>,
          own_backward<Table>,
          Table};
}

const LoraSimd* best_table() { return &lora_simd_best(); }
const LoraSimd* no_table() { return nullptr; }

constexpr LoraLinearKernel kKernels[] = {
    own<lora_simd_avx512_bf16, missing_avx512_bf16>("avx512_bf16"),
    own<lora_simd_avx512, missing_avx512>("avx512"),
    own<lora_simd_avx2, missing_avx2>("avx2"),
    own<lora_simd_neon_bf16, missing_neon_bf16>("neon_bf16"),
    own<lora_simd_neon, missing_neon>("neon"),
    {"torch", needs_lender, borrowed_forward_declines, lora_group_forward_borrowed,
     borrowed_backward_declines, lora_group_backward_borrowed, best_table},
    own<lora_simd_portable, always_there>("portable"),
    {"ref", always_there, never_declines<LoraQkvArgs>, lora_group_forward_ref,
     never_declines<LoraQkvBackwardArgs>, lora_group_backward_ref, no_table},
};

}  // namespace

std::span<const LoraLinearKernel> lora_linear_kernels() { return kKernels; }

Status choose_table(const char* op, const ExecContext& ctx, DType dtype, bool unit_columns,
                    const LoraSimd** table) {
  const auto list =
      ctx.device == DeviceType::kCUDA ? lora_linear_cuda_kernels() : lora_linear_kernels();
  Status status;
  const LoraLinearKernel* kernel = choose_kernel<LoraLinearKernel>(
      op, list, ctx,
      [&](const LoraLinearKernel& k) -> const char* {
        if (const char* why = k.unavailable(ctx.gemm != nullptr)) return why;
        const bool plain = k.table() == nullptr;
        const bool borrows = k.declines_forward == borrowed_forward_declines;
        if (dtype == DType::kFloat64 && !plain && !borrows) return "the operands are float64";
        if (!unit_columns && !plain) return "the columns of an output are not neighbours";
        return nullptr;
      },
      &status);
  if (kernel == nullptr) return status;
  *table = dtype == DType::kFloat64 ? nullptr : kernel->table();
  return Status();
}

int64_t modelled_borrowing_rows(const CpuFeatures& features, DType dtype) {
  // With fewer rows the time is that of reading W, whoever reads it.
  constexpr int64_t kNoLongerReadingBound = 17;
  const bool matrix_unit = (dtype == DType::kBFloat16 && features.amx_bf16) ||
                           (dtype == DType::kFloat16 && features.amx_fp16);
  return matrix_unit ? kNoLongerReadingBound : INT64_MAX;
}

namespace {

constexpr int kDTypes = 4;
std::atomic<int64_t> measured_rows[kDTypes];  // 0: not measured

}  // namespace

int64_t borrowing_rows(DType dtype) {
  const int64_t measured = measured_rows[static_cast<int>(dtype)].load(std::memory_order_relaxed);
  return measured != 0 ? measured : modelled_borrowing_rows(cpu_features_detected(), dtype);
}

void set_borrowing_rows(DType dtype, int64_t rows) {
  measured_rows[static_cast<int>(dtype)].store(rows < 0 ? 0 : rows, std::memory_order_relaxed);
}

const LoraSimd& lora_simd_best() {
  if (missing_avx512_bf16() == nullptr) return *lora_simd_avx512_bf16();
  if (missing_avx512() == nullptr) return *lora_simd_avx512();
  if (missing_avx2() == nullptr) return *lora_simd_avx2();
  if (missing_neon_bf16() == nullptr) return *lora_simd_neon_bf16();
  if (missing_neon() == nullptr) return *lora_simd_neon();
  return *lora_simd_portable();
}

}  // namespace loraaccel
