// Operands that end, or begin, at a page that nobody may touch: a read outside of them ends the test's process.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <vector>

#include "loraaccel/lora_qkv.h"
#include "loraaccel/pack.h"
#include "support/env.h"
#include "support/kernel_fixture.h"

namespace loraaccel::test {
namespace {

enum class At { kEnd, kBegin };  // where the operand meets the page
constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

// Memory between two pages without access, its last or its first byte next to one of them.
class Guarded {
 public:
  Guarded(size_t bytes, At at) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t inner = (bytes + page - 1) / page * page;
    total_ = inner + 2 * page;
    base_ =
        static_cast<char*>(mmap(nullptr, total_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + page, inner, PROT_READ | PROT_WRITE) != 0)
      std::abort();
    std::memset(base_ + page, 0xFF, inner);  // NaN on the other side
    data_ = base_ + page + (at == At::kEnd ? inner - bytes : 0);
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(base_, total_); }
  char* data() const { return data_; }

 private:
  size_t total_ = 0;
  char* base_ = nullptr;
  char* data_ = nullptr;
};

// Moves views, with their strides and gaps, next to a page.
class Mover {
 public:
  explicit Mover(At at) : at_(at) {}

  void move(TensorView* v) {
    if (v->numel() == 0) return;
    int64_t low = 0;
    int64_t high = 1;
    for (int d = 0; d < v->ndim; ++d) {
      const int64_t reach = (v->shape[d] - 1) * v->stride[d];
      (reach < 0 ? low : high) += reach;
    }
    const auto size = static_cast<int64_t>(dtype_size_bytes(v->dtype));
    const auto bytes = static_cast<size_t>((high - low) * size);
    char* memory = moved_.emplace_back(bytes, at_).data();
    std::memcpy(memory, static_cast<char*>(v->data) + low * size, bytes);
    v->data = memory - low * size;
  }
  void move(LoraAdapter* ad) {
    move(&ad->a);
    move(&ad->b);
  }

 private:
  At at_;
  std::deque<Guarded> moved_;
};

std::vector<char> elements(const TensorView& v) {
  std::vector<char> bytes;
  const auto size = static_cast<int64_t>(dtype_size_bytes(v.dtype));
  for (int64_t i = 0; i < v.rows(); ++i) {
    for (int64_t j = 0; j < v.cols(); ++j) {
      const char* e = static_cast<const char*>(v.data) + (i * v.stride[0] + j * v.stride[1]) * size;
      bytes.insert(bytes.end(), e, e + size);
    }
  }
  return bytes;
}

class GuardPages : public LoraLinearKernels {
 protected:
  // The same bits as with memory all around.
  void check_forward(const LoraProblem& problem, At at) const {
    TestHost host;
    const ExecContext ctx = context(&host, 2);
    const ForwardRun roomy = problem.forward(ctx, kernel_->name);
    ASSERT_TRUE(roomy.status.ok()) << roomy.status.message();
    const ForwardRun outputs = problem.forward_outputs();
    LoraProblem::Views views;
    LoraLinearArgs args = problem.forward_args(outputs, &views);
    Mover mover(at);
    for (TensorView* v : {&args.x, &args.w, &args.bias, &args.y, &args.h}) mover.move(v);
    for (LoraAdapter& ad : views.adapters) mover.move(&ad);
    ASSERT_TRUE(lora_linear_forward(ctx, args).ok());
    EXPECT_EQ(elements(args.y), roomy.y.element_bytes());
    EXPECT_EQ(elements(args.h), roomy.h.element_bytes());
  }

  void check_backward(const LoraProblem& problem, At at) const {
    TestHost host;
    const ExecContext ctx = context(&host, 2);
    const BackwardRun roomy = problem.backward(ctx, kernel_->name);
    ASSERT_TRUE(roomy.status.ok()) << roomy.status.message();
    const BackwardRun outputs = problem.backward_outputs({});
    LoraProblem::Views views;
    LoraLinearBackwardArgs args = problem.backward_args(outputs, &views);
    Mover mover(at);
    for (TensorView* v :
         {&args.dy, &args.x, &args.w, &args.h, &args.grads.dx, &args.grads.dw, &args.grads.dbias})
      mover.move(v);
    for (LoraAdapter& ad : views.adapters) mover.move(&ad);
    for (auto* list : {&views.da, &views.db}) {
      for (TensorView& v : *list) mover.move(&v);
    }
    ASSERT_TRUE(lora_linear_backward(ctx, args).ok());
    EXPECT_EQ(elements(args.grads.dx), roomy.dx.element_bytes());
    EXPECT_EQ(elements(args.grads.dw), roomy.dw.element_bytes());
    EXPECT_EQ(elements(args.grads.dbias), roomy.dbias.element_bytes());
    for (size_t i = 0; i < views.da.size(); ++i) {
      EXPECT_EQ(elements(views.da[i]), roomy.da[i].element_bytes());
      EXPECT_EQ(elements(views.db[i]), roomy.db[i].element_bytes());
    }
  }

  void check_shapes(At at, Layout x, Layout w) const {
    const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
    const struct {
      int64_t k, n;
    } sizes[] = {{1, 1}, {33, 17}, {70, 35}, {15, 67}};
    for (const DType dtype : kTypes) {
      for (const int64_t m : {1, 5, 16, 17, 31}) {
        for (const auto& [k, n] : sizes) {
          LoraCase c = {.m = m, .k = k, .n = n, .dtype = dtype, .x = x, .w = w};
          const bool wide = dtype == DType::kFloat64;
          c.adapters = {{5, 0, dtype}, {1, 0.25, wide ? dtype : DType::kFloat32}};
          c.y = c.dw = c.adapters_out = x == Layout::kPadded ? x : Layout::kDense;
          if (wide && may_decline({.dtype = dtype})) continue;
          SCOPED_TRACE(describe(c));
          const LoraProblem problem(c);
          check_forward(problem, at);
          check_backward(problem, at);
        }
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Kernel, GuardPages, every_kernel(), kernel_test_name);

TEST_P(GuardPages, DenseUpToThePage) { check_shapes(At::kEnd, Layout::kDense, Layout::kDense); }
TEST_P(GuardPages, DenseFromThePage) { check_shapes(At::kBegin, Layout::kDense, Layout::kDense); }
TEST_P(GuardPages, PaddedUpToThePage) { check_shapes(At::kEnd, Layout::kPadded, Layout::kPadded); }
TEST_P(GuardPages, PaddedFromThePage) {
  check_shapes(At::kBegin, Layout::kPadded, Layout::kPadded);
}
TEST_P(GuardPages, TransposedUpToThePage) {
  check_shapes(At::kEnd, Layout::kTransposed, Layout::kTransposed);
}
TEST_P(GuardPages, TransposedFromThePage) {
  check_shapes(At::kBegin, Layout::kTransposed, Layout::kTransposed);
}
TEST_P(GuardPages, ReversedUpToThePage) {
  check_shapes(At::kEnd, Layout::kReversed, Layout::kReversed);
}

// Columns of one buffer: the last output ends where the buffer does, and none writes into its neighbour.
TEST_P(GuardPages, OutputsSideBySide) {
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  for (const At at : {At::kEnd, At::kBegin}) {
    for (const DType dtype : kTypes) {
      if (dtype == DType::kFloat64 && may_decline({.dtype = dtype})) continue;
      for (const int64_t m : {1, 5, 16, 17, 31}) {
        const LoraProblem left({.m = m, .k = 35, .n = 19, .dtype = dtype, .adapters = {}});
        const LoraProblem right({.m = m, .k = 35, .n = 3, .dtype = dtype, .adapters = {}});
        Mover mover(at);
        const Operand buffer = Operand::output(dtype, m, 22);
        TensorView all = buffer.view();
        mover.move(&all);
        LoraProjection projections[2];
        TensorView x;
        int64_t column = 0;
        for (size_t j = 0; j < 2; ++j) {
          LoraProblem::Views views;
          LoraLinearArgs args = (j == 0 ? left : right).forward_args({}, &views);
          for (TensorView* v : {&args.w, &args.bias, &args.x}) mover.move(v);
          if (j == 0) x = args.x;
          auto* start =
              static_cast<char*>(all.data) + column * static_cast<int64_t>(dtype_size_bytes(dtype));
          projections[j] = {
              args.w, args.bias, {}, TensorView::strided(start, dtype, m, args.w.rows(), 22, 1)};
          column += args.w.rows();
        }
        TestHost host;
        ASSERT_TRUE(lora_qkv_forward(context(&host, 2), {x, projections, {}}).ok());
        const ForwardRun one = left.forward(context(&host, 2), kernel_->name);
        EXPECT_EQ(elements(projections[0].y), one.y.element_bytes());
        const ForwardRun two = right.forward(context(&host, 2), kernel_->name);  // of the same x
        EXPECT_EQ(elements(projections[1].y), two.y.element_bytes());
      }
    }
  }
}

// A packed weight in exactly the memory that it asks for.
TEST(GuardPagesPacked, UpToThePage) {
  const ScopedEnv not_forced("LORAACCEL_FORCE_KERNEL", nullptr);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const WeightUse use : {WeightUse::kForward, WeightUse::kInputGradient}) {
      const LoraProblem problem({.m = 31, .k = 33, .n = 17, .dtype = dtype});
      LoraProblem::Views views;
      const bool is_forward = use == WeightUse::kForward;
      const ForwardRun run = problem.forward_outputs();
      BackwardRun back = problem.backward_outputs({.dw = false});
      LoraLinearArgs args = problem.forward_args(run, &views);
      const size_t bytes = packed_weight_bytes(args.w, use);
      ASSERT_EQ(bytes % 64, 0U);  // else it could not end at the page
      const Guarded packed(bytes, At::kEnd);
      Mover mover(At::kEnd);
      TensorView w = args.w;
      mover.move(&w);
      TestHost host;
      ASSERT_TRUE(pack_weight(host.context(2), w, use, packed.data(), bytes).ok());
      if (is_forward) {
        args.packed_w = packed.data();
        ASSERT_TRUE(lora_linear_forward(host.context(2), args).ok());
        problem.expect_correct(run, /*rounds_partials=*/false);
      } else {
        LoraProblem::Views more;
        LoraLinearBackwardArgs backward = problem.backward_args(back, &more);
        backward.packed_w = packed.data();
        ASSERT_TRUE(lora_linear_backward(host.context(2), backward).ok());
        problem.expect_correct(back, /*rounds_partials=*/false);
      }
    }
  }
}

}  // namespace
}  // namespace loraaccel::test
