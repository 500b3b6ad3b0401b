// Norms of adapted weights, and a gain for each output: schemas and CPU implementations.
#include "loraaccel/dora.h"

#include <vector>

#include "bridge.h"
#include "ops/adapters.h"

namespace loraaccel {
namespace {

using bridge::OptionalTensor;
using bridge::RowsTensor;
using bridge::Tensor;

Tensor weight_norms_op(const OptionalTensor& weight, const std::vector<Tensor>& lora_a,
                       const std::vector<Tensor>& lora_b, const std::vector<double>& scalings) {
  constexpr const char* kOp = "weight_norms";
  const std::vector<double> none(lora_a.size(), 0);
  const std::vector<LoraAdapter> adapters =
      bridge::adapters_of(kOp, lora_a, lora_b, scalings, {none, {}, {}});
  WeightNormsArgs args;
  if (weight.has_value()) args.w = bridge::matrix_view(*weight, kOp, "weight");
  args.adapters = adapters;
  const bool some = !adapters.empty();
  Tensor norms = bridge::empty({some ? adapters[0].b.rows() : 0},
                               bridge::sum_type(some ? adapters[0].a.dtype : DType::kFloat32));
  args.norms = bridge::vector_view(norms, kOp, "norms");
  const char* kernel = nullptr;
  bridge::throw_if_error(weight_norms(bridge::context(&kernel), args));
  bridge::count_kernel(kernel);
  return norms;
}

Tensor gain_op(const Tensor& z, const Tensor& gain, const OptionalTensor& bias, bool centred) {
  constexpr const char* kOp = "column_gain";
  const RowsTensor rows = bridge::rows_view(z, kOp, "z");
  ColumnGainArgs args;
  args.z = rows.view;
  args.gain = bridge::vector_view(gain, kOp, "gain");
  if (bias.has_value()) args.bias = bridge::vector_view(*bias, kOp, "bias");
  args.centred = centred;
  Tensor y = bridge::empty_same(z, args.z.dtype);
  args.y = TensorView::matrix(y.data_ptr(), args.z.dtype, args.z.rows(), args.z.cols());
  const char* kernel = nullptr;
  bridge::throw_if_error(column_gain_forward(bridge::context(&kernel), args));
  bridge::count_kernel(kernel);
  return y;
}

std::vector<Tensor> gain_backward_op(const Tensor& grad, const Tensor& z, const Tensor& gain,
                                     const OptionalTensor& bias, bool centred,
                                     const std::vector<bool>& output_mask) {
  constexpr const char* kOp = "column_gain_backward";
  if (output_mask.size() != 3) {
    bridge::fail(StatusCode::kInvalidArgument, std::string(kOp) + ": output_mask has " +
                                                   std::to_string(output_mask.size()) +
                                                   " entries, expected 3 (z, gain, bias)");
  }
  const RowsTensor z_rows = bridge::rows_view(z, kOp, "z");
  const RowsTensor grad_rows = bridge::rows_view(grad, kOp, "grad");
  ColumnGainBackwardArgs args;
  args.dy = grad_rows.view;
  args.z = z_rows.view;
  args.gain = bridge::vector_view(gain, kOp, "gain");
  if (bias.has_value()) args.bias = bridge::vector_view(*bias, kOp, "bias");
  args.centred = centred;
  std::vector<Tensor> outputs;
  if (output_mask[0]) {
    outputs.push_back(bridge::empty_same(z, args.z.dtype));
    args.dz =
        TensorView::matrix(outputs.back().data_ptr(), args.z.dtype, args.z.rows(), args.z.cols());
  }
  if (output_mask[1]) {
    outputs.push_back(bridge::empty({args.gain.rows()}, args.gain.dtype));
    args.dgain = bridge::vector_view(outputs.back(), kOp, "grad_gain");
  }
  if (output_mask[2]) {
    outputs.push_back(bridge::empty({args.gain.rows()}, args.z.dtype));
    args.dbias = bridge::vector_view(outputs.back(), kOp, "grad_bias");
  }
  const char* kernel = nullptr;
  bridge::throw_if_error(column_gain_backward(bridge::context(&kernel), args));
  bridge::count_kernel(kernel);
  return outputs;
}

}  // namespace
}  // namespace loraaccel

STABLE_TORCH_LIBRARY_FRAGMENT(loraaccel, m) {
  // Norms of the rows of weight + the sum of scaling B A, [N]; without a weight of that sum alone.
  m.def(
      "weight_norms(Tensor? weight, Tensor[] lora_A, Tensor[] lora_B, float[] scalings) -> Tensor");
  // gain z + bias, or, centred, z + (gain - 1) (z - bias); gain and bias [N], z [..., N].
  m.def("column_gain(Tensor z, Tensor gain, Tensor? bias, bool centred) -> Tensor");
  // Returns the gradients that output_mask asks for: z, gain, bias.
  m.def(
      "column_gain_backward(Tensor grad, Tensor z, Tensor gain, Tensor? bias, bool centred, "
      "bool[] output_mask) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(loraaccel, CPU, m) {
  m.impl("weight_norms", TORCH_BOX(&loraaccel::weight_norms_op));
  m.impl("column_gain", TORCH_BOX(&loraaccel::gain_op));
  m.impl("column_gain_backward", TORCH_BOX(&loraaccel::gain_backward_op));
}
