// The arguments that the operators of linear layers share: adapters as lists of tensors and numbers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bridge.h"
#include "loraaccel/lora_linear.h"

namespace loraaccel::bridge {

using OptionalTensor = std::optional<Tensor>;

// The adapters of one call: views over the tensors of two lists, a scale and a dropout each. `seed` is a dense int64 tensor
// of two numbers (seed, offset), needed where some dropout is not 0; each adapter has a mask of its own.
std::vector<LoraAdapter> adapters_of(const char* op, const std::vector<Tensor>& lora_a,
                                     const std::vector<Tensor>& lora_b,
                                     const std::vector<double>& scalings,
                                     const std::vector<double>& dropouts,
                                     const OptionalTensor& seed);

// The type of the sums, and so of the rank activations.
inline DType sum_type(DType x) { return x == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

// Null for no packed weight.
const void* packed_memory(const OptionalTensor& packed, const char* op);

}  // namespace loraaccel::bridge
