// Plain loops with sums in double, over any type and any strides: the oracle, and the way of float64. And elements of views
// one by one, of which they are made.
#pragma once

#include "half.h"
#include "loraaccel/lora_delta.h"
#include "loraaccel/lora_expand.h"

namespace loraaccel {

Status lora_delta_forward_ref(const ExecContext& ctx, const LoraDeltaArgs& args);
Status lora_delta_backward_ref(const ExecContext& ctx, const char* op,
                               const LoraDeltaBackwardArgs& args);
Status lora_expand_forward_ref(const ExecContext& ctx, const LoraExpandArgs& args);
Status lora_expand_backward_ref(const ExecContext& ctx, const LoraExpandBackwardArgs& args);

inline double plain_read(const TensorView& v, int64_t i, int64_t j) {
  return visit_dtype(v.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return static_cast<double>(
        to_float(static_cast<const T*>(v.data)[i * v.stride[0] + j * v.stride[1]]));
  });
}

inline void plain_write(const TensorView& v, int64_t i, int64_t j, double value) {
  visit_dtype(v.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    from_float(value, static_cast<T*>(v.data) + i * v.stride[0] + j * v.stride[1]);
  });
}

}  // namespace loraaccel
