// What the losses have in common: one description of a call, and the run over it in pieces.
#pragma once

#include "loraaccel/losses.h"
#include "losses/simd/loss_simd.h"

namespace loraaccel {

// A checked call. Views are dense or undefined.
struct LossCall {
  LossKind kind = LossKind::kL2;
  TensorView x, target;
  BroadcastView weight, pos_weight;
  TensorView factors, huber_c;
  TensorView upstream;
  double smoothing = 0;
  double focal_gamma = 0;
  double ignore_index = std::numeric_limits<double>::quiet_NaN();
  LossReduction reduction = LossReduction::kMean;
  bool mean_of_kept = false;
  TensorView loss, per_sample, grad;

  bool is_bce() const { return kind == LossKind::kBce || kind == LossKind::kFocalBce; }
};

// Neighbouring elements of one sample, and what their losses and gradients are multiplied by.
struct LossPiece {
  int64_t sample, begin, count;
  double loss_scale, grad_scale;
  bool sum;
};

// Stores losses and gradients of a piece where they are wanted; the result is the sum of the losses without their scale.
using LossPieceFunction = double (*)(const LossSimd* simd, const LossCall& call,
                                     const LossPiece& piece);
double loss_piece_simd(const LossSimd* simd, const LossCall& call, const LossPiece& piece);
// Plain loops in double over any types: the oracle, and the way of float64.
double loss_piece_ref(const LossSimd*, const LossCall& call, const LossPiece& piece);

// A piece is a whole number of the vector kernels' blocks, and small enough that what is read twice is in cache.
constexpr int64_t kLossPiece = 4096;

// One element of an array of any type.
double read_number(DType dtype, const void* data, int64_t index);
void write_number(DType dtype, void* data, int64_t index, double value);
inline double broadcast_at(const BroadcastView& v, int64_t sample, int64_t i) {
  if (!v.defined()) return 1;
  return read_number(v.dtype, v.data, sample * v.sample_stride + i / v.inner % v.period);
}

// Runs all pieces by the kernel that is chosen, and reduces.
Status run_loss(const ExecContext& ctx, const char* op, const LossCall& call);

}  // namespace loraaccel
