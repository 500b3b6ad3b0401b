// The operators' schemas; operators.h says what each computes.
#include <torch/csrc/stable/library.h>

#include "ops/operators.h"

namespace operators = loraaccel::operators;

STABLE_TORCH_LIBRARY(loraaccel, m) {
  m.def(
      "lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor[] lora_A, Tensor[] lora_B, "
      "float[] scalings, "
      "float[] dropouts, Tensor? seed, Tensor? packed=None, float[] rank_dropouts=[], "
      "Tensor? adapter_ids=None, Tensor? rank_factors=None) -> (Tensor, Tensor)");
  m.def(
      "lora_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor[] lora_A, Tensor[] "
      "lora_B, Tensor hidden, "
      "float[] scalings, float[] dropouts, Tensor? seed, bool[] output_mask, Tensor? packed=None, "
      "float[] rank_dropouts=[], Tensor? adapter_ids=None, Tensor? rank_factors=None) -> Tensor[]");
  m.def("pack_weight(Tensor weight, bool for_input_gradient) -> Tensor");
  m.def(
      "lora_qkv(Tensor x, Tensor[] weights, Tensor[] biases, bool[] has_bias, Tensor[] lora_A, "
      "Tensor[] lora_B, int[] adapters, float[] scalings, float[] dropouts, Tensor? seed, "
      "float[] rank_dropouts=[], Tensor? rank_factors=None) -> (Tensor, Tensor)");
  m.def(
      "lora_qkv_backward(Tensor[] grads, bool[] has_grad, Tensor x, Tensor[] weights, Tensor[] "
      "lora_A, Tensor[] lora_B, int[] adapters, Tensor hidden, float[] scalings, float[] dropouts, "
      "Tensor? seed, bool[] output_mask, float[] rank_dropouts=[], "
      "Tensor? rank_factors=None) -> Tensor[]");
  m.def(
      "lora_mlp(Tensor x, Tensor[] weights, Tensor[] biases, bool[] has_bias, Tensor[] lora_A, "
      "Tensor[] lora_B, int[] adapters, float[] scalings, float[] dropouts, Tensor? seed, int "
      "activation) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "lora_mlp_backward(Tensor grad, Tensor x, Tensor inner, Tensor[] weights, Tensor[] lora_A, "
      "Tensor[] lora_B, int[] adapters, Tensor hidden_inner, Tensor hidden_down, float[] scalings, "
      "float[] dropouts, Tensor? seed, int activation, bool[] output_mask) -> Tensor[]");
  m.def(
      "lora_delta(Tensor x, Tensor base, Tensor[] lora_A, Tensor[] lora_B, float[] scalings, "
      "float[] dropouts, Tensor? seed, float[] rank_dropouts=[], float output_dropout=0.0, "
      "Tensor? adapter_ids=None, Tensor? rank_factors=None) -> (Tensor, Tensor)");
  m.def(
      "lora_delta_backward(Tensor grad, Tensor x, Tensor[] lora_A, Tensor[] lora_B, Tensor hidden, "
      "float[] scalings, float[] dropouts, Tensor? seed, bool[] output_mask, "
      "float[] rank_dropouts=[], float output_dropout=0.0, Tensor? adapter_ids=None, "
      "Tensor? rank_factors=None) -> Tensor[]");
  m.def(
      "lora_expand(Tensor base, Tensor hidden, Tensor lora_B, float scaling, bool channels_first) "
      "-> Tensor");
  m.def(
      "lora_expand_backward(Tensor grad, Tensor hidden, Tensor lora_B, float scaling, bool "
      "channels_first, bool[] output_mask) -> Tensor[]");
  m.def(
      "lora_conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor lora_A, Tensor lora_B, float "
      "scaling, int[] stride, int[] padding, int[] dilation) -> (Tensor, Tensor)");
  m.def(
      "weight_norms(Tensor? weight, Tensor[] lora_A, Tensor[] lora_B, float[] scalings) -> Tensor");
  m.def("column_gain(Tensor z, Tensor gain, Tensor? bias, bool centred) -> Tensor");
  m.def(
      "column_gain_backward(Tensor grad, Tensor z, Tensor gain, Tensor? bias, bool centred, "
      "bool[] output_mask) -> Tensor[]");
  m.def(
      "bce_with_logits(Tensor input, Tensor target, Tensor? weight, Tensor? pos_weight, Tensor? "
      "upstream, float label_smoothing, float focal_gamma, float ignore_index, int reduction, bool "
      "mean_of_kept, bool[] output_mask) -> Tensor[]");
  m.def(
      "diffusion_loss(Tensor pred, Tensor target, Tensor? huber_c, Tensor? factors, Tensor? mask, "
      "Tensor? upstream, int loss_type, int reduction, bool mean_of_kept, bool[] output_mask) -> "
      "Tensor[]");
  m.def(
      "snr_scale(Tensor timesteps, Tensor table, float min_snr_gamma, bool "
      "scale_v_pred_like_noise_pred, float v_pred_like_loss, bool debiased_estimation, bool "
      "v_prediction) -> Tensor");
  m.def("huber_threshold(Tensor timesteps, Tensor table, float huber_c) -> Tensor");
  m.def("area_resize(Tensor image, int height, int width) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(loraaccel, CPU, m) {
  m.impl("lora_linear", TORCH_BOX(&operators::lora_linear_op));
  m.impl("lora_linear_backward", TORCH_BOX(&operators::lora_linear_backward_op));
  m.impl("pack_weight", TORCH_BOX(&operators::pack_weight_op));
  m.impl("lora_qkv", TORCH_BOX(&operators::lora_qkv_op));
  m.impl("lora_qkv_backward", TORCH_BOX(&operators::lora_qkv_backward_op));
  m.impl("lora_mlp", TORCH_BOX(&operators::lora_mlp_op));
  m.impl("lora_mlp_backward", TORCH_BOX(&operators::lora_mlp_backward_op));
  m.impl("lora_delta", TORCH_BOX(&operators::lora_delta_op));
  m.impl("lora_delta_backward", TORCH_BOX(&operators::lora_delta_backward_op));
  m.impl("lora_expand", TORCH_BOX(&operators::lora_expand_op));
  m.impl("lora_expand_backward", TORCH_BOX(&operators::lora_expand_backward_op));
  m.impl("lora_conv2d", TORCH_BOX(&operators::lora_conv2d_op));
  m.impl("weight_norms", TORCH_BOX(&operators::weight_norms_op));
  m.impl("column_gain", TORCH_BOX(&operators::column_gain_op));
  m.impl("column_gain_backward", TORCH_BOX(&operators::column_gain_backward_op));
  m.impl("bce_with_logits", TORCH_BOX(&operators::bce_with_logits_op));
  m.impl("diffusion_loss", TORCH_BOX(&operators::diffusion_loss_op));
  m.impl("snr_scale", TORCH_BOX(&operators::snr_scale_op));
  m.impl("huber_threshold", TORCH_BOX(&operators::huber_threshold_op));
  m.impl("area_resize", TORCH_BOX(&operators::area_resize_op));
}
