#include "ops/adapters.h"

#include <cstdint>

namespace loraaccel::bridge {

std::vector<LoraAdapter> adapters_of(const char* op, const std::vector<Tensor>& lora_a,
                                     const std::vector<Tensor>& lora_b,
                                     const std::vector<double>& scalings,
                                     const std::vector<double>& dropouts,
                                     const OptionalTensor& seed) {
  const size_t n = lora_a.size();
  if (lora_b.size() != n || scalings.size() != n || dropouts.size() != n) {
    fail(StatusCode::kInvalidArgument,
         std::string(op) + ": " + std::to_string(n) + " lora_A, " + std::to_string(lora_b.size()) +
             " lora_B, " + std::to_string(scalings.size()) + " scalings and " +
             std::to_string(dropouts.size()) + " dropouts, expected as many of each");
  }
  uint64_t key = 0;
  uint64_t offset = 0;
  bool drops = false;
  for (const double p : dropouts) drops = drops || p > 0;
  if (drops) {
    if (!seed.has_value() || seed->scalar_type() != torch::headeronly::ScalarType::Long ||
        seed->numel() != 2 || !seed->is_contiguous() || !seed->is_cpu()) {
      fail(StatusCode::kInvalidArgument,
           std::string(op) +
               ": dropout without a seed, expected a dense int64 tensor of two "
               "numbers on the CPU (seed, offset)");
    }
    const auto* numbers = static_cast<const int64_t*>(seed->data_ptr());
    key = static_cast<uint64_t>(numbers[0]);
    offset = static_cast<uint64_t>(numbers[1]);
  }
  std::vector<LoraAdapter> adapters(n);
  for (size_t i = 0; i < n; ++i) {
    adapters[i].a = matrix_view(lora_a[i], op, "lora_A");
    adapters[i].b = matrix_view(lora_b[i], op, "lora_B");
    adapters[i].scale = scalings[i];
    adapters[i].dropout = {dropouts[i], key, offset + i};  // each adapter its own mask
  }
  return adapters;
}

const void* packed_memory(const OptionalTensor& packed, const char* op) {
  if (!packed.has_value()) return nullptr;
  if (!packed->is_cpu() || !packed->is_contiguous() ||
      packed->scalar_type() != torch::headeronly::ScalarType::Byte || packed->numel() < 64) {
    fail(StatusCode::kInvalidArgument,
         std::string(op) + ": packed is no packed weight, expected what pack_weight returned");
  }
  return packed->data_ptr();
}

}  // namespace loraaccel::bridge
