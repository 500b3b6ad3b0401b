// lora_qkv against double arithmetic and against lora_linear, for each kernel of the linear layers.
#include "loraaccel/lora_qkv.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "support/env.h"
#include "support/kernel_fixture.h"
#include "support/random.h"

namespace loraaccel::test {
namespace {

using enum StatusCode;

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr int64_t kGap = 3;  // columns between two outputs of the buffer

struct ProjectionCase {
  int64_t n = 16;
  std::vector<int64_t> ranks = {4};
  bool bias = true;
};

struct QkvCase {
  int64_t m = 17, k = 33;
  DType dtype = DType::kFloat32;
  std::vector<ProjectionCase> projections = {{33, {4}, true}, {1, {2, 3}, false}, {70, {}, true}};
  DType adapters = DType::kFloat32;
  Layout x = Layout::kDense;  // of all inputs but the weights
  Layout w = Layout::kDense;
  double dropout = 0;
};

struct Part {
  Operand w, bias, dy, dw, dbias;
  std::vector<Operand> a, b, da, db;
  std::vector<LoraAdapter> adapters;
  std::vector<TensorView> da_view, db_view;
  OracleLayer oracle;
  int64_t y_column = 0;  // in the buffer
  int64_t h_column = 0;
};

// One group of projections, its arguments, and the check of what was computed. The outputs are columns of one buffer.
struct Qkv {
  QkvCase c;
  DType sums;
  Operand x, y, h, h_given, dx;
  std::vector<Part> parts;
  std::vector<LoraProjection> projections;
  std::vector<LoraProjectionBackward> gradients;

  explicit Qkv(const QkvCase& qkv_case)
      : c(qkv_case), sums(c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32) {
    Random random(11);
    const auto real = [&] { return random.real(); };
    x = Operand::matrix(c.dtype, c.m, c.k, c.x, real);
    dx = Operand::output(c.dtype, c.m, c.k);
    int64_t columns = 0;
    int64_t rank = 0;
    uint64_t mask = 0;
    for (const ProjectionCase& p : c.projections) {
      Part& part = parts.emplace_back();
      part.w = Operand::matrix(c.dtype, p.n, c.k, c.w, real);
      part.dw = Operand::output(c.dtype, p.n, c.k);
      part.dy = Operand::matrix(c.dtype, c.m, p.n, c.x, real);
      part.dbias = Operand::vector_output(c.dtype, p.n);
      part.oracle = {x.read(), part.w.read(), {}, {}};
      if (p.bias) {
        part.bias = Operand::vector(c.dtype, p.n, c.x, real);
        part.oracle.bias = part.bias.read();
      }
      part.y_column = columns;
      part.h_column = rank;
      for (const int64_t r : p.ranks) {
        const Operand& a = part.a.emplace_back(Operand::matrix(c.adapters, r, c.k, c.x, real));
        const Operand& b = part.b.emplace_back(Operand::matrix(c.adapters, p.n, r, c.x, real));
        const double scale = 0.7 + random.real() / 4;
        part.adapters.push_back({a.view(), b.view(), scale, {c.dropout, 99, mask}});
        part.oracle.adapters.push_back({a.read(), b.read(), scale, c.dropout, 99, mask++});
        part.da_view.push_back(part.da.emplace_back(Operand::output(c.adapters, r, c.k)).view());
        part.db_view.push_back(part.db.emplace_back(Operand::output(c.adapters, p.n, r)).view());
        rank += r;
      }
      columns += p.n + kGap;
    }
    y = Operand::output(c.dtype, c.m, columns);
    if (rank > 0) {
      h = Operand::output(sums, c.m, rank);
      h_given = Operand::matrix(sums, c.m, rank, Layout::kDense, real);
    }
    for (const Part& p : parts) {
      auto* column = static_cast<char*>(y.view().data) +
                     p.y_column * static_cast<int64_t>(dtype_size_bytes(c.dtype));
      const int64_t n = p.w.view().rows();
      projections.push_back({p.w.view(), p.bias.view(), p.adapters,
                             TensorView::strided(column, c.dtype, c.m, n, columns, 1)});
      gradients.push_back(
          {p.dy.view(), p.w.view(), p.adapters, p.dw.view(), p.dbias.view(), p.da_view, p.db_view});
    }
  }
  Qkv(const Qkv&) = delete;

  LoraQkvArgs forward_args() const { return {x.view(), projections, h.view()}; }
  LoraQkvBackwardArgs backward_args() const {
    return {x.view(), gradients, h_given.view(), dx.view()};
  }

  // `column`: of `got`, where the exact matrix begins.
  void close(const std::string& name, const Operand& got, const ExactMatrix& exact, Pass pass,
             bool rounds_partials, int64_t column = 0) const {
    ASSERT_EQ(got.view().rows(), exact.rows) << name;
    ASSERT_LE(column + exact.cols, got.view().cols()) << name;
    for (int64_t i = 0; i < exact.rows; ++i) {
      for (int64_t j = 0; j < exact.cols; ++j) {
        Exact want = exact(i, j);
        if (!rounds_partials) want.stored = 0;
        const double v = got.at(i, column + j);
        ASSERT_LE(std::abs(v - want.value),
                  tolerance(want, pass, got.view().dtype, sums, exact.count))
            << name << "[" << i << ", " << j << "] is " << v << ", expected " << want.value;
      }
    }
    EXPECT_TRUE(got.guards_intact()) << name << ": written outside its elements";
  }

  void expect_forward(bool rounds_partials) const {
    for (size_t j = 0; j < parts.size(); ++j) {
      const Part& p = parts[j];
      const OracleForward exact = oracle_forward(p.oracle);
      const std::string name = std::to_string(j);
      close("y " + name, y, exact.y, Pass::kForward, rounds_partials, p.y_column);
      if (exact.h.cols > 0)
        close("h " + name, h, exact.h, Pass::kForward, rounds_partials, p.h_column);
      for (int64_t i = 0; i < c.m; ++i) {
        for (int64_t g = 0; g < kGap; ++g)
          ASSERT_TRUE(std::isnan(y.at(i, p.y_column + exact.y.cols + g))) << "between the outputs";
      }
    }
  }

  // A projection without dy counts as one with a dy of zeros.
  void expect_backward(bool rounds_partials) const {
    ExactMatrix sum(c.m, c.k);
    for (size_t j = 0; j < parts.size(); ++j) {
      const Part& p = parts[j];
      Matrix given(c.m, p.w.view().rows());
      if (gradients[j].dy.defined()) given = p.dy.read();
      Matrix hidden(c.m, oracle_forward(p.oracle).h.cols);
      for (int64_t i = 0; i < c.m; ++i) {
        for (int64_t r = 0; r < hidden.cols; ++r) hidden(i, r) = h_given.at(i, p.h_column + r);
      }
      const OracleBackward exact = oracle_backward(p.oracle, given, hidden);
      const auto check = [&](const char* what, const Operand& got, const ExactMatrix& value) {
        close(what + std::to_string(j), got, value, Pass::kBackward, rounds_partials);
      };
      check("dw ", p.dw, exact.dw);
      check("dbias ", p.dbias, exact.dbias);
      for (size_t i = 0; i < p.a.size(); ++i) {
        check("dA ", p.da[i], exact.da[i]);
        check("dB ", p.db[i], exact.db[i]);
      }
      sum.count += exact.dx.count;
      for (size_t e = 0; e < sum.values.size(); ++e) {
        sum.values[e].value += exact.dx.values[e].value;
        sum.values[e].terms += exact.dx.values[e].terms;
        sum.values[e].stored += 2 * exact.dx.values[e].stored;  // alone, and as a part of the sum
      }
    }
    close("dx", dx, sum, Pass::kBackward, rounds_partials);
  }

  bool outputs_untouched() const {
    return y.untouched() && h.untouched() && dx.untouched() &&
           std::ranges::all_of(parts, [](const Part& p) {
             return p.dw.untouched() && p.dbias.untouched() &&
                    std::ranges::all_of(p.da, &Operand::untouched) &&
                    std::ranges::all_of(p.db, &Operand::untouched);
           });
  }
  bool inputs_untouched() const {
    return x.untouched() && h_given.untouched() && std::ranges::all_of(parts, [](const Part& p) {
             return p.w.untouched() && p.bias.untouched() && p.dy.untouched() &&
                    std::ranges::all_of(p.a, &Operand::untouched) &&
                    std::ranges::all_of(p.b, &Operand::untouched);
           });
  }
};

class LoraQkv : public LoraLinearKernels {
 protected:
  void forward(const Qkv& qkv, int num_threads = 3) const {
    run([&](const ExecContext& ctx) { return lora_qkv_forward(ctx, qkv.forward_args()); },
        num_threads);
  }
  void backward(const Qkv& qkv, int num_threads = 3) const {
    run([&](const ExecContext& ctx) { return lora_qkv_backward(ctx, qkv.backward_args()); },
        num_threads);
  }
  template <class F>
  void run(const F& call, int num_threads) const {
    const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
    TestHost host;
    const Status status = call(context(&host, num_threads));
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_STREQ(host.kernel_ran, kernel_->name);
    EXPECT_TRUE(host.live_bytes() == 0 && host.blocks_intact());
  }
  void check(const QkvCase& c) const {
    SCOPED_TRACE(std::string(dtype_name(c.dtype)) + " M " + std::to_string(c.m) + " K " +
                 std::to_string(c.k) + " N of the first " + std::to_string(c.projections[0].n) +
                 " x " + layout_name(c.x) + " w " + layout_name(c.w));
    const Qkv qkv(c);
    forward(qkv);
    qkv.expect_forward(rounds_partials());
    backward(qkv);
    qkv.expect_backward(rounds_partials());
    EXPECT_TRUE(qkv.inputs_untouched());
  }
};
INSTANTIATE_TEST_SUITE_P(Kernel, LoraQkv, every_kernel(), kernel_test_name);

const std::vector<ProjectionCase> kGroups[] = {
    {{64, {8}, true}, {16, {8}, true}, {16, {8}, true}},    // grouped-query attention
    {{33, {4}, true}, {1, {2, 3}, false}, {70, {}, true}},  // sizes and ranks that differ
    {{5, {}, false}, {31, {1}, false}, {17, {16, 3}, true}, {48, {}, true}},
    {{20, {5}, true}},
    {{7, {}, false}, {18, {}, true}},  // no adapter at all
};

TEST_P(LoraQkv, ValuesOfEveryShape) {
  for (const auto& group : kGroups)
    for (const int64_t m : {0, 1, 3, 16, 17, 29, 100})
      for (const int64_t k : {33, 64})
        for (const DType dtype : kTypes)
          check({.m = m, .k = k, .dtype = dtype, .projections = group});
}

// Sums of several passes: over the inputs, and over the outputs of one projection.
TEST_P(LoraQkv, LongSums) {
  for (const DType dtype : kTypes) {
    check({.k = 4201, .dtype = dtype, .projections = {{5}, {18}}});
    check({.k = 19, .dtype = dtype, .projections = {{5}, {4201}, {18}}});
  }
}

// Each adapter drops inputs by its own mask.
TEST_P(LoraQkv, AdaptersOfTheLayersTypeAndDropout) {
  for (const DType dtype : kTypes)
    for (const double p : {0.0, 0.4})
      for (const int64_t k : {1, 2, 31, 70})
        for (const int64_t m : {3, 29})
          check({.m = m, .k = k, .dtype = dtype, .adapters = dtype, .dropout = p});
}

TEST_P(LoraQkv, Float64IsServedOrDeclined) {
  const QkvCase c = {.dtype = DType::kFloat64, .adapters = DType::kFloat64};
  if (!may_decline({.dtype = c.dtype})) return check(c);
  const Qkv qkv(c);
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  TestHost host;
  EXPECT_EQ(lora_qkv_forward(context(&host), qkv.forward_args()).code(), kKernelUnavailable);
  EXPECT_EQ(lora_qkv_backward(context(&host), qkv.backward_args()).code(), kKernelUnavailable);
  EXPECT_TRUE(qkv.outputs_untouched());
}

TEST_P(LoraQkv, LayoutsOfTheInputs) {
  for (const Layout x : kInputLayouts)
    for (const Layout w : {Layout::kDense, Layout::kTransposed, Layout::kReversed})
      for (const int64_t m : {5, 21}) check({.m = m, .dtype = DType::kBFloat16, .x = x, .w = w});
}

// The same bits as a call of lora_linear for each projection.
TEST_P(LoraQkv, ForwardEqualsLoraLinear) {
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  for (const DType dtype : kTypes) {
    for (const int64_t m : {1, 16, 17, 100}) {
      const Qkv qkv({.m = m, .k = 65, .dtype = dtype});
      forward(qkv);
      for (const Part& p : qkv.parts) {
        const int64_t n = p.w.view().rows();
        const int64_t rank = oracle_forward(p.oracle).h.cols;
        const Operand y = Operand::output(dtype, m, n);
        const Operand h = rank > 0 ? Operand::output(qkv.sums, m, rank) : Operand();
        TestHost host;
        const Status status = lora_linear_forward(
            context(&host, 3),
            {qkv.x.view(), p.w.view(), p.bias.view(), p.adapters, y.view(), h.view()});
        ASSERT_TRUE(status.ok()) << status.message();
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t j = 0; j < n; ++j) ASSERT_EQ(y.at(i, j), qkv.y.at(i, p.y_column + j));
          for (int64_t r = 0; r < rank; ++r) ASSERT_EQ(h.at(i, r), qkv.h.at(i, p.h_column + r));
        }
      }
    }
  }
}

// An output that nothing was computed from has no gradient: all choices, none of them included.
TEST_P(LoraQkv, MissingGradientsCountAsZero) {
  for (const DType dtype : kTypes) {
    for (unsigned present = 0; present < 8; ++present) {
      for (const int64_t m : {0, 5, 29}) {
        SCOPED_TRACE(std::to_string(present) + " M " + std::to_string(m));
        Qkv qkv({.m = m, .dtype = dtype, .dropout = present == 5 ? 0.25 : 0});
        for (size_t j = 0; j < 3; ++j) {
          if ((present >> j & 1) == 0) qkv.gradients[j].dy = {};
        }
        backward(qkv);
        qkv.expect_backward(rounds_partials());
      }
    }
  }
}

// Without dw and dA nothing reads x, and without dB nothing reads h.
TEST_P(LoraQkv, InputGradientAlone) {
  const Qkv whole({.dtype = DType::kBFloat16});
  backward(whole);
  Qkv qkv({.dtype = DType::kBFloat16});
  for (LoraProjectionBackward& p : qkv.gradients) p.dw = p.dbias = {};
  for (Part& p : qkv.parts) {
    for (auto* list : {&p.da_view, &p.db_view}) std::ranges::fill(*list, TensorView());
  }
  qkv.x = Operand::output(DType::kBFloat16, qkv.c.m, qkv.c.k);  // NaN
  qkv.h_given = Operand();
  backward(qkv);
  EXPECT_EQ(qkv.dx.element_bytes(), whole.dx.element_bytes());
}

TEST_P(LoraQkv, AnyNumberOfThreads) {
  const QkvCase c = {.m = 130, .k = 200, .dropout = 0.1};  // work enough for three
  const Qkv one(c), three(c);
  forward(one, 1);
  forward(three, 3);
  backward(one, 1);
  backward(three, 3);
  EXPECT_EQ(one.y.element_bytes(), three.y.element_bytes());
  EXPECT_EQ(one.dx.element_bytes(), three.dx.element_bytes());
  EXPECT_EQ(one.parts[0].dw.element_bytes(), three.parts[0].dw.element_bytes());
  EXPECT_EQ(one.parts[1].da[1].element_bytes(), three.parts[1].da[1].element_bytes());
}

struct Error {
  StatusCode code;
  std::vector<const char*> message;  // fragments
  std::function<void(Qkv&)> spoil;
};

const Error kForwardErrors[] = {
    {kInvalidArgument, {"lora_qkv: no proj"}, [](Qkv& q) { q.projections.clear(); }},
    {kShapeMismatch, {"projection 1: weight has"}, [](Qkv& q) { --q.projections[1].w.shape[1]; }},
    {kShapeMismatch, {"projection 2: bias"}, [](Qkv& q) { --q.projections[2].bias.shape[0]; }},
    {kShapeMismatch, {"projection 0: y"}, [](Qkv& q) { --q.projections[0].y.shape[1]; }},
    {kShapeMismatch, {"projection 1: lora_B"}, [](Qkv& q) { --q.parts[1].adapters[1].b.shape[1]; }},
    {kUnsupportedDtype,
     {"projection 1: weight is float16", "float32"},
     [](Qkv& q) { q.projections[1].w.dtype = DType::kFloat16; }},
    {kShapeMismatch, {"lora_qkv: hidden"}, [](Qkv& q) { q.projections[1].adapters = {}; }},
    {kInvalidArgument,
     {"projection 1: y overlaps"},
     [](Qkv& q) { q.projections[1].y.data = q.projections[2].w.data; }},
};

const Error kBackwardErrors[] = {
    {kInvalidArgument, {"backward: no proj"}, [](Qkv& q) { q.gradients.clear(); }},
    {kShapeMismatch, {"projection 1: grad has"}, [](Qkv& q) { --q.gradients[1].dy.shape[0]; }},
    {kInvalidArgument,
     {"projection 1: 1 grad_A and 2 grad_B"},
     [](Qkv& q) { q.gradients[1].da = q.gradients[1].da.first(1); }},
    {kShapeMismatch, {"projection 1: grad_B"}, [](Qkv& q) { ++q.parts[1].db_view[1].shape[1]; }},
    {kShapeMismatch, {"backward: hidden"}, [](Qkv& q) { q.h_given = Operand(); }},
    {kInvalidArgument,
     {"grad_weight overlaps"},
     [](Qkv& q) { q.gradients[0].dw.data = q.gradients[2].w.data; }},
};

TEST(LoraQkvErrors, NameTheProjectionAndLeaveTheOutputs) {
  const ScopedEnv not_forced("LORAACCEL_FORCE_KERNEL", nullptr);
  const auto check = [](const Error& e, bool is_forward) {
    Qkv qkv({});
    e.spoil(qkv);
    TestHost host;
    const Status status = is_forward ? lora_qkv_forward(host.context(), qkv.forward_args())
                                     : lora_qkv_backward(host.context(), qkv.backward_args());
    EXPECT_EQ(status.code(), e.code) << status.message();
    for (const char* text : e.message)
      EXPECT_NE(status.message().find(text), std::string::npos)
          << status.message() << " lacks " << text;
    EXPECT_TRUE(qkv.outputs_untouched());
  };
  for (const Error& e : kForwardErrors) check(e, true);
  for (const Error& e : kBackwardErrors) check(e, false);
}

}  // namespace
}  // namespace loraaccel::test
