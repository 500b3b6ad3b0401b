#include "lora/rank_rows.h"

#include "lora/plain.h"
#include "random/philox.h"

namespace loraaccel {
namespace {

double mask_factor(const DropoutSpec& d, int64_t row, int64_t col) {
  if (d.p <= 0) return 1;
  if (dropout_word(d.seed, d.offset, row, col) < dropout_threshold(d.p)) return 0;
  return 1 / (1 - d.p);
}

}  // namespace

double rank_mask_factor(const LoraAdapter& ad, const LoraSamples& samples, int64_t row, int64_t r) {
  const double given = ad.factors.defined() ? plain_read(ad.factors, row, r) : 1;
  return given * mask_factor(ad.hidden, row, r) * mask_factor(ad.rank, row / samples.rows, r);
}

void apply_rank_masks(const LoraSimd& simd, const LoraAdapter& ad, const LoraSamples& samples,
                      int64_t row0, int64_t count, float* h, int64_t stride) {
  const int64_t rank = ad.a.rows();
  if (ad.factors.defined()) {
    const auto* factors = static_cast<const float*>(ad.factors.data);
    for (int64_t m = 0; m < count; ++m) {
      const float* given = factors + (row0 + m) * ad.factors.stride[0];
      for (int64_t r = 0; r < rank; ++r) h[m * stride + r] *= given[r * ad.factors.stride[1]];
    }
  }
  if (ad.hidden.p > 0) {
    simd.dropout(DType::kFloat32, h, stride,
                 {row0, count, 0, rank, ad.hidden.seed, ad.hidden.offset, ad.hidden.p}, h, stride);
  }
  if (ad.rank.p <= 0) return;
  constexpr int64_t kColumns = kDropoutGroup;
  float ones[kColumns];
  float factors[kColumns];
  std::fill_n(ones, kColumns, 1.0F);
  for (int64_t row = row0; row < row0 + count;) {
    const int64_t sample = row / samples.rows;
    const int64_t end = std::min(row0 + count, (sample + 1) * samples.rows);
    for (int64_t col = 0; col < rank; col += kColumns) {
      const int64_t n = std::min(kColumns, rank - col);
      simd.dropout(DType::kFloat32, ones, kColumns,
                   {sample, 1, col, n, ad.rank.seed, ad.rank.offset, ad.rank.p}, factors, kColumns);
      for (int64_t m = row; m < end; ++m) {
        float* at = h + (m - row0) * stride + col;
        for (int64_t j = 0; j < n; ++j) at[j] *= factors[j];
      }
    }
    row = end;
  }
}

std::vector<RankRun> layer_runs(const LoraSamples& samples, int64_t rows,
                                std::span<const LoraAdapter> adapters) {
  std::vector<RankRun> runs;
  if (samples.adapter == nullptr) return runs;
  const std::vector<bool> used = used_adapters(samples, rows, adapters.size());
  std::vector<int64_t> columns{0};
  std::vector<int64_t> panels{0};
  for (size_t i = 0; i < adapters.size(); ++i) {
    columns.push_back(columns.back() + adapters[i].a.rows());
    panels.push_back(panels.back() + (used[i] ? adapters[i].a.rows() : 0));
  }
  for_adapter_runs(samples, 0, rows, [&](int64_t begin, int64_t end, int64_t adapter) {
    const bool some = adapter >= 0 && adapter < static_cast<int64_t>(adapters.size());
    const auto i = static_cast<size_t>(some ? adapter : 0);
    runs.push_back({begin, end, columns[i], panels[i], some ? columns[i + 1] - columns[i] : 0});
  });
  return runs;
}

std::vector<bool> used_adapters(const LoraSamples& samples, int64_t rows, size_t adapters) {
  std::vector<bool> used(adapters, samples.adapter == nullptr);
  if (samples.adapter == nullptr) return used;
  for (int64_t s = 0; s < rows / samples.rows; ++s) {
    const int64_t adapter = samples.adapter[s];
    if (adapter >= 0 && static_cast<size_t>(adapter) < adapters)
      used[static_cast<size_t>(adapter)] = true;
  }
  return used;
}

}  // namespace loraaccel
