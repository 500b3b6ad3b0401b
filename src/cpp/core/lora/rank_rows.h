// What is done to rank activations row by row: the masks that drop them, and the adapter that a sample has.
#pragma once

#include <algorithm>
#include <vector>

#include "lora/simd/simd.h"
#include "loraaccel/lora_linear.h"

namespace loraaccel {

inline bool has_rank_masks(const LoraAdapter& ad) {
  return ad.hidden.p > 0 || ad.rank.p > 0 || ad.factors.defined();
}

// H(row, r) in plain code: the oracle.
double rank_mask_factor(const LoraAdapter& ad, const LoraSamples& samples, int64_t row, int64_t r);

// Multiplies rows [row0, row0 + count) of an adapter's activations by H.
void apply_rank_masks(const LoraSimd& simd, const LoraAdapter& ad, const LoraSamples& samples,
                      int64_t row0, int64_t count, float* h, int64_t stride);

// True where the row has the adapter with this index in its layer.
inline bool row_has(const LoraSamples& samples, int64_t row, int64_t index) {
  return samples.adapter == nullptr || samples.adapter[row / samples.rows] == index;
}

// f(begin, end, adapter) for the longest runs of rows in [begin, end) that have the same adapter.
template <class F>
void for_adapter_runs(const LoraSamples& samples, int64_t begin, int64_t end, const F& f) {
  while (begin < end) {
    int64_t sample = begin / samples.rows;
    const int64_t adapter = samples.adapter[sample];
    int64_t next = begin;
    for (; next < end && samples.adapter[sample] == adapter; ++sample)
      next = std::min(end, (sample + 1) * samples.rows);
    f(begin, next, adapter);
    begin = next;
  }
}

// Rows with one adapter, and where it lies in the rank space.
struct RankRun {
  int64_t begin, end;
  int64_t column;  // first column of h or u
  int64_t panel;   // first row of the panels, which hold the adapters in use only
  int64_t depth;   // 0: no adapter
};

// All runs of a layer whose adapters lie side by side in the rank space; empty where every row has all of them.
std::vector<RankRun> layer_runs(const LoraSamples& samples, int64_t rows,
                                std::span<const LoraAdapter> adapters);

// f(run) for the part of every run that lies in the rows of `part`; without runs for `part` itself.
template <class F>
void for_rank_runs(const std::vector<RankRun>& runs, const RankRun& part, const F& f) {
  if (runs.empty()) return f(part);
  auto run = std::ranges::upper_bound(runs, part.begin, {}, &RankRun::end);
  for (; run != runs.end() && run->begin < part.end; ++run) {
    f(RankRun{std::max(run->begin, part.begin), std::min(run->end, part.end), run->column,
              run->panel, run->depth});
  }
}

// For each adapter of a layer: does any sample have it?
std::vector<bool> used_adapters(const LoraSamples& samples, int64_t rows, size_t adapters);

}  // namespace loraaccel
