// One weight with its adapters in it.
#pragma once

#include "adapters/merge_plan.h"
#include "loraaccel/exec_context.h"

namespace loraaccel {

struct MergedWeight {
  std::string name;                   // for messages
  FileDType dtype = FileDType::kF32;  // of both
  int64_t rows = 0;
  int64_t columns = 0;
  void* data = nullptr;  // changed in place; aligned to its type
  double rounding = 0;   // of 8-bit types: the largest difference that rounding made
};

// kInvalidArgument where the result is not finite; the data is then undefined.
Status merge_weight(const ExecContext& ctx, const MergeWork& work, MergedWeight* weight);

}  // namespace loraaccel
