// The arguments that the operators of linear layers share: adapters as lists of tensors and numbers.
#pragma once

#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "loraaccel/lora_qkv.h"
#include "ops/bridge.h"

namespace loraaccel::bridge {

using OptionalTensor = std::optional<Tensor>;

// The numbers that say what is dropped. `seed` is a dense int64 tensor of two numbers (seed, offset), needed where some
// probability is not 0; every mask of a call has an offset of its own.
struct Dropouts {
  std::span<const double> input;  // of each adapter
  std::span<const double> rank;   // hidden_dropout and rank_dropout of each adapter, or none at all
  const OptionalTensor& seed;
  double output = 0;
  // [rows of x, sum of all ranks] in the type of the sums: given factors of the rank activations; or none.
  const OptionalTensor* factors = nullptr;
};

// The adapters of one call: views over the tensors of two lists, a scale and dropouts each.
std::vector<LoraAdapter> adapters_of(const char* op, const std::vector<Tensor>& lora_a,
                                     const std::vector<Tensor>& lora_b,
                                     const std::vector<double>& scalings, const Dropouts& dropouts);
// The mask of the adapters' output.
DropoutSpec output_dropout_of(const char* op, size_t adapters, const Dropouts& dropouts);

// Samples are the first dimension of x. `adapters`: a dense int64 tensor, the adapter of each; none: all have all.
LoraSamples samples_of(const char* op, const Tensor& x, int64_t rows,
                       const OptionalTensor& adapters);

// The type of the sums, and so of the rank activations.
inline DType sum_type(DType x) { return x == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

// The flat lists of a call over several layers, cut into layers: `counts` says how many adapters each has.
struct Group {
  std::vector<LoraAdapter> adapters;
  std::vector<std::span<const LoraAdapter>> of;  // each layer's
  int64_t rank = 0;                              // the sum of all ranks

  Group(const char* op, size_t layers, const std::vector<int64_t>& counts,
        std::vector<LoraAdapter> all);
};

// The tensors of a list that holds those of the true entries only; null for the others.
std::vector<const Tensor*> spread(const char* op, const char* name, const std::vector<Tensor>& some,
                                  const std::vector<bool>& present, size_t expected);

// Makes the outputs that a mask asks for, layer by layer: weight, bias, then A and B of each adapter.
class GradientOutputs {
 public:
  // `at`: first entry of the mask that belongs to a layer.
  GradientOutputs(const char* op, const std::vector<bool>& mask, size_t at,
                  std::vector<Tensor>* outputs)
      : op_(op), mask_(mask), at_(at), outputs_(outputs) {}

  // Everything but dy. The views live as long as this object.
  LoraProjectionBackward of_layer(const TensorView& weight, std::span<const LoraAdapter> adapters);

 private:
  TensorView matrix(const TensorView& like);

  const char* op_;
  const std::vector<bool>& mask_;
  size_t at_;
  std::vector<Tensor>* outputs_;
  std::deque<std::vector<TensorView>> views_;
};

// Null for no packed weight.
const void* packed_memory(const OptionalTensor& packed, const char* op);

}  // namespace loraaccel::bridge
