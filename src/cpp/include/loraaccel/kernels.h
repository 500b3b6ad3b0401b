// What kernels exist, best first, and which of them this machine can run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "loraaccel/dtype.h"

namespace loraaccel {

struct KernelInfo {
  std::string op;      // "lora_linear"
  std::string name;    // "avx512", ... the last of each op is "ref"
  bool available;      // the CPU has the instructions, and the host what it must lend
  std::string reason;  // why not; empty where available
};

// In the order of choice within each op. The environment variable LORAACCEL_FORCE_KERNEL names the one to use
// for every op; a call that it cannot serve then fails with kKernelUnavailable.
// The kernels named `torch` are available where the host lends a GEMM, as torch does.
std::vector<KernelInfo> list_kernels(bool host_lends_gemm = false);

// Instruction sets of this CPU that the kernels know, e.g. {"sse4.2", "avx2", "fma", "f16c", "avx512"}.
std::vector<std::string> cpu_features();

// From how many rows of x on an operator borrows the host's GEMM for operands of this type, where there is one, instead of
// running a kernel of ours; INT64_MAX: never. The default is a model: matrix units (AMX) belong to the host from 17 rows
// on, all else is ours. set_borrowing_rows: what was measured on this machine, 1 or more; 0 and less bring the model back. It
// holds for the whole process, and not for kernels that LORAACCEL_FORCE_KERNEL names. float64 is always borrowed.
int64_t borrowing_rows(DType dtype);
void set_borrowing_rows(DType dtype, int64_t rows);

// A JSON object for bug reports: version, compiler, CPU features, kernels, threads.
std::string describe_json();

}  // namespace loraaccel
