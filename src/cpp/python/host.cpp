// Any torch as the host: tensors by DLPack, threads of the core's own pool, and torch's GEMM by a call of Python.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>

#include "ops/bridge.h"

namespace py = pybind11;

namespace loraaccel::bridge {
namespace {

constexpr dlpack::DataType kTypes[] = {{dlpack::kFloat, 32, 1},
                                       {dlpack::kFloat, 64, 1},
                                       {dlpack::kBFloat, 16, 1},
                                       {dlpack::kFloat, 16, 1}};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};
constexpr int kByte = 4;  // in the list of loraaccel._pointers, after the four above

int index_of(DType dtype) {
  return static_cast<int>(std::find(std::begin(kDTypes), std::end(kDTypes), dtype) - kDTypes);
}

// A capsule over memory that somebody else owns, for the duration of one borrowed product.
py::object lent(const TensorView& v) {
  struct Owned {
    dlpack::ManagedTensor managed;
    int64_t shape[2];
    int64_t strides[2];
  };
  auto owned = std::make_unique<Owned>();
  for (int i = 0; i < v.ndim; ++i) {
    owned->shape[i] = v.shape[i];
    owned->strides[i] = v.stride[i];
  }
  owned->managed = {
      {v.data, dlpack::kCPU, 0, v.ndim, kTypes[index_of(v.dtype)], owned->shape, owned->strides, 0},
      owned.get(),
      [](dlpack::ManagedTensor* self) { delete static_cast<Owned*>(self->context); }};
  dlpack::ManagedTensor* const made = &owned.release()->managed;
  PyObject* capsule = PyCapsule_New(made, dlpack::kCapsule, [](PyObject* given) {
    if (!PyCapsule_IsValid(given, dlpack::kCapsule)) return;  // taken: its new owner deletes it
    auto* managed =
        static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(given, dlpack::kCapsule));
    managed->deleter(managed);
  });
  if (capsule == nullptr) {
    made->deleter(made);
    throw py::error_already_set();
  }
  return host_torch().from_dlpack(py::reinterpret_steal<py::object>(capsule));
}

Status lend_gemm(void*, const GemmArgs& args) {
  const py::gil_scoped_acquire locked;
  try {
    const py::object bias = args.bias.defined() ? lent(args.bias) : py::none();
    host_torch().gemm(lent(args.a), lent(args.b), lent(args.c), bias, args.alpha, args.beta);
  } catch (const py::error_already_set& error) {
    return Status(StatusCode::kLenderFailed,
                  std::string("torch's matrix product failed: ") + error.what());
  }
  return Status();
}

}  // namespace

HostTorch& host_torch() {
  static auto* host = new HostTorch();  // never destroyed: the interpreter ends before it
  return *host;
}

Tensor::Tensor(py::object owner) : owner_(std::move(owner)) {
  const HostTorch& host = host_torch();
  if (!host.plain)
    throw std::runtime_error("loraaccel: the operators of _core were given no torch");
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(owner_.ptr()));
  const bool exact = type == host.tensor_type.ptr() || type == host.parameter_type.ptr();
  // (DLPack shows a lazily negated tensor without its sign.)
  if (!exact || owner_.attr("is_neg")().ptr() != Py_False) owner_ = host.plain(owner_);
  const py::object capsule = host.to_dlpack(owner_);
  const auto* managed = static_cast<const dlpack::ManagedTensor*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
  if (managed == nullptr) throw py::error_already_set();
  const dlpack::Tensor& t = managed->tensor;
  if (t.device_type != dlpack::kCPU)
    throw py::value_error("loraaccel: a tensor is on another device than the CPU");
  data_ = static_cast<char*>(t.data) + t.byte_offset;
  type_ = t.dtype;
  sizes_.assign(t.shape, t.shape + t.ndim);
  if (t.strides != nullptr) {
    strides_.assign(t.strides, t.strides + t.ndim);
    return;
  }
  strides_.resize(sizes_.size());
  int64_t step = 1;
  for (size_t i = sizes_.size(); i-- > 0;) {
    strides_[i] = step;
    step *= std::max<int64_t>(sizes_[i], 1);
  }
}

int64_t Tensor::numel() const {
  int64_t count = 1;
  for (const int64_t n : sizes_) count *= n;
  return count;
}

bool Tensor::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t step = 1;
  for (size_t i = sizes_.size(); i-- > 0;) {
    if (sizes_[i] != 1 && strides_[i] != step) return false;
    step *= sizes_[i];
  }
  return true;
}

DType dtype_of(const Tensor& tensor, const char* op, const char* name) {
  for (size_t i = 0; i < std::size(kTypes); ++i) {
    if (tensor.type() == kTypes[i]) return kDTypes[i];
  }
  const auto text = py::str(tensor.owner().attr("dtype")).cast<std::string>();
  fail(StatusCode::kUnsupportedDtype, std::string(op) + ": " + name + " is " + text +
                                          ", expected float32, float64, bfloat16 or float16");
}

bool is_int64(const Tensor& tensor) {
  return tensor.type() == dlpack::DataType{dlpack::kInt, 64, 1};
}
bool is_byte(const Tensor& tensor) {
  return tensor.type() == dlpack::DataType{dlpack::kUInt, 8, 1};
}

Tensor dense_copy(const Tensor& tensor) { return Tensor(host_torch().contiguous(tensor.owner())); }

Tensor empty_strided(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                     DType dtype) {
  return Tensor(host_torch().empty_strided(py::tuple(py::cast(shape)), py::tuple(py::cast(strides)),
                                           index_of(dtype)));
}

Tensor empty_bytes(int64_t count) {
  return Tensor(host_torch().empty_strided(py::make_tuple(count), py::make_tuple(1), kByte));
}

ExecContext context(const char** kernel_ran) {
  ExecContext ctx = default_context();
  ctx.num_threads = std::max(1, host_torch().num_threads().cast<int>());
  if (const int requested = requested_num_threads())
    ctx.num_threads = std::min(ctx.num_threads, requested);
  ctx.gemm = lend_gemm;
  ctx.kernel_ran = kernel_ran;
  return ctx;
}

}  // namespace loraaccel::bridge
