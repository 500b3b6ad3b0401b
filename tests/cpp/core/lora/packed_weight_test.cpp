// Weights packed beforehand: the same bits as without, and an error for what was packed from something else.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "loraaccel/lora_qkv.h"
#include "loraaccel/pack.h"
#include "support/env.h"
#include "support/kernel_fixture.h"

namespace loraaccel::test {
namespace {

using enum StatusCode;

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr WeightUse kUses[] = {WeightUse::kForward, WeightUse::kInputGradient};

// 64 bytes more than asked for, to see what is written behind the end.
class PackedMemory {
 public:
  explicit PackedMemory(size_t bytes)
      : bytes_(bytes), block_(std::aligned_alloc(64, (bytes + 127) / 64 * 64), std::free) {
    std::fill_n(data(), bytes + 64, kUnwritten);
  }
  static PackedMemory of(const TensorView& w, WeightUse use) {
    TestHost host;
    PackedMemory packed(packed_weight_bytes(w, use));
    const Status status = pack_weight(host.context(3), w, use, packed.data(), packed.bytes_);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(packed.end_intact()) << "written behind the end";
    return packed;
  }

  char* data() const { return static_cast<char*>(block_.get()); }
  std::vector<char> read() const { return {data(), data() + bytes_}; }
  bool end_intact() const {
    return std::all_of(data() + bytes_, data() + bytes_ + 64, is_unwritten);
  }
  bool untouched() const { return std::all_of(data(), data() + bytes_ + 64, is_unwritten); }

 private:
  static constexpr char kUnwritten = '\x5A';
  static bool is_unwritten(char c) { return c == kUnwritten; }

  size_t bytes_;
  std::unique_ptr<void, void (*)(void*)> block_;
};

TensorView weight_of(const LoraProblem& problem) {
  LoraProblem::Views views;
  return problem.forward_args({}, &views).w;
}

ForwardRun forward(const LoraProblem& problem, const ExecContext& ctx, const void* packed) {
  ForwardRun run = problem.forward_outputs();
  LoraProblem::Views views;
  LoraLinearArgs args = problem.forward_args(run, &views);
  args.packed_w = packed;
  run.status = lora_linear_forward(ctx, args);
  return run;
}

BackwardRun backward(const LoraProblem& problem, const ExecContext& ctx, const void* packed) {
  BackwardRun run = problem.backward_outputs({});
  LoraProblem::Views views;
  LoraLinearBackwardArgs args = problem.backward_args(run, &views);
  args.packed_w = packed;
  run.status = lora_linear_backward(ctx, args);
  return run;
}

using PackedWeightKernels = LoraLinearKernels;
INSTANTIATE_TEST_SUITE_P(Kernel, PackedWeightKernels, every_kernel(), kernel_test_name);

// Kernels of another instruction set than the packing's take it too, and read w.
TEST_P(PackedWeightKernels, SameBits) {
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  const struct {
    int64_t k, n;
  } sizes[] = {{33, 17}, {64, 96}, {1, 1}, {257, 70}, {2, 49}, {40, 3}, {4201, 5}, {5, 4201}};
  for (const auto& [k, n] : sizes) {
    for (const DType dtype : kTypes) {
      for (const int64_t m : {0, 1, 16, 17, 50}) {
        if (m != 17 && std::max(k, n) > 1000) continue;  // sums of several passes
        LoraCase c = {.m = m, .k = k, .n = n, .dtype = dtype};
        c.adapters = {{4}, {3, 0.25, dtype}};
        SCOPED_TRACE(describe(c));
        const LoraProblem problem(c);
        const PackedMemory packed = PackedMemory::of(weight_of(problem), WeightUse::kForward);
        TestHost host;
        const ForwardRun run = forward(problem, context(&host, 3), packed.data());
        const ForwardRun plain = forward(problem, context(&host, 3), nullptr);
        problem.expect_correct(run, rounds_partials());
        EXPECT_EQ(run.y.element_bytes(), plain.y.element_bytes());
        EXPECT_EQ(run.h.element_bytes(), plain.h.element_bytes());

        const PackedMemory other = PackedMemory::of(weight_of(problem), WeightUse::kInputGradient);
        const BackwardRun back = backward(problem, context(&host, 3), other.data());
        const BackwardRun plain_back = backward(problem, context(&host, 3), nullptr);
        problem.expect_correct(back, rounds_partials());
        EXPECT_EQ(back.dx.element_bytes(), plain_back.dx.element_bytes());
        EXPECT_EQ(back.dw.element_bytes(), plain_back.dw.element_bytes());
        problem.expect_inputs_untouched();
        EXPECT_STREQ(host.kernel_ran, kernel_->name);
      }
    }
  }
}

// Three projections, all of them packed; each gradient alone, and all together.
TEST_P(PackedWeightKernels, SameBitsInAGroup) {
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  for (const DType dtype : kTypes) {
    std::vector<LoraProblem> problems;
    for (const int64_t n : {64, 16, 35}) {
      LoraCase c = {.m = 21, .k = 40, .n = n, .dtype = dtype, .adapters = {}};
      c.seed = static_cast<uint64_t>(n);
      problems.emplace_back(c);
    }
    LoraProblem::Views views;
    const TensorView x = problems[0].forward_args({}, &views).x;
    std::vector<PackedMemory> packed;
    std::vector<Operand> y, dx;
    for (const bool with : {false, true}) {
      std::vector<LoraProjection> projections;
      std::vector<LoraProjectionBackward> all;
      for (const LoraProblem& p : problems) {
        const LoraLinearArgs args = p.forward_args({}, &views);
        LoraProjection& to = projections.emplace_back();
        to = {args.w, args.bias, {}, y.emplace_back(Operand::output(dtype, 21, p.spec().n)).view()};
        LoraProjectionBackward& from = all.emplace_back();
        from.dy = p.backward_args({}, &views).dy;
        from.w = args.w;
        if (!with) continue;
        to.packed_w = packed.emplace_back(PackedMemory::of(args.w, WeightUse::kForward)).data();
        from.packed_w =
            packed.emplace_back(PackedMemory::of(args.w, WeightUse::kInputGradient)).data();
      }
      TestHost host;
      ASSERT_TRUE(lora_qkv_forward(context(&host, 3), {x, projections, {}}).ok());
      for (unsigned present = 1; present < 8; ++present) {
        std::vector<LoraProjectionBackward> some = all;
        for (size_t j = 0; j < 3; ++j) {
          if ((present >> j & 1) == 0) some[j].dy = {};
        }
        const Operand& out = dx.emplace_back(Operand::output(dtype, 21, 40));
        ASSERT_TRUE(lora_qkv_backward(context(&host, 3), {x, some, {}, out.view()}).ok());
      }
    }
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(y[i].element_bytes(), y[i + 3].element_bytes());
    for (size_t i = 0; i < 7; ++i) {
      EXPECT_EQ(dx[i].element_bytes(), dx[i + 7].element_bytes()) << "gradients of " << i + 1;
    }
  }
}

// The kernel that packs reads what it packed: a weight that changed since counts only after it is packed again.
TEST(PackedWeight, ChangesOfTheWeightAreNotSeen) {
  const ScopedEnv not_forced("LORAACCEL_FORCE_KERNEL", nullptr);
  TestHost host;
  const ExecContext ctx = host.context();
  for (const DType dtype : kTypes) {
    LoraCase c = {.m = 40, .dtype = dtype};
    const LoraProblem before(c);
    const LoraProblem after(c);
    const TensorView w = weight_of(after);
    const PackedMemory packed = PackedMemory::of(w, WeightUse::kForward);
    const PackedMemory other = PackedMemory::of(w, WeightUse::kInputGradient);
    std::fill_n(static_cast<char*>(w.data), 17 * 33 * dtype_size_bytes(dtype), '\0');
    const auto y = [&](const LoraProblem& p, const void* with) {
      return forward(p, ctx, with).y.element_bytes();
    };
    const auto dx = [&](const LoraProblem& p, const void* with) {
      return backward(p, ctx, with).dx.element_bytes();
    };
    EXPECT_EQ(y(after, packed.data()), y(before, nullptr));
    EXPECT_EQ(dx(after, other.data()), dx(before, nullptr));
    EXPECT_NE(y(after, nullptr), y(before, nullptr));
    const PackedMemory again = PackedMemory::of(w, WeightUse::kForward);
    EXPECT_EQ(y(after, again.data()), y(after, nullptr));
  }
}

// Rows that lie apart are packed as dense ones are.
TEST(PackedWeight, OfPaddedRows) {
  for (const WeightUse use : kUses) {
    for (const DType dtype : kTypes) {
      double dense_value = 0;
      double padded_value = 0;
      const Operand dense =
          Operand::matrix(dtype, 35, 21, Layout::kDense, [&] { return dense_value += 0.25; });
      const Operand padded =
          Operand::matrix(dtype, 35, 21, Layout::kPadded, [&] { return padded_value += 0.25; });
      EXPECT_EQ(PackedMemory::of(dense.view(), use).read(),
                PackedMemory::of(padded.view(), use).read());
    }
  }
}

TEST(PackedWeight, Bytes) {
  const std::vector<char> memory(256 * 256 * 8);
  for (const WeightUse use : kUses) {
    const auto bytes = [&](DType dtype) {
      return packed_weight_bytes(TensorView::matrix(memory.data(), dtype, 256, 256), use);
    };
    constexpr size_t kElements = 256 * 256;
    EXPECT_EQ(bytes(DType::kFloat32), 4 * kElements + 64);
    EXPECT_EQ(bytes(DType::kFloat16), 4 * kElements + 64);
    const size_t bfloat16 = bytes(DType::kBFloat16);
    EXPECT_TRUE(bfloat16 == 2 * kElements + 64 || bfloat16 == 4 * kElements + 64) << bfloat16;
    EXPECT_EQ(bytes(DType::kFloat64), 0U);
  }
}

TEST(PackedWeight, WhatCannotBePacked) {
  const Operand w = Operand::output(DType::kFloat32, 17, 33);
  const Operand columns = Operand::output(DType::kFloat32, 17, 33, Layout::kTransposed);
  const Operand doubles = Operand::output(DType::kFloat64, 17, 33);
  const Operand empty = Operand::output(DType::kFloat32, 0, 33);
  const Operand vector = Operand::vector_output(DType::kFloat32, 33);
  TestHost host;
  for (const WeightUse use : kUses) {
    const PackedMemory memory(1 << 16);
    for (const Operand* o : {&columns, &doubles, &empty, &vector}) {
      EXPECT_EQ(packed_weight_bytes(o->view(), use), 0U);
      const Status status = pack_weight(host.context(), o->view(), use, memory.data(), 1 << 16);
      EXPECT_EQ(status.code(), kInvalidArgument);
      EXPECT_NE(status.message().find("pack_weight: no packing"), std::string::npos)
          << status.message();
    }
    const size_t bytes = packed_weight_bytes(w.view(), use);
    const Status less = pack_weight(host.context(), w.view(), use, memory.data(), bytes - 1);
    EXPECT_EQ(less.code(), kInvalidArgument);
    EXPECT_NE(less.message().find(std::to_string(bytes - 1) + " bytes of memory, expected " +
                                  std::to_string(bytes)),
              std::string::npos)
        << less.message();
    EXPECT_EQ(pack_weight(host.context(), w.view(), use, nullptr, bytes).code(), kInvalidArgument);
    EXPECT_TRUE(memory.untouched());
  }
}

// What was packed from something else, or by nobody, is refused before anything is written.
TEST(PackedWeight, OfSomethingElseIsRefused) {
  const ScopedEnv not_forced("LORAACCEL_FORCE_KERNEL", nullptr);
  const LoraProblem problem({.m = 20, .k = 33, .n = 17});
  const Operand w = Operand::matrix(DType::kFloat32, 17, 33, Layout::kDense, [] { return 1; });
  const Operand taller = Operand::matrix(DType::kFloat32, 18, 33, Layout::kDense, [] { return 1; });
  const Operand wider = Operand::matrix(DType::kFloat32, 17, 34, Layout::kDense, [] { return 1; });
  const Operand turned = Operand::matrix(DType::kFloat32, 33, 17, Layout::kDense, [] { return 1; });
  const Operand half = Operand::matrix(DType::kFloat16, 17, 33, Layout::kDense, [] { return 1; });
  for (const WeightUse use : kUses) {
    const bool is_forward = use == WeightUse::kForward;
    const WeightUse opposite = is_forward ? WeightUse::kInputGradient : WeightUse::kForward;
    std::vector<std::pair<PackedMemory, std::string>> wrong;
    wrong.emplace_back(
        PackedMemory::of(w.view(), opposite),
        is_forward ? "is packed for the input gradient" : "is packed for the forward pass");
    for (const Operand* o : {&taller, &wider, &turned})
      wrong.emplace_back(PackedMemory::of(o->view(), use), "of another shape");
    wrong.emplace_back(PackedMemory::of(half.view(), use), "of another type");
    wrong.emplace_back(PackedMemory(64), "was not made by pack_weight");
    for (const auto& [memory, text] : wrong) {
      TestHost host;
      Status status;
      if (is_forward) {
        const ForwardRun run = forward(problem, host.context(), memory.data());
        EXPECT_TRUE(run.y.untouched() && run.h.untouched());
        status = run.status;
      } else {
        const BackwardRun run = backward(problem, host.context(), memory.data());
        EXPECT_TRUE(run.dx.untouched() && run.dw.untouched());
        status = run.status;
      }
      EXPECT_EQ(status.code(), kInvalidArgument);
      EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
      EXPECT_NE(status.message().find("packed_w"), std::string::npos) << status.message();
    }
  }
}

// In a group the message names the projection.
TEST(PackedWeight, OfAnotherProjectionIsRefused) {
  const Operand x = Operand::matrix(DType::kFloat32, 3, 8, Layout::kDense, [] { return 1; });
  const Operand w[] = {Operand::matrix(DType::kFloat32, 4, 8, Layout::kDense, [] { return 1; }),
                       Operand::matrix(DType::kFloat32, 5, 8, Layout::kDense, [] { return 1; })};
  const Operand y[] = {Operand::output(DType::kFloat32, 3, 4),
                       Operand::output(DType::kFloat32, 3, 5)};
  const PackedMemory packed = PackedMemory::of(w[0].view(), WeightUse::kForward);
  LoraProjection projections[2];
  for (size_t j = 0; j < 2; ++j) {
    projections[j].w = w[j].view();
    projections[j].y = y[j].view();
    projections[j].packed_w = packed.data();
  }
  TestHost host;
  const Status status = lora_qkv_forward(host.context(), {x.view(), projections, {}});
  EXPECT_EQ(status.code(), kInvalidArgument);
  EXPECT_NE(status.message().find("projection 1: packed_w"), std::string::npos) << status.message();
  EXPECT_TRUE(y[0].untouched() && y[1].untouched());
}

}  // namespace
}  // namespace loraaccel::test
