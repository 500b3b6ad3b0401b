// One call of lora_linear with everything that it needs, and the check of what it computed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lora/lora_linear_kernels.h"
#include "support/host.h"
#include "support/lora_oracle.h"
#include "support/operand.h"

namespace loraaccel::test {

struct AdapterCase {
  int64_t rank = 4;
  double dropout = 0;
  DType dtype = DType::kFloat32;
  double scale = 1.5;
  double hidden_dropout = 0;
  double rank_dropout = 0;
  bool given_factors = false;  // factors of the rank activations that the caller made
};

struct LoraCase {
  int64_t m = 5, k = 33, n = 17;
  DType dtype = DType::kFloat32;
  std::vector<AdapterCase> adapters = {AdapterCase{}};
  bool bias = true;
  // Of every input and every output; h stays dense. The adapters' operands have the layouts of x and y.
  Layout x = Layout::kDense, w = Layout::kDense;
  Layout y = Layout::kDense;                                  // y and dx
  Layout dw = Layout::kDense, adapters_out = Layout::kDense;  // dw, dbias; dA, dB
  uint64_t seed = 1;
  int64_t sample_rows = 1;
  std::vector<int64_t> sample_adapters = {};  // of each sample; empty: all have all
};
std::string describe(const LoraCase& c);

// Which gradients to ask for.
struct Wanted {
  bool dx = true, dw = true, dbias = true, da = true, db = true;
};

struct ForwardRun {
  Status status;
  Operand y, h;
};

struct BackwardRun {
  Status status;
  Operand dx, dw, dbias;
  std::vector<Operand> da, db;
};

class LoraProblem {
 public:
  explicit LoraProblem(const LoraCase& c);

  // Calls the operator; `kernel` is put into LORAACCEL_FORCE_KERNEL unless it is null.
  ForwardRun forward(const ExecContext& ctx, const char* kernel = nullptr) const;
  BackwardRun backward(const ExecContext& ctx, const char* kernel = nullptr,
                       const Wanted& wanted = {}) const;

  // Arguments with outputs of the caller's; `views` keeps what the spans point to.
  struct Views {
    std::vector<LoraAdapter> adapters;
    std::vector<TensorView> da, db;
  };
  LoraLinearArgs forward_args(const ForwardRun& run, Views* views) const;
  LoraLinearBackwardArgs backward_args(const BackwardRun& run, Views* views) const;
  ForwardRun forward_outputs() const;
  BackwardRun backward_outputs(const Wanted& wanted) const;

  // Expectations of GoogleTest. `rounds_partials`: the kernel stores 16-bit partial results (see tolerance.h).
  void expect_correct(const ForwardRun& run, bool rounds_partials) const;
  void expect_correct(const BackwardRun& run, bool rounds_partials) const;
  void expect_inputs_untouched() const;

  const LoraCase& spec() const { return case_; }

 private:
  std::vector<LoraAdapter> adapters() const;
  LoraSamples samples() const;

  LoraCase case_;
  DType sums_;
  Operand x_, w_, bias_, dy_, h_;
  std::vector<Operand> a_, b_;
  std::vector<Operand> factors_;  // of each adapter; empty where it has none given
  OracleLayer layer_;
  OracleForward forward_;
  OracleBackward backward_;
};

// Every number within its bound, as an expectation of GoogleTest: a NaN or a number out of bounds fails, and the message
// names the first one. Nothing where `got` was not asked for.
void expect_close(const char* name, const Operand& got, const ExactMatrix& exact, Pass pass,
                  DType sums, bool rounds_partials);

// "portable" ... a kernel by name; null where the list has none.
const LoraLinearKernel* find_kernel(const std::string& name);
// True for the kernel that borrows the host's GEMM.
bool borrows(const LoraLinearKernel& kernel);

}  // namespace loraaccel::test
