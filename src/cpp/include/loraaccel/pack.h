// Frozen weights in the order in which this CPU's kernels read them.
//
// A kernel that multiplies many rows reads W in panels. It makes them for each call, in blocks that fit the caches, and
// needs no memory for them; a program whose weights stay as they are may keep them instead: that pays where a call has
// few rows (benchmarks/README.md has numbers).
#pragma once

#include <cstddef>

#include "loraaccel/exec_context.h"

namespace loraaccel {

enum class WeightUse {
  kForward,        // x W^T
  kInputGradient,  // dy W
};

// Bytes that pack_weight needs for w [N, K]; about the size of w for bfloat16 on CPUs that multiply it and for float32,
// twice that for other 16-bit types. 0 for float64 and where
// the columns of w are not neighbours.
size_t packed_weight_bytes(const TensorView& w, WeightUse use);

// Bytes of what pack_weight() wrote, by its first 64; 64 where they are something else.
size_t packed_weight_bytes(const void* packed);

// Fills `memory` (aligned to 64 bytes) with a packed copy of w, whose columns are neighbours (rows of any stride). The copy
// goes with this process: it is not a file format. Pack again when w changes: calls with up to 16 rows read w itself and see
// later changes, others do not.
// Fails with kInvalidArgument where packed_weight_bytes() says 0 or the memory is smaller.
Status pack_weight(const ExecContext& ctx, const TensorView& w, WeightUse use, void* memory,
                   size_t bytes);

}  // namespace loraaccel
