// What an adapter adds to a weight.
#pragma once

#include <vector>

#include "loraaccel/adapter.h"
#include "loraaccel/exec_context.h"

namespace loraaccel {

// Columns of the weight as a matrix [out, in k k]; 0 for kinds without a delta.
int64_t delta_columns(const AdapterEntry& entry);

// delta += strength * factor * update, in T (float or double), rows [row, row + rows) of the entry, dense.
// kInvalidArgument for kinds without a delta, kUnsupportedDtype for tensors that are no numbers.
template <class T>
Status add_delta(const ExecContext& ctx, const AdapterEntry& entry, double strength, int64_t row,
                 int64_t rows, T* delta);

}  // namespace loraaccel
