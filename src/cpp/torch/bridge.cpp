#include "bridge.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <stdexcept>

namespace loraaccel::bridge {
namespace {

using torch::headeronly::ScalarType;

std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(t.size(i));
  return text + "]";
}

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

}  // namespace

void fail(StatusCode code, const std::string& message) {
  throw std::runtime_error("loraaccel::" + Status(code, message).to_string());
}

void throw_if_error(const Status& status) {
  if (!status.ok()) throw std::runtime_error("loraaccel::" + status.to_string());
}

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

TensorView matrix_view(const Tensor& tensor, const char* op, const char* name) {
  if (tensor.dim() != 2) {
    fail(StatusCode::kShapeMismatch, std::string(op) + ": " + name + " has shape " +
                                         shape_text(tensor) + ", expected two dimensions");
  }
  const auto strides = tensor.strides();
  return TensorView::strided(tensor.data_ptr(), dtype_of(tensor, op, name), tensor.size(0),
                             tensor.size(1), strides[0], strides[1]);
}

TensorView vector_view(const Tensor& tensor, const char* op, const char* name) {
  if (tensor.dim() != 1) {
    fail(StatusCode::kShapeMismatch, std::string(op) + ": " + name + " has shape " +
                                         shape_text(tensor) + ", expected one dimension");
  }
  return TensorView::vector(tensor.data_ptr(), dtype_of(tensor, op, name), tensor.size(0),
                            tensor.strides()[0]);
}

RowsTensor rows_view(const Tensor& tensor, const char* op, const char* name) {
  const int64_t ndim = tensor.dim();
  if (ndim == 0) {
    fail(StatusCode::kShapeMismatch,
         std::string(op) + ": " + name + " has no dimensions, expected [..., K]");
  }
  const DType dtype = dtype_of(tensor, op, name);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  int64_t rows = 1;
  int64_t row_stride = 0;  // of the innermost leading dimension that is longer than 1
  bool collapses = true;
  for (int64_t i = ndim - 2; i >= 0; --i) {
    if (sizes[i] != 1) {
      if (rows == 1) {
        row_stride = strides[i];
      } else {
        collapses = collapses && strides[i] == row_stride * rows;
      }
    }
    rows *= sizes[i];
  }
  const int64_t cols = sizes[ndim - 1];
  if (collapses || rows * cols == 0) {
    return {tensor, TensorView::strided(tensor.data_ptr(), dtype, rows, cols,
                                        rows > 1 ? row_stride : cols, strides[ndim - 1])};
  }
  Tensor copy = torch::stable::contiguous(tensor);
  const TensorView view = TensorView::matrix(copy.data_ptr(), dtype, rows, cols);
  return {std::move(copy), view};
}

namespace {

// An output this large is fresh from the kernel each time (malloc gives such blocks back), and writing to it faults once
// per page: a sixth of the time of a layer of 4096 x 2304 floats. Only whole huge pages inside the tensor are asked for,
// so that no memory is used beyond it; where the system has none the advice does nothing.
void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#ifdef __linux__
  constexpr int64_t kLarge = 16 << 20;
  constexpr uintptr_t kHuge = 2 << 20;
  if (bytes < kLarge) return;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const auto end =
      (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
  if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

Tensor empty_strided(const int64_t* shape, int64_t ndim, int32_t scalar, int64_t element_bytes) {
  std::vector<int64_t> strides(static_cast<size_t>(ndim));
  int64_t step = 1;
  for (int64_t i = ndim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= std::max<int64_t>(shape[i], 1);
  }
  AtenTensorHandle handle;
  if (aoti_torch_empty_strided(ndim, shape, strides.data(), scalar, aoti_torch_device_type_cpu(), 0,
                               &handle) != AOTI_TORCH_SUCCESS) {
    fail(StatusCode::kOutOfMemory, "lora_linear: torch gave no memory for an output");
  }
  Tensor tensor(handle);
  advise_huge_pages(tensor.data_ptr(), step * element_bytes);
  return tensor;
}

Tensor empty_strided(const int64_t* shape, int64_t ndim, DType dtype) {
  return empty_strided(shape, ndim, static_cast<int32_t>(scalar_type_of(dtype)),
                       static_cast<int64_t>(dtype_size_bytes(dtype)));
}

}  // namespace

Tensor empty(std::initializer_list<int64_t> shape, DType dtype) {
  return empty_strided(shape.begin(), static_cast<int64_t>(shape.size()), dtype);
}

Tensor empty_like_shape(const Tensor& tensor, int64_t last, DType dtype) {
  const auto sizes = tensor.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = last;
  return empty_strided(shape.data(), static_cast<int64_t>(shape.size()), dtype);
}

Tensor empty_bytes(int64_t count) { return empty_strided(&count, 1, aoti_torch_dtype_uint8(), 1); }

Tensor empty_same(const Tensor& tensor, DType dtype) {
  const auto sizes = tensor.sizes();
  return empty_strided(sizes.data(), static_cast<int64_t>(sizes.size()), dtype);
}

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
