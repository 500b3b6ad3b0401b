// The kernels of lora_linear, best first.
#pragma once

#include <span>

#include "cpu/cpu_features.h"
#include "lora/simd/simd.h"
#include "loraaccel/lora_qkv.h"

namespace loraaccel {

// One way to compute the operators of linear layers: one layer is a group of one. The functions may assume that the
// operator's checks passed, and need not check again. `op` is for their messages.
struct LoraLinearKernel {
  const char* name;
  // Null, or why this machine or build cannot run it.
  const char* (*unavailable)(bool host_lends_gemm);
  // Null, or why it will not serve this call.
  const char* (*declines_forward)(const ExecContext& ctx, const LoraQkvArgs& args);
  Status (*forward)(const ExecContext& ctx, const char* op, const LoraQkvArgs& args);
  const char* (*declines_backward)(const ExecContext& ctx, const LoraQkvBackwardArgs& args);
  Status (*backward)(const ExecContext& ctx, const char* op, const LoraQkvBackwardArgs& args);
  // What the operators beside the linear layers (lora_delta.h, lora_expand.h, ...) run on; null: plain loops.
  const LoraSimd* (*table)();
};

// For operands on the CPU, best first: our own by instruction set, torch, portable, ref. The last accepts everything.
std::span<const LoraLinearKernel> lora_linear_kernels();

// The model behind borrowing_rows(): a host's GEMM on a matrix unit (torch's is oneDNN) beats our vector kernels, which
// know no such unit.
int64_t modelled_borrowing_rows(const CpuFeatures& features, DType dtype);

// Plain loops with sums in double: oracle, fallback and baseline.
Status lora_group_forward_ref(const ExecContext& ctx, const char* op, const LoraQkvArgs& args);
Status lora_group_backward_ref(const ExecContext& ctx, const char* op,
                               const LoraQkvBackwardArgs& args);

// The host's GEMM for the frozen layer, the adapters accumulated into its output.
Status lora_group_forward_borrowed(const ExecContext& ctx, const char* op, const LoraQkvArgs& args);
Status lora_group_backward_borrowed(const ExecContext& ctx, const char* op,
                                    const LoraQkvBackwardArgs& args);

// For those other operators: chooses from the list, and gives its table, or null for plain loops. `dtype`: of the operands;
// `unit_columns`: elements of every output's rows are neighbours.
Status choose_table(const char* op, const ExecContext& ctx, DType dtype, bool unit_columns,
                    const LoraSimd** table);

// For operands on a CUDA device; empty where CUDA is off (no_cuda/).
std::span<const LoraLinearKernel> lora_linear_cuda_kernels();

}  // namespace loraaccel
