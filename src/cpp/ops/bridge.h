// Between a host's tensors and the core: tensors to views, a Status to an exception. The host is what host_tensor.h of
// the build says: torch's stable ABI (torch/), or tensors of any torch that Python hands over by DLPack (python/).
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "host_tensor.h"
#include "loraaccel/exec_context.h"

namespace loraaccel::bridge {

// ---- of the host, in its host.cpp ----

// The element type; throws where it is none of ours, naming the operator and the argument.
DType dtype_of(const Tensor& tensor, const char* op, const char* name);
bool is_int64(const Tensor& tensor);
bool is_byte(const Tensor& tensor);
// A dense copy.
Tensor dense_copy(const Tensor& tensor);
// Uninitialised, on the CPU.
Tensor empty_strided(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                     DType dtype);
Tensor empty_bytes(int64_t count);  // uint8
// The host's threads, its GEMM, the core's allocator. `kernel_ran` receives the kernel's name.
ExecContext context(const char** kernel_ran);

// ---- of every host ----

// Throws std::runtime_error with the status's text, its native stack included, unless it is ok.
void throw_if_error(const Status& status);
[[noreturn]] void fail(StatusCode code, const std::string& message);
// "[2, 3]"
std::string shape_text(const Tensor& tensor);

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
Tensor empty(const std::vector<int64_t>& shape, DType dtype);
Tensor empty_like_shape(const Tensor& tensor, int64_t last, DType dtype);
Tensor empty_same(const Tensor& tensor, DType dtype);

// Adds one to the calls of this kernel.
void count_kernel(const char* name);
// Fills names[i] and calls[i] for the kernels that ran in operators of this process; returns how many there are.
int kernel_calls(const char** names, int64_t* calls, int capacity);

// Calls body(context), a function of the core, while the host may do other things; counts its kernel, throws its error.
template <typename Body>
void run(const Body& body) {
  const char* kernel = nullptr;
  const ExecContext ctx = context(&kernel);
  Status status;
  {
    [[maybe_unused]] const Unlocked unlocked;
    status = body(ctx);
  }
  throw_if_error(status);
  if (kernel != nullptr) count_kernel(kernel);
}

}  // namespace loraaccel::bridge
