// Which kernel computes a loss. The list, its order and the names are those of lora_linear's; what an entry runs on
// is the loss table of the same instruction set.
#pragma once

#include "losses/loss_call.h"

namespace loraaccel {

// Null: plain loops (the entry `ref`, and float64 in the entry `torch`).
Status choose_loss_table(const char* op, const ExecContext& ctx, DType dtype,
                         const LossSimd** table);

}  // namespace loraaccel
