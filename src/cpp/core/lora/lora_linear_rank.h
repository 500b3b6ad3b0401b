// The low-rank half of lora_linear for float32 and 16-bit operands, shared by the kernels that differ in the frozen half.
// Sums in float32. Adapters of any type up to 32 bits are read once into float scratch: they are small.
#pragma once

#include <vector>

#include "lora/lora_linear_simd.h"
#include "lora/operands.h"
#include "loraaccel/lora_linear.h"

namespace loraaccel {

// Where each adapter's columns lie in a [M, total] matrix of the rank space.
struct RankColumns {
  std::vector<int64_t> start;
  int64_t total = 0;
};

// In the order of the adapters.
RankColumns rank_columns(std::span<const LoraAdapter> adapters);

// h = D(x) A^T.
Status rank_hidden(const LoraSimd& simd, const ExecContext& ctx, const AnyRows& x, int64_t rows,
                   int64_t inputs, std::span<const LoraAdapter> adapters, const TensorView& h);

// y += s h B^T, one pass over y. y has unit columns.
Status rank_expand(const LoraSimd& simd, const ExecContext& ctx,
                   std::span<const LoraAdapter> adapters, const TensorView& h, const TensorView& y);

// Panels of the matrix [rank, n] that continues a product: panel[c][n] for the rank columns c of every adapter that
// `take` names, dense. From B (transposed, times the scale) or from A.
enum class RankFactor { kScaledB, kA };
class RankPanels {
 public:
  Status build(const LoraSimd& simd, const ExecContext& ctx, std::span<const LoraAdapter> adapters,
               RankFactor factor, const std::vector<bool>& take);
  int64_t depth() const { return depth_; }
  const float* panel(int64_t index) const { return panels_.data() + index * depth_ * width_; }

 private:
  Scratch<float> panels_;
  int64_t depth_ = 0;
  int64_t width_ = 0;
};

// What the backward pass needs of the rank space.
class RankBackward {
 public:
  // u = s G B, [M, total] and its transpose [total, M]. Columns of adapters without dropout come first.
  Status prepare(const LoraSimd& simd, const ExecContext& ctx, const LoraLinearBackwardArgs& args);
  const float* u() const { return u_.data(); }
  int64_t u_stride() const { return columns_.total; }
  // Rank columns of the adapters without dropout: [0, plain_depth()).
  int64_t plain_depth() const { return plain_depth_; }
  // True for the adapters without dropout.
  const std::vector<bool>& plain() const { return plain_; }

  // dx += sum of D(u A) over the adapters with dropout, and u A over those without where `plain_too`. All parts are added
  // up first, so that dx is rounded once. dx has unit columns.
  Status add_to_dx(const LoraSimd& simd, const ExecContext& ctx, const LoraLinearBackwardArgs& args,
                   bool plain_too) const;
  // dA and dB of every adapter that wants them.
  Status adapter_gradients(const LoraSimd& simd, const ExecContext& ctx,
                           const LoraLinearBackwardArgs& args, const AnyRows& x,
                           const AnyRows& dy) const;

 private:
  RankColumns columns_;
  std::vector<bool> plain_;
  int64_t plain_depth_ = 0;
  Scratch<float> u_, u_transposed_;
  Scratch<char> dy_copy_;
};

// True where some wanted gradient reads x. (A caller that keeps no x passes a view of the right shape only.)
bool needs_input(const LoraLinearBackwardArgs& args);

// dbias[n] = sum over m of dy[m][n], sums in double.
void column_sums(const ExecContext& ctx, const AnyRows& dy, int64_t rows, const TensorView& out);

}  // namespace loraaccel
