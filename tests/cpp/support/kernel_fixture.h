// A test that runs once for each kernel of lora_linear's list, whatever this machine can run of it.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "support/lora_problem.h"

namespace loraaccel::test {

class LoraLinearKernels : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    kernel_ = find_kernel(GetParam());
    ASSERT_NE(kernel_, nullptr);
    if (const char* why = kernel_->unavailable(borrows(*kernel_))) {
      GTEST_SKIP() << kernel_->name << " cannot run here: " << why;
    }
  }

  // The host that this kernel needs. The vector kernels leave 16-bit operands to a GEMM where there is one.
  ExecContext context(TestHost* host, int num_threads = 1) const {
    return borrows(*kernel_) ? host->lending_context(num_threads) : host->context(num_threads);
  }

  // Declining is part of the contract, but only in these cases: a kernel that declines everything passes nothing.
  bool may_decline(const LoraCase& c) const {
    const std::string name = kernel_->name;
    if (name == "ref") return false;
    if (c.y != Layout::kDense || c.dw != Layout::kDense) return true;
    return c.dtype == DType::kFloat64 && name != "torch";
  }

  // A borrowed GEMM stores its product before the adapters are added; nothing else is rounded twice.
  bool rounds_partials() const { return borrows(*kernel_); }

  void check_forward(const LoraProblem& problem, int num_threads = 3) const {
    TestHost host;
    const ForwardRun run = problem.forward(context(&host, num_threads), kernel_->name);
    if (run.status.code() == StatusCode::kKernelUnavailable) {
      EXPECT_TRUE(may_decline(problem.spec())) << run.status.message();
      EXPECT_TRUE(run.y.untouched() && run.h.untouched());
      EXPECT_EQ(host.kernel_ran, nullptr);
    } else {
      EXPECT_STREQ(host.kernel_ran, kernel_->name);
      problem.expect_correct(run, rounds_partials());
    }
    expect_clean(problem, host);
  }

  void check_backward(const LoraProblem& problem, const Wanted& wanted = {},
                      int num_threads = 3) const {
    TestHost host;
    const BackwardRun run = problem.backward(context(&host, num_threads), kernel_->name, wanted);
    if (run.status.code() == StatusCode::kKernelUnavailable) {
      EXPECT_TRUE(may_decline(problem.spec())) << run.status.message();
      EXPECT_TRUE(run.dx.untouched() && run.dw.untouched() && run.dbias.untouched());
      EXPECT_EQ(host.kernel_ran, nullptr);
    } else {
      EXPECT_STREQ(host.kernel_ran, kernel_->name);
      problem.expect_correct(run, rounds_partials());
    }
    expect_clean(problem, host);
  }

  void check(const LoraCase& c) const {
    SCOPED_TRACE(describe(c));
    const LoraProblem problem(c);
    check_forward(problem);
    check_backward(problem);
  }

  const LoraLinearKernel* kernel_ = nullptr;

 private:
  static void expect_clean(const LoraProblem& problem, const TestHost& host) {
    problem.expect_inputs_untouched();
    EXPECT_EQ(host.live_bytes(), 0) << "scratch memory was kept";
    EXPECT_TRUE(host.blocks_intact()) << "written behind a scratch block";
  }
};

inline auto every_kernel() {
  std::vector<std::string> names;
  for (const LoraLinearKernel& kernel : lora_linear_kernels()) names.emplace_back(kernel.name);
  return ::testing::ValuesIn(names);
}

inline std::string kernel_test_name(const ::testing::TestParamInfo<std::string>& info) {
  return info.param;
}

}  // namespace loraaccel::test
