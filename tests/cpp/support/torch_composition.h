// lora_linear as a user of libtorch writes it without us: plain operators, torch's own autograd.
#pragma once

#include <torch/torch.h>

#include <optional>
#include <span>
#include <vector>

#include "loraaccel/autograd.h"
#include "support/philox_reference.h"

namespace loraaccel::test {

// The factors of D, 0 or 1 / (1 - p), [rows, cols] in float64.
inline at::Tensor dropout_factors(double p, const at::Tensor& seed, int64_t adapter, int64_t rows,
                                  int64_t cols) {
  at::Tensor factors = at::empty({rows, cols}, at::kDouble);
  const auto key = static_cast<uint64_t>(seed[0].item<int64_t>());
  const auto offset = static_cast<uint64_t>(seed[1].item<int64_t>() + adapter);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t k = 0; k < cols; ++k) {
      factors[m][k] = dropout_keeps(p, key, offset, m, k) ? 1 / (1 - p) : 0.0;
    }
  }
  return factors;
}

// What lora_linear() draws next from torch's generator, which is left as it was.
inline at::Tensor next_seed() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const at::Tensor state = generator.get_state();
  at::Tensor seed = at::randint(int64_t{1} << 62, {2}, at::kLong);
  generator.set_state(state);
  return seed;
}

inline at::Tensor composition(const at::Tensor& x, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias,
                              std::span<const LoraTensors> adapters, const at::Tensor& seed = {}) {
  const int64_t inputs = x.size(-1);
  const at::Tensor rows = x.reshape({-1, inputs});
  at::Tensor y = rows.matmul(weight.t());
  if (bias) y = y + *bias;
  int64_t index = 0;
  for (const LoraTensors& ad : adapters) {
    at::Tensor dropped = rows;
    if (ad.input_dropout > 0 && seed.defined()) {
      dropped =
          rows * dropout_factors(ad.input_dropout, seed, index, rows.size(0), inputs).to(x.dtype());
    }
    at::Tensor h = dropped.matmul(ad.lora_A.t());
    const int64_t rank = ad.lora_A.size(0);
    const auto adapter_count = static_cast<int64_t>(adapters.size());
    if (ad.hidden_dropout > 0 && seed.defined()) {
      h = h * dropout_factors(ad.hidden_dropout, seed, adapter_count + index, h.size(0), rank)
                  .to(x.dtype());
    }
    if (ad.rank_dropout > 0 && seed.defined() && h.size(0) > 0) {
      const int64_t samples = x.dim() > 1 ? x.size(0) : 1;
      const at::Tensor factors =
          dropout_factors(ad.rank_dropout, seed, 2 * adapter_count + index, samples, rank);
      h = h * factors.repeat_interleave(h.size(0) / samples, 0).to(x.dtype());
    }
    y = y + ad.scaling * h.matmul(ad.lora_B.t());
    ++index;
  }
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(0);
  return y.reshape(shape);
}

}  // namespace loraaccel::test
