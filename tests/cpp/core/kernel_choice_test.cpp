#include "kernel_choice.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "loraaccel/kernels.h"
#include "support/env.h"
#include "support/lora_problem.h"

namespace loraaccel::test {
namespace {

struct FakeKernel {
  const char* name;
  const char* why_not;
};

class KernelChoice : public ::testing::Test {
 protected:
  Status choose(std::vector<FakeKernel> kernels) {
    kernels_ = std::move(kernels);
    ExecContext ctx;
    ctx.kernel_ran = &ran_;
    Status status;
    chosen_ = choose_kernel<FakeKernel>(
        "op", kernels_, ctx, [](const FakeKernel& k) { return k.why_not; }, &status);
    EXPECT_EQ(chosen_ != nullptr, status.ok()) << status.message();
    return status;
  }

  std::vector<FakeKernel> kernels_;
  const FakeKernel* chosen_ = nullptr;
  const char* ran_ = nullptr;
};

TEST_F(KernelChoice, FirstThatAccepts) {
  const ScopedEnv env("LORAACCEL_FORCE_KERNEL", nullptr);
  ASSERT_TRUE(choose({{"fast", "too small"}, {"middle", nullptr}, {"ref", nullptr}}).ok());
  EXPECT_STREQ(chosen_->name, "middle");
  EXPECT_STREQ(ran_, "middle");
}

TEST_F(KernelChoice, AutoAndEmptyForceNothing) {
  for (const char* value : {"", "auto"}) {
    const ScopedEnv env("LORAACCEL_FORCE_KERNEL", value);
    EXPECT_EQ(forced_kernel(), nullptr);
    ASSERT_TRUE(choose({{"fast", nullptr}, {"ref", nullptr}}).ok());
    EXPECT_STREQ(chosen_->name, "fast");
  }
}

TEST_F(KernelChoice, ForcedOneRunsAlthoughOthersAreBetter) {
  const ScopedEnv env("LORAACCEL_FORCE_KERNEL", "ref");
  ASSERT_TRUE(choose({{"fast", nullptr}, {"ref", nullptr}}).ok());
  EXPECT_STREQ(chosen_->name, "ref");
}

TEST_F(KernelChoice, ForcedOneThatDeclinesIsNotReplaced) {
  const ScopedEnv env("LORAACCEL_FORCE_KERNEL", "fast");
  const Status status = choose({{"fast", "the moon is full"}, {"ref", nullptr}});
  EXPECT_EQ(status.code(), StatusCode::kKernelUnavailable);
  EXPECT_NE(status.message().find("fast"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("the moon is full"), std::string::npos) << status.message();
  EXPECT_EQ(ran_, nullptr);
}

TEST_F(KernelChoice, UnknownNameListsTheKnownOnes) {
  const ScopedEnv env("LORAACCEL_FORCE_KERNEL", "fats");
  const Status status = choose({{"fast", nullptr}, {"ref", nullptr}});
  EXPECT_EQ(status.code(), StatusCode::kKernelUnavailable);
  EXPECT_NE(status.message().find("LORAACCEL_FORCE_KERNEL=fats"), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("fast, ref"), std::string::npos) << status.message();
}

TEST_F(KernelChoice, NobodyAccepts) {
  const ScopedEnv env("LORAACCEL_FORCE_KERNEL", nullptr);
  EXPECT_EQ(choose({{"fast", "no"}, {"ref", "no"}}).code(), StatusCode::kInternal);
}

TEST_F(KernelChoice, NoKernelsForTheDevice) {
  EXPECT_EQ(choose({}).code(), StatusCode::kUnsupportedDevice);
}

// ---- the list of lora_linear ----

TEST(LoraLinearChoice, EveryAvailableKernelRunsWhenForced) {
  const LoraProblem problem({});
  int ran = 0;
  for (const LoraLinearKernel& kernel : lora_linear_kernels()) {
    TestHost host;
    const ExecContext ctx = borrows(kernel) ? host.lending_context() : host.context();
    if (kernel.unavailable(borrows(kernel)) != nullptr) {
      EXPECT_EQ(problem.forward(ctx, kernel.name).status.code(), StatusCode::kKernelUnavailable);
      continue;
    }
    EXPECT_TRUE(problem.forward(ctx, kernel.name).status.ok());
    EXPECT_STREQ(host.kernel_ran, kernel.name);
    host.kernel_ran = nullptr;
    EXPECT_TRUE(problem.backward(ctx, kernel.name).status.ok());
    EXPECT_STREQ(host.kernel_ran, kernel.name);
    ++ran;
  }
  EXPECT_GE(ran, 3) << "torch, portable and ref run everywhere";
}

TEST(LoraLinearChoice, MatrixUnitsAreTheHosts) {
  CpuFeatures features;
  EXPECT_EQ(modelled_borrowing_rows(features, DType::kBFloat16), INT64_MAX);
  features.amx_bf16 = true;
  EXPECT_EQ(modelled_borrowing_rows(features, DType::kBFloat16), 17);
  EXPECT_EQ(modelled_borrowing_rows(features, DType::kFloat16), INT64_MAX);
  EXPECT_EQ(modelled_borrowing_rows(features, DType::kFloat32), INT64_MAX);
  features.amx_fp16 = true;
  EXPECT_EQ(modelled_borrowing_rows(features, DType::kFloat16), 17);
}

TEST(LoraLinearChoice, MeasuredRowsDecide) {
  LoraCase c;
  const LoraProblem problem(c);
  TestHost host;
  const int64_t model = borrowing_rows(c.dtype);
  const auto ran = [&](int64_t rows, const ExecContext& ctx) {
    set_borrowing_rows(c.dtype, rows);
    host.kernel_ran = nullptr;
    EXPECT_TRUE(problem.forward(ctx, "").status.ok());
    const std::string forward = host.kernel_ran;
    EXPECT_TRUE(problem.backward(ctx, "").status.ok());
    EXPECT_EQ(host.kernel_ran, forward);
    set_borrowing_rows(c.dtype, 0);
    EXPECT_EQ(borrowing_rows(c.dtype), model);
    return forward;
  };
  EXPECT_EQ(ran(1, host.lending_context()), "torch");
  EXPECT_EQ(ran(c.m, host.lending_context()), "torch");
  // Of ours, the portable one is no match for any GEMM and stands after torch in the list.
  const bool vectors = ran(1, host.context()) != "portable";
  EXPECT_EQ(ran(c.m + 1, host.lending_context()) == "torch", !vectors);
  EXPECT_EQ(ran(INT64_MAX, host.lending_context()) == "torch", !vectors);
  EXPECT_NE(ran(1, host.context()), "torch") << "nothing to borrow";
}

void expect_unavailable(const Status& status, const char* forced, const std::string& reason) {
  EXPECT_EQ(status.code(), StatusCode::kKernelUnavailable);
  EXPECT_NE(status.message().find(std::string("LORAACCEL_FORCE_KERNEL=") + forced),
            std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find(reason), std::string::npos) << status.message();
}

TEST(LoraLinearChoice, UnknownNameTouchesNothing) {
  const LoraProblem problem({});
  TestHost host;
  const ForwardRun forward = problem.forward(host.lending_context(), "tensorcore");
  expect_unavailable(forward.status, "tensorcore",
                     "avx512_bf16, avx512, avx2, neon_bf16, neon, torch, portable, ref");
  EXPECT_TRUE(forward.y.untouched() && forward.h.untouched());
  const BackwardRun backward = problem.backward(host.lending_context(), "tensorcore");
  expect_unavailable(backward.status, "tensorcore", "portable");
  EXPECT_TRUE(backward.dx.untouched() && backward.dw.untouched() && backward.da[0].untouched());
  EXPECT_EQ(host.kernel_ran, nullptr);
  EXPECT_EQ(host.num_allocations(), 0);
}

TEST(LoraLinearChoice, DeclinedCallsSayWhy) {
  TestHost host;
  LoraCase c;
  expect_unavailable(LoraProblem(c).forward(host.context(), "torch").status, "torch",
                     "lends no GEMM");
  c.y = Layout::kStepped;
  const LoraProblem stepped(c);
  const ForwardRun forward = stepped.forward(host.context(), "portable");
  expect_unavailable(forward.status, "portable", "columns of an output");
  EXPECT_TRUE(forward.y.untouched() && forward.h.untouched());
  const BackwardRun backward = stepped.backward(host.context(), "portable");
  expect_unavailable(backward.status, "portable", "columns of an output");
  EXPECT_TRUE(backward.dx.untouched() && backward.db[0].untouched());
  c = {};
  c.dtype = DType::kFloat64;
  c.adapters[0].dtype = DType::kFloat64;
  expect_unavailable(LoraProblem(c).forward(host.context(), "portable").status, "portable",
                     "float64");
}

// Where nothing is forced every call finds a kernel, with or without a GEMM to borrow.
TEST(LoraLinearChoice, EveryValidCallIsServed) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    for (const Layout layout : kOutputLayouts) {
      for (const int64_t m : {1, 60}) {
        LoraCase c;
        c.m = m;
        c.dtype = c.adapters[0].dtype = dtype;
        c.y = layout;
        const LoraProblem problem(c);
        TestHost host;
        for (const ExecContext& ctx : {host.context(), host.lending_context()}) {
          problem.expect_correct(problem.forward(ctx), true);
          problem.expect_correct(problem.backward(ctx), true);
        }
      }
    }
  }
}

}  // namespace
}  // namespace loraaccel::test
