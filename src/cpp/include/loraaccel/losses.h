// Losses and their gradients in one pass over the predictions: binary cross entropy with logits, and the losses of
// diffusion training. Letters: B samples, N elements of a sample.
//
// Every loss here is a sum of terms  w_bi f(x_bi, t_bi)  with w_bi = c_b m_bi, where m is a weight or mask that may be
// broadcast, and c_b collects what multiplies a whole sample (factors, 1 / count, the gradient that comes from above).
// So dL/dx_bi = w_bi f'(x_bi, t_bi) needs nothing that the forward pass does not have: one call gives the loss, the loss
// of each sample and the gradient.
//
// Sums: floats in blocks of 64 (pairwise), then double; the blocks lie where they lie whatever the number of threads, so
// results do not depend on it. Operands: float32, float64, bfloat16, float16 in any mixture; with a float64 among
// them plain loops in double compute. Arithmetic is otherwise float32, each output is rounded once to its type.
#pragma once

#include <limits>

#include "loraaccel/exec_context.h"

namespace loraaccel {

// Which number a loss is.
enum class LossReduction : int {
  kNone = 0,     // every element: loss [B, N]
  kMean = 1,     // [1]
  kSum = 2,      // [1]
  kSamples = 3,  // the mean of each sample: loss [B]
};

// What is broadcast against [B, N]: element (b, i) is data[b * sample_stride + i / inner % period]. A dense [B, N] is
// {N, N, 1}, a mask [B, 1, S] against [B, C, S] is {S, S, 1}, weights [C, 1] against [B, C, S] are {0, C, S}, a number is
// {0, 1, 1}.
struct BroadcastView {
  const void* data = nullptr;  // null: ones
  DType dtype = DType::kFloat32;
  int64_t sample_stride = 0;
  int64_t period = 1;  // at least 1
  int64_t inner = 1;   // at least 1

  bool defined() const noexcept { return data != nullptr; }
};

// l = w [(1 - t) x - (1 + (p - 1) t) ls(x)] q^gamma,   ls(x) = min(x, 0) - log(1 + e^-|x|),   t = t0 (1 - e) + e / 2
//
// with label smoothing e and, for a focal gamma above 0, the probability of the wrong answer q = t (1 - s) + (1 - t) s,
// s = 1 / (1 + e^-x). Then  dl/dx = w [(p t + 1 - t) s - p t]  without, and by the product rule with the focal factor:
// dq/dx = (1 - 2 t) s (1 - s).
// t may be any number (with a focal factor one from 0 to 1). Infinite logits are NaN where the target says that they are
// right (0 times infinity, as in torch), and an infinite loss where it says that they are wrong. Elements whose t0 is
// ignore_index count for nothing: loss and gradient are 0 whatever x is.
struct BceWithLogitsArgs {
  TensorView x, target;                                            // [B, N] dense
  BroadcastView weight, pos_weight;                                // w and p
  double label_smoothing = 0;                                      // e, from 0 to 1
  double focal_gamma = 0;                                          // 0 or more; 0: no factor
  double ignore_index = std::numeric_limits<double>::quiet_NaN();  // NaN: none
  LossReduction reduction = LossReduction::kMean;                  // kMean, kSum or kNone
  bool mean_of_kept =
      false;            // a mean divides by the number of elements that are not ignored (0 / 0 = 0)
  TensorView upstream;  // dL/dloss, of the shape of loss; undefined: ones. Read for grad only
  TensorView loss;      // output, [1], or [B, N] dense; or undefined
  TensorView grad;      // output, [B, N] dense; or undefined
};

// Computes the outputs that are defined. A mean divides by the number of elements, not by the sum of the weights; the
// mean of no elements is NaN, their sum 0.
// Fails with kShapeMismatch, kInvalidArgument (an operand that is not dense, null, a number out of range) or
// kUnsupportedDevice before writing anything, or with kOutOfMemory. Outputs overlap no input.
Status bce_with_logits(const ExecContext& ctx, const BceWithLogitsArgs& args);

// d = x - t, c = huber_c of the sample:
//   kL2        l = d^2                           l' = 2 d
//   kL1        l = |d|                           l' = sign d, 0 at 0
//   kHuber     l = 2 c (sqrt(d^2 + c^2) - c)     l' = 2 c d / sqrt(d^2 + c^2)
//   kSmoothL1  l = 2 (sqrt(d^2 + c^2) - c)       l' = 2 d / sqrt(d^2 + c^2)
// (pseudo-Huber, and not torch.nn.HuberLoss).
enum class DiffusionLossType : int { kL2 = 0, kL1 = 1, kHuber = 2, kSmoothL1 = 3 };

// l_b = f_b / n_b sum_i m_bi l(x_bi - t_bi);  n_b = N, or the sum of the mask over the sample (mean_of_kept; a mask of
// zeros gives 0, without a mask it is N).
//   kMean: 1 / B sum_b l_b    kSamples: l_b    kSum: sum_bi f_b m_bi l_bi    kNone: f_b m_bi l_bi
struct DiffusionLossArgs {
  TensorView pred, target;  // x and t, [B, N] dense
  TensorView factors;       // f, [B] dense: SNR factors, weights of samples; or undefined
  TensorView huber_c;       // c, [B] dense, above 0; kHuber and kSmoothL1 only
  BroadcastView mask;       // m
  DiffusionLossType type = DiffusionLossType::kL2;
  LossReduction reduction = LossReduction::kMean;
  bool mean_of_kept = false;
  TensorView upstream;    // dL/dloss, of the shape of loss; undefined: ones. Read for grad only
  TensorView loss;        // output, [1], [B], or [B, N] dense; or undefined
  TensorView per_sample;  // output, l_b [B] dense; or undefined
  TensorView grad;        // output, [B, N] dense; or undefined
};

// Rules and errors as of bce_with_logits; kInvalidArgument too for a huber_c that is missing, or not above 0.
Status diffusion_loss(const ExecContext& ctx, const DiffusionLossArgs& args);

// Factors of the loss of each sample by its signal-to-noise ratio snr = table[timestep], q = min(snr, 1000),
// s = q / (q + 1); those that are asked for are multiplied, in this order, in the type of the
// table:
//   min_snr_gamma g > 0:            min(snr, g) / snr,  for v-prediction / (snr + 1)
//   scale_v_pred_like_noise_pred:   s
//   v_pred_like_loss v != 0:        1 + v / s
//   debiased_estimation:            1 / sqrt(q),  for v-prediction 1 / (q + 1)
// A snr of 0 gives NaN where the formula does.
struct SnrScaleArgs {
  const int64_t* timesteps = nullptr;  // [B], each from 0 to T - 1
  int64_t count = 0;                   // B
  TensorView table = {};               // [T] dense, float32 or float64
  double min_snr_gamma = 0;
  bool scale_v_pred_like_noise_pred = false;
  double v_pred_like_loss = 0;
  bool debiased_estimation = false;
  bool v_prediction = false;
  TensorView factors = {};  // output, [B] dense
};

// Fails with kInvalidArgument for a timestep that is not in the table, else as bce_with_logits.
Status snr_scale(const ExecContext& ctx, const SnrScaleArgs& args);

// c of diffusion_loss for each sample:  (1 - c0) / (1 + sigma)^2 + c0,  sigma = sqrt((1 - a) / a),  a = table[timestep].
struct HuberThresholdArgs {
  const int64_t* timesteps = nullptr;  // [B], each from 0 to T - 1
  int64_t count = 0;                   // B
  TensorView table = {};               // [T] dense: the running products of the schedule's alphas
  double huber_c = 0.1;                // c0
  TensorView thresholds = {};          // output, [B] dense
};

// Errors as of snr_scale.
Status huber_threshold(const ExecContext& ctx, const HuberThresholdArgs& args);

// Means over the pixels that a pixel of a smaller image covers:  output (i, j) is that of rows floor(i H / h) up to
// ceil((i + 1) H / h) and of columns likewise, the windows of adaptive average pooling; also where h or w is the larger.
struct AreaResizeArgs {
  TensorView image;    // [planes H, W] dense
  TensorView resized;  // [planes h, w] dense, output
  int64_t planes = 1;  // images of one size, one after the other
};

// Fails with kShapeMismatch where the rows are not a multiple of the planes, kInvalidArgument for an empty image with a
// result that is not.
Status area_resize(const ExecContext& ctx, const AreaResizeArgs& args);

}  // namespace loraaccel
