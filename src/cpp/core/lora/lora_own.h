// Our own kernels over the vector tables. Any type but float64; outputs y, dx and dw have unit columns.
#pragma once

#include "lora/simd/simd.h"
#include "loraaccel/lora_delta.h"
#include "loraaccel/lora_expand.h"
#include "loraaccel/lora_qkv.h"

namespace loraaccel {

Status lora_group_forward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                              const LoraQkvArgs& args);
Status lora_group_backward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                               const LoraQkvBackwardArgs& args);

Status lora_delta_forward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                              const LoraDeltaArgs& args);
Status lora_delta_backward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                               const LoraDeltaBackwardArgs& args);

Status lora_expand_forward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                               const LoraExpandArgs& args);
Status lora_expand_backward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                                const LoraExpandBackwardArgs& args);

// True where some wanted gradient reads x. (A caller that keeps no x passes a view of the right shape only.)
bool reads_input(const LoraQkvBackwardArgs& args);

}  // namespace loraaccel
