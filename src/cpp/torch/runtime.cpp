// What the Python package asks of this library outside the operators: C functions, no torch types.
#include "loraaccel/export.h"
#include "loraaccel/kernels.h"
#include "ops/bridge.h"

extern "C" {

// Fills names[i] and calls[i] for the kernels that ran in operators of this process; returns how many there are.
LORAACCEL_API int loraaccel_torch_kernel_calls(const char** names, int64_t* calls, int capacity) {
  return loraaccel::bridge::kernel_calls(names, calls, capacity);
}

// From how many rows on torch's GEMM is borrowed, for types in the order float32, bfloat16, float16. 0 stands for the
// model, INT64_MAX for never; see set_borrowing_rows in loraaccel/kernels.h.
LORAACCEL_API void loraaccel_torch_set_borrowing_rows(const int64_t* rows) {
  loraaccel::set_borrowing_rows(loraaccel::DType::kFloat32, rows[0]);
  loraaccel::set_borrowing_rows(loraaccel::DType::kBFloat16, rows[1]);
  loraaccel::set_borrowing_rows(loraaccel::DType::kFloat16, rows[2]);
}

LORAACCEL_API void loraaccel_torch_borrowing_rows(int64_t* rows) {
  rows[0] = loraaccel::borrowing_rows(loraaccel::DType::kFloat32);
  rows[1] = loraaccel::borrowing_rows(loraaccel::DType::kBFloat16);
  rows[2] = loraaccel::borrowing_rows(loraaccel::DType::kFloat16);
}

// At most this many of torch's threads for the operators; 0: as many as torch has.
LORAACCEL_API void loraaccel_torch_set_num_threads(int num_threads) {
  loraaccel::set_num_threads(num_threads);
}

}  // extern "C"
