// The tensor of ops/, where Python hands over tensors of a torch of whatever version: what DLPack says of it, and the
// Python object that owns the memory. Nothing of torch is linked; host_torch() names the few functions of it that are
// called, and is filled in by loraaccel._pointers.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "dlpack.h"

namespace loraaccel::bridge {

struct HostTorch {
  pybind11::object tensor_type;     // torch.Tensor
  pybind11::object parameter_type;  // torch.nn.Parameter
  pybind11::object plain;           // anything -> a tensor whose memory is what it says, or raises
  pybind11::object to_dlpack;       // tensor -> capsule
  pybind11::object from_dlpack;     // capsule -> tensor
  pybind11::object empty_strided;   // (shape, stride, dtype's index) -> tensor
  pybind11::object contiguous;      // tensor -> dense tensor
  pybind11::object gemm;            // (a, b, c, bias or None, alpha, beta): writes c
  pybind11::object num_threads;     // () -> int
};
HostTorch& host_torch();

// Needs the interpreter's lock wherever it is made, copied or destroyed.
class Tensor {
 public:
  Tensor() = default;
  // Raises what HostTorch::plain and to_dlpack raise for what is no plain tensor on the CPU.
  explicit Tensor(pybind11::object owner);

  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t size(int64_t i) const { return sizes_[static_cast<size_t>(i)]; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  const std::vector<int64_t>& strides() const { return strides_; }
  int64_t numel() const;
  bool is_contiguous() const;
  bool is_cpu() const { return true; }
  void* data_ptr() const { return data_; }
  dlpack::DataType type() const { return type_; }
  const pybind11::object& owner() const { return owner_; }

 private:
  pybind11::object owner_;
  void* data_ = nullptr;
  dlpack::DataType type_{};
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
};

// Other Python threads run while the core computes.
using Unlocked = pybind11::gil_scoped_release;

}  // namespace loraaccel::bridge

namespace pybind11::detail {

template <>
struct type_caster<loraaccel::bridge::Tensor> {
  PYBIND11_TYPE_CASTER(loraaccel::bridge::Tensor, const_name("torch.Tensor"));

  bool load(handle source, bool) {
    if (!source || source.is_none()) return false;
    value = loraaccel::bridge::Tensor(reinterpret_borrow<object>(source));
    return true;
  }
  static handle cast(const loraaccel::bridge::Tensor& t, return_value_policy, handle) {
    return object(t.owner()).release();
  }
};

}  // namespace pybind11::detail
