// lora_mlp against double arithmetic, for each kernel of the linear layers.
//
// The reference goes on from the outputs that the call left (they are part of the interface). What is rounded on the way
// (t, dt, the gradients of gate and up) and the activations (largest error: activation_test.cpp) add to the bounds of
// tolerance.h 4 u + kActivation of the largest sum of absolute terms; roundings are random, so they stay far below.
#include "loraaccel/lora_mlp.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "support/env.h"
#include "support/kernel_fixture.h"
#include "support/random.h"

namespace loraaccel::test {
namespace {

using enum StatusCode;
using enum Pass;
using enum Activation;

constexpr double kActivation = 1.3e-6;
constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
constexpr Activation kKinds[] = {kSilu, kGelu, kGeluTanh, kRelu};

double activation(Activation kind, double v) {
  if (kind == kSilu) return v / (1 + std::exp(-v));
  if (kind == kGelu) return v / 2 * std::erfc(-v / std::sqrt(2.0));
  if (kind == kRelu) return std::max(v, 0.0);
  return v / 2 * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (v + 0.044715 * v * v * v)));
}

// No formula of its own: a central difference, good to 1e-10.
double slope(Activation kind, double v) {
  constexpr double kStep = 1e-5;
  if (kind == kRelu) return v > 0 ? 1 : 0;
  return (activation(kind, v + kStep) - activation(kind, v - kStep)) / (2 * kStep);
}

struct MlpCase {
  int64_t m = 17, k = 33, i = 21, n = 19;
  DType dtype = DType::kFloat32;
  Activation activation = kSilu;
  bool gated = true;
  std::vector<int64_t> ranks = {4, 3, 5};  // of gate, up and down; 0: no adapter
  unsigned biases = 7;                     // a bit for each
  DType adapters = DType::kFloat32;
  double dropout = 0;
  Layout x = Layout::kDense;  // of all inputs
  Layout y = Layout::kDense;  // of all outputs
};

struct Layer {
  std::string name;
  Operand w, bias, a, b;
  Operand y, dw, dbias, da, db;
  std::vector<LoraAdapter> adapters;
  std::vector<TensorView> da_view, db_view;
  OracleLayer oracle;
};

// One block, its arguments, and the check of what it computed. The backward call takes what the forward call left.
struct Mlp {
  MlpCase c;
  bool rounds_partials;
  DType sums;
  Operand x, dy, dx, h_inner, h_down;
  std::vector<Layer> layers;  // down last
  std::vector<LoraProjection> inner;
  std::vector<LoraProjectionBackward> inner_backward;
  std::vector<TensorView> outputs;
  LoraMlpArgs forward;
  LoraMlpBackwardArgs backward;

  explicit Mlp(const MlpCase& mlp_case, bool rounds = false)
      : c(mlp_case),
        rounds_partials(rounds),
        sums(c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32) {
    Random random(5);
    const auto real = [&] { return random.real(); };
    x = Operand::matrix(c.dtype, c.m, c.k, c.x, real);
    dy = Operand::matrix(c.dtype, c.m, c.n, c.x, real);
    dx = Operand::output(c.dtype, c.m, c.k, c.y);
    int64_t rank_inner = 0;
    for (size_t j = c.gated ? 0 : 1; j < 3; ++j) {
      Layer& l = layers.emplace_back();
      l.name = j == 0 ? "gate" : j == 1 ? "up" : "down";
      const auto [outs, ins] = j == 2 ? std::pair(c.n, c.i) : std::pair(c.i, c.k);
      l.w = Operand::matrix(c.dtype, outs, ins, c.x, real);
      l.oracle = {x.read(), l.w.read(), {}, {}};
      l.y = Operand::output(c.dtype, c.m, outs, c.y);
      l.dw = Operand::output(c.dtype, outs, ins, c.y);
      if ((c.biases >> j & 1) != 0) {
        l.bias = Operand::vector(c.dtype, outs, c.x, real);
        l.oracle.bias = l.bias.read();
        l.dbias = Operand::vector_output(c.dtype, outs, c.y);
      }
      if (const int64_t rank = c.ranks[j]) {
        l.a = Operand::matrix(c.adapters, rank, ins, c.x, real);
        l.b = Operand::matrix(c.adapters, outs, rank, c.x, real);
        const double scale = 0.7 + random.real() / 4;
        l.adapters = {{l.a.view(), l.b.view(), scale, {c.dropout, 99, j}}};
        l.oracle.adapters = {{l.a.read(), l.b.read(), scale, c.dropout, 99, j}};
        l.da = Operand::output(c.adapters, rank, ins, c.y);
        l.db = Operand::output(c.adapters, outs, rank, c.y);
        l.da_view = {l.da.view()};
        l.db_view = {l.db.view()};
        if (j < 2) rank_inner += rank;
      }
    }
    h_inner = Operand::output(sums, c.m, rank_inner);
    h_down = Operand::output(sums, c.m, c.ranks[2]);
    for (Layer& l : layers) {
      inner.push_back({l.w.view(), l.bias.view(), l.adapters, l.y.view()});
      inner_backward.push_back(
          {{}, l.w.view(), l.adapters, l.dw.view(), l.dbias.view(), l.da_view, l.db_view});
      outputs.push_back(l.y.view());
    }
    forward = {x.view(), {}, inner.back(), c.activation, h_inner.view(), h_down.view()};
    backward = {dy.view(),      x.view(),      {},       {}, inner_backward.back(), c.activation,
                h_inner.view(), h_down.view(), dx.view()};
    inner.pop_back();
    inner_backward.pop_back();
    outputs.pop_back();
    forward.inner = inner;
    backward.inner = inner_backward;
    backward.outputs = outputs;
  }

  // t in double, from the outputs of gate and up.
  Matrix activated() const {
    Matrix t(c.m, c.i);
    for (int64_t r = 0; r < c.m; ++r) {
      for (int64_t j = 0; j < c.i; ++j) {
        t(r, j) = activation(c.activation, layers[0].y.at(r, j));
        if (c.gated) t(r, j) *= layers[1].y.at(r, j);
      }
    }
    return t;
  }

  void expect_forward() const {
    int64_t column = 0;
    for (const Layer& l : layers) {
      const bool is_down = &l == &layers.back();
      OracleLayer oracle = l.oracle;
      if (is_down) oracle.x = activated();
      const OracleForward exact = oracle_forward(oracle);
      close(l.name + " y", l.y, exact.y, kForward, is_down);
      close(l.name + " h", is_down ? h_down : h_inner, exact.h, kForward, is_down,
            is_down ? 0 : column);
      column += exact.h.cols;
    }
  }

  void expect_backward() const {
    OracleLayer last = layers.back().oracle;
    last.x = activated();
    const OracleBackward down = oracle_backward(last, dy.read(), h_down.read());
    expect_gradients(layers.back(), down);
    ExactMatrix sum(c.m, c.k);
    int64_t column = 0;
    for (size_t j = 0; j + 1 < layers.size(); ++j) {
      Matrix grad(c.m, c.i), h(c.m, layers[j].a.view().rows());
      for (int64_t r = 0; r < c.m; ++r) {
        for (int64_t i = 0; i < c.i; ++i) {
          const double v = layers[0].y.at(r, i);
          const double up = j == 0 && c.gated ? layers[1].y.at(r, i) : 1;
          grad(r, i) = down.dx(r, i).value * up *
                       (j == 0 ? slope(c.activation, v) : activation(c.activation, v));
        }
        for (int64_t i = 0; i < h.cols; ++i) h(r, i) = h_inner.at(r, column + i);
      }
      column += h.cols;
      const OracleBackward exact = oracle_backward(layers[j].oracle, grad, h);
      expect_gradients(layers[j], exact);
      sum.count += exact.dx.count;
      for (size_t e = 0; e < sum.values.size(); ++e) {
        sum.values[e].value += exact.dx.values[e].value;
        sum.values[e].terms += exact.dx.values[e].terms;
        sum.values[e].stored += 2 * exact.dx.values[e].stored;  // alone, and as a part of the sum
      }
    }
    close("dx", dx, sum, kBackward, true);
  }

  void expect_gradients(const Layer& l, const OracleBackward& exact) const {
    close(l.name + " dw", l.dw, exact.dw, kBackward, true);
    if (l.oracle.bias) close(l.name + " dbias", l.dbias, exact.dbias, kBackward, true);
    if (exact.da.empty()) return;
    close(l.name + " dA", l.da, exact.da[0], kBackward, true);
    close(l.name + " dB", l.db, exact.db[0], kBackward, true);
  }

  // `later`: what it is computed from was rounded. `column`: of `got`, where the exact matrix begins.
  void close(const std::string& name, const Operand& got, const ExactMatrix& exact, Pass pass,
             bool later, int64_t column = 0) const {
    ASSERT_TRUE(got.view().rows() == exact.rows && got.view().cols() >= column + exact.cols);
    double largest = 0;
    for (const Exact& e : exact.values) largest = std::max(largest, e.terms);
    const double error = sums == DType::kFloat64 ? 1e-9 : kActivation;
    const double slack = later ? (4 * unit_roundoff(c.dtype) + error) * largest : 0;
    for (int64_t r = 0; r < exact.rows; ++r) {
      for (int64_t i = 0; i < exact.cols; ++i) {
        Exact want = exact(r, i);
        if (!rounds_partials) want.stored = 0;
        const double allowed = tolerance(want, pass, got.view().dtype, sums, exact.count) + slack;
        ASSERT_NEAR(got.at(r, column + i), want.value, allowed) << name << " " << r << " " << i;
      }
    }
    EXPECT_TRUE(got.guards_intact()) << name << ": written outside its elements";
  }

  // The gradients of the backward arguments and what is behind them: dx, then dw, dbias, dA and dB of each layer.
  auto gradients() {
    std::vector<std::pair<TensorView*, const Operand*>> list = {{&backward.dx, &dx}};
    for (size_t j = 0; j < layers.size(); ++j) {
      Layer& l = layers[j];
      LoraProjectionBackward& p = j < inner_backward.size() ? inner_backward[j] : backward.down;
      list.insert(list.end(), {{&p.dw, &l.dw}, {&p.dbias, &l.dbias}});
      list.insert(list.end(), {{l.da_view.data(), &l.da}, {l.db_view.data(), &l.db}});
    }
    return list;
  }

  void expect_inputs_untouched() const {
    EXPECT_TRUE(x.untouched() && dy.untouched());
    for (const Layer& l : layers) {
      EXPECT_TRUE(l.w.untouched() && l.bias.untouched() && l.a.untouched() && l.b.untouched());
    }
  }
};

class LoraMlp : public LoraLinearKernels {
 protected:
  // Both passes, and the checks of everything.
  void check(const MlpCase& c) const {
    const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
    SCOPED_TRACE(::testing::PrintToString(std::tuple(
        dtype_name(c.dtype), c.m, int{static_cast<int8_t>(c.activation)}, c.ranks, c.biases)));
    const Mlp mlp(c, borrows(*kernel_));
    TestHost host;
    const Status forward = lora_mlp_forward(context(&host, 3), mlp.forward);
    ASSERT_TRUE(forward.ok()) << forward.message();
    EXPECT_STREQ(host.kernel_ran, kernel_->name);
    mlp.expect_forward();
    const Status backward = lora_mlp_backward(context(&host, 3), mlp.backward);
    ASSERT_TRUE(backward.ok()) << backward.message();
    mlp.expect_backward();
    mlp.expect_forward();  // the backward pass left its inputs alone
    mlp.expect_inputs_untouched();
    EXPECT_TRUE(host.blocks_intact() && host.live_bytes() == 0);
  }
};
INSTANTIATE_TEST_SUITE_P(Kernel, LoraMlp, every_kernel(), kernel_test_name);
TEST_P(LoraMlp, EveryTypeShapeAndActivation) {
  constexpr int64_t kShapes[][4] = {
      {0, 8, 6, 4}, {1, 100, 33, 17}, {3, 7, 1, 5}, {17, 65, 70, 31}, {40, 33, 47, 67}};
  for (const auto& [m, k, i, n] : kShapes) {
    for (const DType dtype : kTypes) {
      if (dtype == DType::kFloat64 && !borrows(*kernel_) && GetParam() != "ref") continue;
      for (const Activation kind : kKinds) {
        for (const bool gated : {true, false})
          check({m, k, i, n, dtype, kind, gated, {4, 3, 5}, 7, dtype});
      }
    }
  }
}

TEST_P(LoraMlp, MissingAdaptersAndBiases) {
  for (const DType dtype : {DType::kFloat32, kBf16}) {
    for (unsigned bits = 0; bits < 64; ++bits) {
      MlpCase c = {5, 19, 37, 18, dtype};
      c.biases = bits % 8;
      for (size_t j = 0; j < 3; ++j) c.ranks[j] *= bits >> (3 + j) & 1;
      check(c);
    }
  }
}

TEST_P(LoraMlp, LayoutsDropoutAndAdaptersOfOtherTypes) {
  for (const Layout x : {Layout::kPadded, Layout::kTransposed, Layout::kReversed}) {
    for (const Layout y : {Layout::kDense, Layout::kPadded, Layout::kMisaligned}) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat16})
        check({17, 33, 21, 19, dtype, kKinds[0], true, {17, 1, 8}, 7, kBf16, 0.3, x, y});
    }
  }
}

// What is not wanted is not written, what is has the same bits. x is NaN where the header says that it is not read.
TEST_P(LoraMlp, OnlyWhatIsWanted) {
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  Mlp all(MlpCase{});
  TestHost host;
  ASSERT_TRUE(lora_mlp_forward(context(&host), all.forward).ok());
  ASSERT_TRUE(lora_mlp_backward(context(&host), all.backward).ok());
  const auto whole = all.gradients();
  const Operand unread = Operand::output(DType::kFloat32, all.c.m, all.c.k);
  for (size_t one = 0; one < 2 * whole.size(); ++one) {  // one alone; all but one
    SCOPED_TRACE(one);
    const auto wanted = [&](size_t e) { return (e == one % whole.size()) == (one < whole.size()); };
    Mlp some(MlpCase{});
    ASSERT_TRUE(lora_mlp_forward(context(&host), some.forward).ok());
    const auto part = some.gradients();
    for (size_t e = 0; e < part.size(); ++e)
      *part[e].first = wanted(e) ? *part[e].first : TensorView();
    if (!wanted(1) && !wanted(3) && !wanted(5) && !wanted(7)) some.backward.x = unread.view();
    if (!wanted(4) && !wanted(8)) some.backward.h_inner = {};
    if (!wanted(12)) some.backward.h_down = {};
    const Status status = lora_mlp_backward(context(&host), some.backward);
    ASSERT_TRUE(status.ok()) << status.message();
    for (size_t e = 0; e < part.size(); ++e) {
      const Operand& got = *part[e].second;
      const bool same = got.element_bytes() == whole[e].second->element_bytes();
      EXPECT_TRUE(wanted(e) ? same : got.untouched()) << e;
    }
  }
}

// What a caller can get wrong.
using M = Mlp&;
struct Error {
  Pass pass;
  StatusCode code;
  const char* message;
  void (*spoil)(M p);
};
const Error kErrors[] = {
    {kForward, kInvalidArgument, "0 inner layers", [](M p) { p.forward.inner = {}; }},
    {kForward, kShapeMismatch, "gate: weight", [](M p) { p.inner[0].w.shape[0] = 20; }},
    {kForward, kShapeMismatch, "gate output", [](M p) { p.inner[0].y.shape[0] = 16; }},
    {kForward, kInvalidArgument, "up output", [](M p) { p.inner[1].y.stride[1] = 2; }},
    {kForward, kInvalidArgument, "up: scaling", [](M p) { p.layers[1].adapters[0].scale = NAN; }},
    {kForward, kShapeMismatch, "hidden", [](M p) { p.forward.h_inner.shape[1] = 6; }},
    // Of down: found before gate and up are computed.
    {kForward, kShapeMismatch, "down: bias", [](M p) { p.forward.down.bias.shape[0] = 18; }},
    {kForward, kUnsupportedDtype, "down: y", [](M p) { p.forward.down.y.dtype = kBf16; }},
    {kForward, kShapeMismatch, "down: lora_A", [](M p) { p.layers[2].adapters[0].a.ndim = 1; }},
    {kForward, kShapeMismatch, "hidden", [](M p) { p.forward.h_down = {}; }},
    // An output on an input, of whichever layer.
    {kForward, kInvalidArgument, "gate: y ov", [](M p) { p.inner[0].y.data = p.x.view().data; }},
    {kForward, kInvalidArgument, "overlaps", [](M p) { p.forward.down.y.data = p.forward.x.data; }},
    {kBackward, kShapeMismatch, "down: grad", [](M p) { p.backward.dy.shape[1] = 18; }},
    {kBackward, kInvalidArgument, "0 outputs", [](M p) { p.backward.outputs = {}; }},
    {kBackward, kShapeMismatch, "up output", [](M p) { p.outputs[1].shape[1] = 20; }},
    {kBackward, kShapeMismatch, "hidden", [](M p) { p.backward.h_down = {}; }},
    // Of gate, up and x: found before the gradients of down are computed.
    {kBackward, kShapeMismatch, "grad_x", [](M p) { p.backward.dx.shape[0] = 16; }},
    {kBackward, kShapeMismatch, "gate: grad_w", [](M p) { p.inner_backward[0].dw.ndim = 1; }},
    {kBackward, kUnsupportedDtype, "up: grad_B", [](M p) { p.layers[1].db_view[0].dtype = kBf16; }},
    {kBackward, kShapeMismatch, "hidden", [](M p) { p.backward.h_inner.shape[1] = 6; }},
    {kBackward, kInvalidArgument, "overlaps",
     [](M p) { p.backward.down.dw.data = p.x.view().data; }},
    {kBackward, kInvalidArgument, "overlap",
     [](M p) { p.backward.down.dw.data = p.outputs[0].data; }},
};

TEST(LoraMlpErrors, AreFoundBeforeAnythingIsWritten) {
  for (const Error& error : kErrors) {
    SCOPED_TRACE("entry " + std::to_string(&error - kErrors) + ": " + error.message);
    Mlp mlp(MlpCase{});
    error.spoil(mlp);
    TestHost host;
    const bool forward = error.pass == kForward;
    const Status status = forward ? lora_mlp_forward(host.context(), mlp.forward)
                                  : lora_mlp_backward(host.context(), mlp.backward);
    EXPECT_EQ(status.code(), error.code) << status.message();
    EXPECT_EQ(status.message().find(forward ? "lora_mlp: " : "lora_mlp_backward: "), 0U);
    EXPECT_NE(status.message().find(error.message), std::string::npos) << status.message();
    mlp.expect_inputs_untouched();
    bool untouched = mlp.h_inner.untouched() && mlp.h_down.untouched();
    for (const Layer& l : mlp.layers) untouched = untouched && l.y.untouched();
    for (const auto& [view, o] : mlp.gradients()) untouched = untouched && o->untouched();
    EXPECT_TRUE(untouched) << "an output was written";
  }
}

// Each allocation and each product of the host may fail: its code, and no memory is kept.
TEST_P(LoraMlp, FailuresOfTheHost) {
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  const Mlp mlp(MlpCase{});
  int64_t failures[2] = {};
  for (int64_t run = 0; run < 200; ++run) {
    TestHost host;
    const bool memory = run % 4 < 2;
    (memory ? host.fail_allocation : host.fail_gemm) = run / 4;
    const Status status = run % 2 == 0 ? lora_mlp_forward(context(&host), mlp.forward)
                                       : lora_mlp_backward(context(&host), mlp.backward);
    EXPECT_TRUE(status.ok() || status.code() == (memory ? kOutOfMemory : kLenderFailed));
    EXPECT_EQ(host.live_bytes(), 0);
    failures[memory ? 0 : 1] += status.ok() ? 0 : 1;
  }
  EXPECT_GE(failures[0], 3);  // t; t and dt
  EXPECT_EQ(failures[1] > 0, borrows(*kernel_));
}
}  // namespace
}  // namespace loraaccel::test
