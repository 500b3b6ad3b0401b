// The operators over a host's tensors: what torch registers, and what older torch calls by pointers. One list of arguments
// each, as in the schemas of torch/register.cpp; shapes and types are checked in the core. They throw what bridge.h says.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "ops/adapters.h"

namespace loraaccel::operators {

using bridge::OptionalTensor;
using bridge::Tensor;

// y [..., N] and the rank activations hidden [M, sum of R] that the backward operator takes.
// dropouts: of the input, for each adapter; rank_dropouts: none, or of the rank activations and of whole ranks of a
// sample, for each adapter. adapter_ids: the adapter of each sample of x (its first dimension), -1 for none.
// rank_factors: [M, sum of R] in the type of the sums, factors of the rank activations besides those of the dropouts.
std::tuple<Tensor, Tensor> lora_linear_op(
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
    const std::vector<Tensor>& lora_a, const std::vector<Tensor>& lora_b,
    const std::vector<double>& scalings, const std::vector<double>& dropouts,
    const OptionalTensor& seed, const OptionalTensor& packed,
    const std::vector<double>& rank_dropouts, const OptionalTensor& adapter_ids,
    const OptionalTensor& rank_factors);

// The gradients that output_mask asks for, in its order: x, weight, bias, then A and B of each adapter.
std::vector<Tensor> lora_linear_backward_op(
    const Tensor& grad, const Tensor& x, const Tensor& weight, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const Tensor& hidden, const std::vector<double>& scalings,
    const std::vector<double>& dropouts, const OptionalTensor& seed,
    const std::vector<bool>& output_mask, const OptionalTensor& packed,
    const std::vector<double>& rank_dropouts, const OptionalTensor& adapter_ids,
    const OptionalTensor& rank_factors);

// A copy of the weight in the order in which the kernels read it, as bytes; see loraaccel/pack.h.
Tensor pack_weight_op(const Tensor& weight, bool for_input_gradient);

// The outputs of all projections side by side, y [..., sum of N], and the rank activations [M, sum of R].
// biases: only those that there are; lora_a, lora_b, scalings, dropouts: of all projections, `adapters` counts each's.
std::tuple<Tensor, Tensor> lora_qkv_op(
    const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
    const std::vector<bool>& has_bias, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const std::vector<int64_t>& adapters,
    const std::vector<double>& scalings, const std::vector<double>& dropouts,
    const OptionalTensor& seed, const std::vector<double>& rank_dropouts,
    const OptionalTensor& rank_factors);

// grads: of the projections whose output got one. The gradients that output_mask asks for, in its order: x, then of each
// projection weight, bias, and A and B of each adapter.
std::vector<Tensor> lora_qkv_backward_op(
    const std::vector<Tensor>& grads, const std::vector<bool>& has_grad, const Tensor& x,
    const std::vector<Tensor>& weights, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const std::vector<int64_t>& adapters, const Tensor& hidden,
    const std::vector<double>& scalings, const std::vector<double>& dropouts,
    const OptionalTensor& seed, const std::vector<bool>& output_mask,
    const std::vector<double>& rank_dropouts, const OptionalTensor& rank_factors);

// weights: gate, up, down, or up, down; the other lists as in lora_qkv. activation: 0 silu, 1 gelu, 2 gelu_tanh, 3 relu.
// y [..., N] and what the backward operator takes: the inner layers' outputs side by side [..., I or 2 I], and the rank
// activations of the inner layers and of down.
std::tuple<Tensor, Tensor, Tensor, Tensor> lora_mlp_op(
    const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
    const std::vector<bool>& has_bias, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const std::vector<int64_t>& adapters,
    const std::vector<double>& scalings, const std::vector<double>& dropouts,
    const OptionalTensor& seed, int64_t activation);

// The gradients that output_mask asks for, in its order: x, then of each layer weight, bias, and A and B of each adapter.
std::vector<Tensor> lora_mlp_backward_op(
    const Tensor& grad, const Tensor& x, const Tensor& inner, const std::vector<Tensor>& weights,
    const std::vector<Tensor>& lora_a, const std::vector<Tensor>& lora_b,
    const std::vector<int64_t>& adapters, const Tensor& hidden_inner, const Tensor& hidden_down,
    const std::vector<double>& scalings, const std::vector<double>& dropouts,
    const OptionalTensor& seed, int64_t activation, const std::vector<bool>& output_mask);

// base + the adapters' update [..., N] and the rank activations [M, sum of R]. Lists as of lora_linear.
std::tuple<Tensor, Tensor> lora_delta_op(
    const Tensor& x, const Tensor& base, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const std::vector<double>& scalings,
    const std::vector<double>& dropouts, const OptionalTensor& seed,
    const std::vector<double>& rank_dropouts, double output_dropout,
    const OptionalTensor& adapter_ids, const OptionalTensor& rank_factors);

// The gradients that output_mask asks for, in its order: x, then A and B of each adapter.
std::vector<Tensor> lora_delta_backward_op(
    const Tensor& grad, const Tensor& x, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const Tensor& hidden, const std::vector<double>& scalings,
    const std::vector<double>& dropouts, const OptionalTensor& seed,
    const std::vector<bool>& output_mask, const std::vector<double>& rank_dropouts,
    double output_dropout, const OptionalTensor& adapter_ids, const OptionalTensor& rank_factors);

// base + scaling hidden B^T, over the last dimension, or over the second of dense tensors where channels_first is true.
Tensor lora_expand_op(const Tensor& base, const Tensor& hidden, const Tensor& lora_b,
                      double scaling, bool channels_first);

// The gradients that output_mask asks for: hidden, lora_b.
std::vector<Tensor> lora_expand_backward_op(const Tensor& grad, const Tensor& hidden,
                                            const Tensor& lora_b, double scaling,
                                            bool channels_first,
                                            const std::vector<bool>& output_mask);

// y [S, N, H', W'] and the rank activations [S, R, H', W'] in float32. x dense NCHW, one group.
std::tuple<Tensor, Tensor> lora_conv2d_op(const Tensor& x, const Tensor& weight,
                                          const OptionalTensor& bias, const Tensor& lora_a,
                                          const Tensor& lora_b, double scaling,
                                          const std::vector<int64_t>& stride,
                                          const std::vector<int64_t>& padding,
                                          const std::vector<int64_t>& dilation);

// Norms of the rows of weight + the sum of scaling B A, [N]; without a weight of that sum alone.
Tensor weight_norms_op(const OptionalTensor& weight, const std::vector<Tensor>& lora_a,
                       const std::vector<Tensor>& lora_b, const std::vector<double>& scalings);

// gain z + bias, or, centred, z + (gain - 1) (z - bias); gain and bias [N], z [..., N].
Tensor column_gain_op(const Tensor& z, const Tensor& gain, const OptionalTensor& bias,
                      bool centred);

// The gradients that output_mask asks for: z, gain, bias.
std::vector<Tensor> column_gain_backward_op(const Tensor& grad, const Tensor& z, const Tensor& gain,
                                            const OptionalTensor& bias, bool centred,
                                            const std::vector<bool>& output_mask);

// What output_mask asks for: the loss, [] or for reduction 0 (none; 1 mean, 2 sum) of the shape of input, in the type of
// target as in torch; and the gradient of input. weight and pos_weight are broadcast against input; upstream has the
// loss's shape; an ignore_index of NaN ignores nothing. Not differentiable: the gradient is an output.
std::vector<Tensor> bce_with_logits_op(const Tensor& input, const Tensor& target,
                                       const OptionalTensor& weight,
                                       const OptionalTensor& pos_weight,
                                       const OptionalTensor& upstream, double label_smoothing,
                                       double focal_gamma, double ignore_index, int64_t reduction,
                                       bool mean_of_kept, const std::vector<bool>& output_mask);

// What output_mask asks for: the loss, [], [B] (reduction 3, samples) or of the shape of pred [B, ...], float32 or
// float64; the losses of the samples [B]; the gradient of pred. loss_type: 0 l2, 1 l1, 2 huber, 3 smooth_l1; huber_c and
// factors [B]; mask is broadcast against pred. Not differentiable.
std::vector<Tensor> diffusion_loss_op(const Tensor& pred, const Tensor& target,
                                      const OptionalTensor& huber_c, const OptionalTensor& factors,
                                      const OptionalTensor& mask, const OptionalTensor& upstream,
                                      int64_t loss_type, int64_t reduction, bool mean_of_kept,
                                      const std::vector<bool>& output_mask);

// Factors of the samples' losses [B] in the type of the table [T]; timesteps int64 [B].
Tensor snr_scale_op(const Tensor& timesteps, const Tensor& table, double min_snr_gamma,
                    bool scale_v_pred_like_noise_pred, double v_pred_like_loss,
                    bool debiased_estimation, bool v_prediction);

// Thresholds of the samples' pseudo-Huber losses [B] in the type of the table [T]; timesteps int64 [B].
Tensor huber_threshold_op(const Tensor& timesteps, const Tensor& table, double huber_c);

// [..., H, W] to [..., height, width] by means over windows, float32 or float64.
Tensor area_resize_op(const Tensor& image, int64_t height, int64_t width);

}  // namespace loraaccel::operators
