// Torch as the host: its tensors, threads and GEMM over the stable ABI.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "ops/bridge.h"

namespace loraaccel::bridge {
namespace {

using torch::headeronly::ScalarType;

// A tensor object over memory that somebody else owns, for the duration of one borrowed product.
class Borrowed {
 public:
  explicit Borrowed(const TensorView& v) {
    int32_t dtype = 0;
    switch (v.dtype) {
      case DType::kFloat64:
        dtype = aoti_torch_dtype_float64();
        break;
      case DType::kBFloat16:
        dtype = aoti_torch_dtype_bfloat16();
        break;
      case DType::kFloat16:
        dtype = aoti_torch_dtype_float16();
        break;
      case DType::kFloat32:
        dtype = aoti_torch_dtype_float32();
        break;
    }
    if (aoti_torch_create_tensor_from_blob(v.data, v.ndim, v.shape, v.stride, 0, dtype,
                                           aoti_torch_device_type_cpu(), 0,
                                           &handle_) != AOTI_TORCH_SUCCESS) {
      handle_ = nullptr;
    }
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  ~Borrowed() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  AtenTensorHandle get() const { return handle_; }

 private:
  AtenTensorHandle handle_ = nullptr;
};

Status lend_gemm(void*, const GemmArgs& args) {
  const Borrowed a(args.a);
  const Borrowed b(args.b);
  const Borrowed c(args.c);
  if (a.get() == nullptr || b.get() == nullptr || c.get() == nullptr) {
    return Status(StatusCode::kLenderFailed, "torch could not wrap an operand of a matrix product");
  }
  AOTITorchError error;
  if (args.bias.defined()) {
    const Borrowed bias(args.bias);
    if (bias.get() == nullptr)
      return Status(StatusCode::kLenderFailed, "torch could not wrap the bias");
    error = aoti_torch_cpu_addmm_out(c.get(), bias.get(), a.get(), b.get(), 1, args.alpha);
  } else if (args.beta == 0 && args.alpha == 1) {
    error = aoti_torch_cpu_mm_out(c.get(), a.get(), b.get());
  } else {
    error = aoti_torch_cpu_addmm_out(c.get(), c.get(), a.get(), b.get(), args.beta, args.alpha);
  }
  return error == AOTI_TORCH_SUCCESS
             ? Status()
             : Status(StatusCode::kLenderFailed,
                      "torch's matrix product failed, see its message on stderr");
}

struct Work {
  ParallelBody body;
  void* arg;
};

// The core asks for at most as many parts as the context has threads.
void lend_threads(void*, int64_t count, ParallelBody body, void* arg) {
  Work work{body, arg};
  const auto run = [](int64_t begin, int64_t end, void* data) {
    const auto& w = *static_cast<const Work*>(data);
    for (int64_t i = begin; i < end; ++i) w.body(w.arg, i);
  };
  // It fails where a body throws, which ours do not, or before any has begun.
  if (torch_parallel_for(0, count, 1, run, &work) != AOTI_TORCH_SUCCESS) run(0, count, &work);
}

Tensor empty_of(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                int32_t scalar) {
  AtenTensorHandle handle;
  if (aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                               scalar, aoti_torch_device_type_cpu(), 0,
                               &handle) != AOTI_TORCH_SUCCESS) {
    fail(StatusCode::kOutOfMemory, "operators: torch gave no memory for an output");
  }
  return Tensor(handle);
}

ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return ScalarType::Double;
    case DType::kBFloat16:
      return ScalarType::BFloat16;
    case DType::kFloat16:
      return ScalarType::Half;
    case DType::kFloat32:
      break;
  }
  return ScalarType::Float;
}

}  // namespace

DType dtype_of(const Tensor& tensor, const char* op, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      fail(StatusCode::kUnsupportedDtype, std::string(op) + ": " + name + " is " +
                                              torch::headeronly::toString(tensor.scalar_type()) +
                                              ", expected float32, float64, bfloat16 or float16");
  }
}

bool is_int64(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Long; }
bool is_byte(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Byte; }

Tensor dense_copy(const Tensor& tensor) { return torch::stable::contiguous(tensor); }

Tensor empty_strided(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                     DType dtype) {
  return empty_of(shape, strides, static_cast<int32_t>(scalar_type_of(dtype)));
}

Tensor empty_bytes(int64_t count) { return empty_of({count}, {1}, aoti_torch_dtype_uint8()); }

ExecContext context(const char** kernel_ran) {
  static const ExecContext own = default_context();  // for its allocator
  ExecContext ctx = own;
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  ctx.num_threads = static_cast<int>(threads);
  if (const int requested = requested_num_threads())
    ctx.num_threads = std::min(ctx.num_threads, requested);
  ctx.parallel = lend_threads;
  ctx.gemm = lend_gemm;
  ctx.kernel_ran = kernel_ran;
  return ctx;
}

}  // namespace loraaccel::bridge
