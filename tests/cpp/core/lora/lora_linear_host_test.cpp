// What the operator does with what its host lends: threads, memory, a GEMM.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "support/env.h"
#include "support/kernel_fixture.h"

namespace loraaccel::test {
namespace {

// Many rows and every kind of scratch: copies of strided operands, masks, panels.
LoraCase demanding_case(DType dtype) {
  LoraCase c;
  c.dtype = dtype;
  c.m = 150;
  c.k = 130;
  c.n = 70;
  c.x = Layout::kStepped;
  c.w = Layout::kTransposed;
  c.adapters = {{5, 0, dtype, 2.0}, {9, 0.3, dtype, -1.0}, {2, 0.5, dtype, 0.5}};
  return c;
}

std::vector<char> gradient_bytes(const BackwardRun& run) {
  std::vector<char> all;
  const auto append = [&](const Operand& o) {
    const std::vector<char> bytes = o.element_bytes();
    all.insert(all.end(), bytes.begin(), bytes.end());
  };
  append(run.dx);
  append(run.dw);
  append(run.dbias);
  for (const Operand& o : run.da) append(o);
  for (const Operand& o : run.db) append(o);
  return all;
}

class LoraLinearHost : public LoraLinearKernels {
 protected:
  // float64 goes to the kernels that take it; the others are tried with float32 and bfloat16.
  std::vector<DType> dtypes() const {
    std::vector<DType> list;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
      if (!may_decline(demanding_case(dtype))) list.push_back(dtype);
    }
    return list;
  }
};
INSTANTIATE_TEST_SUITE_P(Kernel, LoraLinearHost, every_kernel(), kernel_test_name);

TEST_P(LoraLinearHost, ForwardRepeatsBitForBit) {
  for (const DType dtype : dtypes()) {
    const LoraProblem problem(demanding_case(dtype));
    TestHost host;
    const ForwardRun first = problem.forward(context(&host, 3), kernel_->name);
    const ForwardRun second = problem.forward(context(&host, 3), kernel_->name);
    ASSERT_TRUE(first.status.ok() && second.status.ok());
    EXPECT_EQ(first.y.element_bytes(), second.y.element_bytes()) << dtype_name(dtype);
    EXPECT_EQ(first.h.element_bytes(), second.h.element_bytes()) << dtype_name(dtype);
  }
}

TEST_P(LoraLinearHost, GradientsDoNotDependOnTheNumberOfThreads) {
  for (const DType dtype : dtypes()) {
    for (const int64_t m : {1, 3, 64, 150, 300}) {
      LoraCase c = demanding_case(dtype);
      c.m = m;
      const LoraProblem problem(c);
      TestHost host;
      const BackwardRun one = problem.backward(context(&host, 1), kernel_->name);
      ASSERT_TRUE(one.status.ok()) << one.status.message();
      for (const int threads : {1, 2, 3, 7, 8, 64}) {
        const BackwardRun many = problem.backward(context(&host, threads), kernel_->name);
        EXPECT_EQ(gradient_bytes(one), gradient_bytes(many))
            << dtype_name(dtype) << " M " << m << " threads " << threads;
      }
    }
  }
}

// The core's own pool: tasks really run at once here.
TEST_P(LoraLinearHost, OwnThreadPool) {
  for (const DType dtype : dtypes()) {
    const LoraProblem problem(demanding_case(dtype));
    TestHost host;
    const BackwardRun expected = problem.backward(context(&host, 1), kernel_->name);
    set_num_threads(4);
    ExecContext ctx = default_context();
    ctx.gemm = context(&host).gemm;
    ctx.host = &host;
    EXPECT_EQ(ctx.num_threads, 4);
    for (int i = 0; i < 5; ++i) {
      problem.expect_correct(problem.forward(ctx, kernel_->name), rounds_partials());
      const BackwardRun run = problem.backward(ctx, kernel_->name);
      EXPECT_EQ(gradient_bytes(expected), gradient_bytes(run)) << dtype_name(dtype);
    }
    set_num_threads(0);
  }
}

// One operator, several callers, outputs of their own.
TEST_P(LoraLinearHost, CallersAtOnce) {
  const LoraProblem problem(demanding_case(DType::kFloat32));
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL",
                         kernel_->name);  // not in the threads: setenv is no business of theirs
  set_num_threads(3);
  TestHost host;
  ExecContext ctx = default_context();
  ctx.gemm = context(&host).gemm;
  ctx.host = &host;
  std::vector<ForwardRun> runs(4);
  std::vector<LoraProblem::Views> views(runs.size());
  std::vector<LoraLinearArgs> args;
  for (size_t i = 0; i < runs.size(); ++i) {
    runs[i] = problem.forward_outputs();
    args.push_back(problem.forward_args(runs[i], &views[i]));
  }
  std::vector<std::thread> callers;
  for (size_t i = 0; i < runs.size(); ++i) {
    callers.emplace_back([&, i] {
      for (int n = 0; n < 5; ++n) runs[i].status = lora_linear_forward(ctx, args[i]);
    });
  }
  for (std::thread& caller : callers) caller.join();
  set_num_threads(0);
  for (const ForwardRun& run : runs) problem.expect_correct(run, rounds_partials());
}

// The allocator refuses the first request, then the second, and so on, until the call no longer asks for that many.
TEST_P(LoraLinearHost, EveryAllocationMayFail) {
  for (const DType dtype : dtypes()) {
    const LoraProblem problem(demanding_case(dtype));
    for (const bool backward : {false, true}) {
      int64_t failures = 0;
      for (int64_t i = 0;; ++i) {
        ASSERT_LT(i, 1000);
        TestHost host;
        host.fail_allocation = i;
        const ExecContext ctx = context(&host, 3);
        const Status status = backward ? problem.backward(ctx, kernel_->name).status
                                       : problem.forward(ctx, kernel_->name).status;
        EXPECT_EQ(host.live_bytes(), 0) << "leak after allocation " << i << " failed";
        EXPECT_TRUE(host.blocks_intact());
        if (host.num_allocations() <= i) {
          EXPECT_TRUE(status.ok()) << status.message();
          break;
        }
        EXPECT_EQ(status.code(), StatusCode::kOutOfMemory)
            << dtype_name(dtype) << (backward ? " backward" : " forward") << ", allocation " << i;
        EXPECT_EQ(status.message().find("lora_linear"), 0U) << status.message();
        ++failures;
      }
      EXPECT_TRUE(!backward || failures > 0) << "no scratch memory at all?";
    }
    problem.expect_inputs_untouched();
  }
}

TEST(LoraLinearLender, EveryProductMayFail) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    const LoraProblem problem(demanding_case(dtype));
    for (const bool backward : {false, true}) {
      for (int64_t i = 0;; ++i) {
        ASSERT_LT(i, 1000);
        TestHost host;
        host.fail_gemm = i;
        const ExecContext ctx = host.lending_context(3);
        const Status status =
            backward ? problem.backward(ctx, "torch").status : problem.forward(ctx, "torch").status;
        EXPECT_EQ(host.live_bytes(), 0) << "leak after product " << i << " failed";
        if (host.num_gemms() <= i) {
          EXPECT_TRUE(status.ok()) << status.message();
          EXPECT_GT(i, 0) << "nothing was borrowed";
          break;
        }
        EXPECT_EQ(status.code(), StatusCode::kLenderFailed) << status.message();
      }
    }
    problem.expect_inputs_untouched();
  }
}

}  // namespace
}  // namespace loraaccel::test
