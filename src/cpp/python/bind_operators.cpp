// The operators for a torch whose stable ABI libloraaccel does not have: the same functions as in torch/register.cpp, over
// tensors that Python hands over. loraaccel._pointers is their only caller.
#include <pybind11/stl.h>

#include "bindings.h"
#include "loraaccel/kernels.h"
#include "ops/operators.h"

namespace py = pybind11;

namespace loraaccel::python {
namespace {

using bridge::OptionalTensor;

constexpr DType kBorrowing[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

py::dict kernel_calls() {
  constexpr int kCapacity = 16;
  const char* names[kCapacity];
  int64_t calls[kCapacity];
  py::dict result;
  const int count = bridge::kernel_calls(names, calls, kCapacity);
  for (int i = 0; i < count; ++i) result[names[i]] = calls[i];
  return result;
}

}  // namespace

void register_operators(py::module_& m) {
  m.def(
      "use_torch",
      [](const py::kwargs& given) {
        bridge::HostTorch& host = bridge::host_torch();
        host = {given["tensor_type"], given["parameter_type"], given["plain"],
                given["to_dlpack"],   given["from_dlpack"],    given["empty_strided"],
                given["contiguous"],  given["gemm"],           given["num_threads"]};
      },
      "What the operators of this module may call of torch: the fields of HostTorch, by name.");
  m.def("kernel_calls", &kernel_calls,
        "Calls of this module's operators by kernel, backward included.");
  m.def("set_borrowing_rows", [](const std::array<int64_t, 3>& rows) {
    for (size_t i = 0; i < rows.size(); ++i) set_borrowing_rows(kBorrowing[i], rows[i]);
  });
  m.def("borrowing_rows", [] {
    std::array<int64_t, 3> rows{};
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = borrowing_rows(kBorrowing[i]);
    return rows;
  });

  py::module_ ops =
      m.def_submodule("ops", "The operators, with the arguments of torch.ops.loraaccel.");
  const std::vector<double> none;
  const auto rank_dropouts = py::arg("rank_dropouts") = none;
  const auto adapter_ids = py::arg("adapter_ids") = OptionalTensor();
  const auto rank_factors = py::arg("rank_factors") = OptionalTensor();
  const auto packed = py::arg("packed") = OptionalTensor();
  const py::arg x("x"), weight("weight"), bias("bias"), lora_a("lora_A"), lora_b("lora_B"),
      scalings("scalings"), dropouts("dropouts"), seed("seed"), grad("grad"), hidden("hidden"),
      mask("output_mask"), weights("weights"), biases("biases"), has_bias("has_bias"),
      adapters("adapters"), base("base");
  ops.def("lora_linear", &operators::lora_linear_op, x, weight, bias, lora_a, lora_b, scalings,
          dropouts, seed, packed, rank_dropouts, adapter_ids, rank_factors);
  ops.def("lora_linear_backward", &operators::lora_linear_backward_op, grad, x, weight, lora_a,
          lora_b, hidden, scalings, dropouts, seed, mask, packed, rank_dropouts, adapter_ids,
          rank_factors);
  ops.def("pack_weight", &operators::pack_weight_op, weight, py::arg("for_input_gradient"));
  ops.def("lora_qkv", &operators::lora_qkv_op, x, weights, biases, has_bias, lora_a, lora_b,
          adapters, scalings, dropouts, seed, rank_dropouts, rank_factors);
  ops.def("lora_qkv_backward", &operators::lora_qkv_backward_op, py::arg("grads"),
          py::arg("has_grad"), x, weights, lora_a, lora_b, adapters, hidden, scalings, dropouts,
          seed, mask, rank_dropouts, rank_factors);
  ops.def("lora_mlp", &operators::lora_mlp_op, x, weights, biases, has_bias, lora_a, lora_b,
          adapters, scalings, dropouts, seed, py::arg("activation"));
  ops.def("lora_mlp_backward", &operators::lora_mlp_backward_op, grad, x, py::arg("inner"), weights,
          lora_a, lora_b, adapters, py::arg("hidden_inner"), py::arg("hidden_down"), scalings,
          dropouts, seed, py::arg("activation"), mask);
  ops.def("lora_delta", &operators::lora_delta_op, x, base, lora_a, lora_b, scalings, dropouts,
          seed, rank_dropouts, py::arg("output_dropout") = 0.0, adapter_ids, rank_factors);
  ops.def("lora_delta_backward", &operators::lora_delta_backward_op, grad, x, lora_a, lora_b,
          hidden, scalings, dropouts, seed, mask, rank_dropouts, py::arg("output_dropout") = 0.0,
          adapter_ids, rank_factors);
  ops.def("lora_expand", &operators::lora_expand_op, base, hidden, lora_b, py::arg("scaling"),
          py::arg("channels_first"));
  ops.def("lora_expand_backward", &operators::lora_expand_backward_op, grad, hidden, lora_b,
          py::arg("scaling"), py::arg("channels_first"), mask);
  ops.def("lora_conv2d", &operators::lora_conv2d_op, x, weight, bias, lora_a, lora_b,
          py::arg("scaling"), py::arg("stride"), py::arg("padding"), py::arg("dilation"));
  ops.def("weight_norms", &operators::weight_norms_op, weight, lora_a, lora_b, scalings);
  ops.def("column_gain", &operators::column_gain_op, py::arg("z"), py::arg("gain"), bias,
          py::arg("centred"));
  ops.def("column_gain_backward", &operators::column_gain_backward_op, grad, py::arg("z"),
          py::arg("gain"), bias, py::arg("centred"), mask);
  const py::arg target("target"), upstream("upstream"), reduction("reduction"),
      mean_of_kept("mean_of_kept");
  ops.def("bce_with_logits", &operators::bce_with_logits_op, py::arg("input"), target, weight,
          py::arg("pos_weight"), upstream, py::arg("label_smoothing"), py::arg("focal_gamma"),
          py::arg("ignore_index"), reduction, mean_of_kept, mask);
  ops.def("diffusion_loss", &operators::diffusion_loss_op, py::arg("pred"), target,
          py::arg("huber_c"), py::arg("factors"), py::arg("mask"), upstream, py::arg("loss_type"),
          reduction, mean_of_kept, mask);
  ops.def("snr_scale", &operators::snr_scale_op, py::arg("timesteps"), py::arg("table"),
          py::arg("min_snr_gamma"), py::arg("scale_v_pred_like_noise_pred"),
          py::arg("v_pred_like_loss"), py::arg("debiased_estimation"), py::arg("v_prediction"));
  ops.def("huber_threshold", &operators::huber_threshold_op, py::arg("timesteps"), py::arg("table"),
          py::arg("huber_c"));
  ops.def("area_resize", &operators::area_resize_op, py::arg("image"), py::arg("height"),
          py::arg("width"));
}

}  // namespace loraaccel::python
