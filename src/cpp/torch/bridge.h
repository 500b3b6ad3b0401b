// Between torch and the core: tensors to views, torch's threads and GEMM to an ExecContext, a Status to an exception.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#include "loraaccel/exec_context.h"

namespace loraaccel::bridge {

using torch::stable::Tensor;

// Throws std::runtime_error with the status's text, its native stack included, unless it is ok.
void throw_if_error(const Status& status);
[[noreturn]] void fail(StatusCode code, const std::string& message);

// float32, float64, bfloat16 or float16; anything else throws, naming the operator and the argument.
DType dtype_of(const Tensor& tensor, const char* op, const char* name);
torch::headeronly::ScalarType scalar_type_of(DType dtype);

// Views keep the tensor's memory, not the tensor: it must outlive them.
TensorView matrix_view(const Tensor& tensor, const char* op, const char* name);
TensorView vector_view(const Tensor& tensor, const char* op, const char* name);

// [..., K] seen as [M, K]; a copy is made where the leading dimensions do not collapse into one stride.
struct RowsTensor {
  Tensor tensor;  // owns the memory that the view shows
  TensorView view;
};
RowsTensor rows_view(const Tensor& tensor, const char* op, const char* name);

// Uninitialised, dense, on the CPU.
Tensor empty(std::initializer_list<int64_t> shape, DType dtype);
Tensor empty_like_shape(const Tensor& tensor, int64_t last, DType dtype);
Tensor empty_bytes(int64_t count);  // uint8
Tensor empty_same(const Tensor& tensor, DType dtype);

// Torch's intra-op threads and GEMM, the core's allocator. `kernel_ran` receives the kernel's name.
ExecContext context(const char** kernel_ran);

// Adds one to the calls of this kernel; see loraaccel_torch_kernel_calls in runtime.cpp.
void count_kernel(const char* name);

}  // namespace loraaccel::bridge
