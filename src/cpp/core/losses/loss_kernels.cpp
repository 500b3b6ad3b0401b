#include "losses/loss_kernels.h"

#include "lora/lora_linear_kernels.h"

namespace loraaccel {

Status choose_loss_table(const char* op, const ExecContext& ctx, DType dtype,
                         const LossSimd** table) {
  const LoraSimd* chosen = nullptr;
  LORAACCEL_RETURN_IF_ERROR(choose_table(op, ctx, dtype, /*unit_columns=*/true, &chosen));
  struct Entry {
    const LoraSimd* of;
    const LossSimd* table;
  };
  // Losses multiply no pairs of bfloat16.
  const Entry entries[] = {
      {lora_simd_avx512_bf16(), loss_simd_avx512()}, {lora_simd_avx512(), loss_simd_avx512()},
      {lora_simd_avx2(), loss_simd_avx2()},          {lora_simd_neon_bf16(), loss_simd_neon()},
      {lora_simd_neon(), loss_simd_neon()},          {lora_simd_portable(), loss_simd_portable()},
  };
  *table = nullptr;
  for (const Entry& entry : entries) {
    if (chosen != nullptr && entry.of == chosen) *table = entry.table;
  }
  return Status();
}

}  // namespace loraaccel
