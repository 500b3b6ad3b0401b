#include "support/lora_problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "support/env.h"
#include "support/philox_reference.h"
#include "support/random.h"

namespace loraaccel::test {
namespace {

constexpr uint64_t kDropoutSeed = 0x0123456789ABCDEFU;
constexpr uint64_t kDropoutOffset =
    0xFFFFFFFF0U;  // more than 32 bits, so that both halves are used

uint64_t dropout_offset(size_t adapter) { return kDropoutOffset + adapter; }
DropoutSpec hidden_dropout(const AdapterCase& ad, size_t i) {
  return {ad.hidden_dropout, kDropoutSeed, kDropoutOffset + 100 + i};
}
DropoutSpec rank_dropout(const AdapterCase& ad, size_t i) {
  return {ad.rank_dropout, kDropoutSeed, kDropoutOffset + 200 + i};
}

// Exact in every type; a quarter of them zero.
double given_factor(int64_t m, int64_t r) { return 0.5 * static_cast<double>((3 * m + r) % 4); }

// What multiplies the rank activations of adapter i: its masks, and 0 in rows of samples that have another adapter.
std::vector<Matrix> gates(const LoraCase& c, size_t i) {
  const AdapterCase& ad = c.adapters[i];
  std::vector<Matrix> list;
  const auto add = [&](const auto& factor) {
    Matrix& gate = list.emplace_back(c.m, ad.rank);
    for (int64_t m = 0; m < c.m; ++m) {
      for (int64_t r = 0; r < ad.rank; ++r) gate(m, r) = factor(m, r);
    }
  };
  const auto mask = [](const DropoutSpec& d, int64_t row, int64_t col) {
    return dropout_keeps(d.p, d.seed, d.offset, row, col) ? 1 / (1 - d.p) : 0;
  };
  if (ad.hidden_dropout > 0)
    add([&](int64_t m, int64_t r) { return mask(hidden_dropout(ad, i), m, r); });
  if (ad.rank_dropout > 0)
    add([&](int64_t m, int64_t r) { return mask(rank_dropout(ad, i), m / c.sample_rows, r); });
  if (ad.given_factors) add([](int64_t m, int64_t r) { return given_factor(m, r); });
  if (!c.sample_adapters.empty()) {
    add([&](int64_t m, int64_t) {
      const auto sample = static_cast<size_t>(m / c.sample_rows);
      return c.sample_adapters[sample] == static_cast<int64_t>(i) ? 1.0 : 0.0;
    });
  }
  return list;
}

}  // namespace

// A NaN or a number out of bounds fails; the message names the first one.
void expect_close(const char* name, const Operand& got, const ExactMatrix& exact, Pass pass,
                  DType sums, bool rounds_partials) {
  if (!got.view().defined()) return;
  ASSERT_EQ(got.view().rows(), exact.rows) << name;
  ASSERT_EQ(got.view().cols(), exact.cols) << name;
  int64_t wrong = 0;
  std::string first;
  for (int64_t i = 0; i < exact.rows; ++i) {
    for (int64_t j = 0; j < exact.cols; ++j) {
      Exact e = exact(i, j);
      if (!rounds_partials) e.stored = 0;
      const double allowed = tolerance(e, pass, got.view().dtype, sums, exact.count);
      const double v = got.at(i, j);
      if (std::abs(v - e.value) <= allowed) continue;
      if (wrong++ == 0) {
        first = "[" + std::to_string(i) + ", " + std::to_string(j) + "] is " + std::to_string(v) +
                ", expected " + std::to_string(e.value) + " +- " + std::to_string(allowed);
      }
    }
  }
  EXPECT_EQ(wrong, 0) << name << ": " << wrong << " of " << exact.values.size() << ", first "
                      << first;
  EXPECT_TRUE(got.guards_intact()) << name << ": written outside its elements";
}

std::string describe(const LoraCase& c) {
  std::string text = "M " + std::to_string(c.m) + " K " + std::to_string(c.k) + " N " +
                     std::to_string(c.n) + " " + dtype_name(c.dtype) + (c.bias ? " bias" : "") +
                     " x " + layout_name(c.x) + " w " + layout_name(c.w) + " y " +
                     layout_name(c.y) + " dw " + layout_name(c.dw) + " dA " +
                     layout_name(c.adapters_out);
  for (const AdapterCase& ad : c.adapters) {
    text += " (R " + std::to_string(ad.rank) + " " + dtype_name(ad.dtype) + " p " +
            std::to_string(ad.dropout) + " hidden " + std::to_string(ad.hidden_dropout) + " rank " +
            std::to_string(ad.rank_dropout) + (ad.given_factors ? " given" : "") + " s " +
            std::to_string(ad.scale) + ")";
  }
  if (c.sample_rows != 1) text += " samples of " + std::to_string(c.sample_rows);
  for (const int64_t adapter : c.sample_adapters) text += " " + std::to_string(adapter);
  return text;
}

const LoraLinearKernel* find_kernel(const std::string& name) {
  for (const LoraLinearKernel& kernel : lora_linear_kernels()) {
    if (name == kernel.name) return &kernel;
  }
  return nullptr;
}

bool borrows(const LoraLinearKernel& kernel) { return std::strcmp(kernel.name, "torch") == 0; }

LoraProblem::LoraProblem(const LoraCase& c)
    : case_(c), sums_(c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32) {
  Random random(c.seed);
  const auto real = [&] { return random.real(); };
  // One number in eight is zero: a mask that is guessed from x != 0 is then wrong (case VN5).
  const auto sparse = [&] { return random.below(8) == 0 ? 0.0 : random.real(); };
  x_ = Operand::matrix(c.dtype, c.m, c.k, c.x, sparse);
  w_ = Operand::matrix(c.dtype, c.n, c.k, c.w, real);
  if (c.bias) bias_ = Operand::vector(c.dtype, c.n, c.w, real);
  dy_ = Operand::matrix(c.dtype, c.m, c.n, c.x, real);
  layer_.x = x_.read();
  layer_.w = w_.read();
  if (c.bias) layer_.bias = bias_.read();
  int64_t total_rank = 0;
  for (size_t i = 0; i < c.adapters.size(); ++i) {
    const AdapterCase& ad = c.adapters[i];
    a_.push_back(Operand::matrix(ad.dtype, ad.rank, c.k, c.x, real));
    b_.push_back(Operand::matrix(ad.dtype, c.n, ad.rank, c.x, real));
    layer_.adapters.push_back({a_[i].read(), b_[i].read(), ad.scale, ad.dropout, kDropoutSeed,
                               dropout_offset(i), gates(c, i)});
    int64_t at = 0;
    const auto factor = [&] {
      const double value = given_factor(at / ad.rank, at % ad.rank);
      ++at;
      return value;
    };
    factors_.push_back(Operand::matrix(sums_, ad.given_factors ? c.m : 0, ad.rank, c.x, factor));
    total_rank += ad.rank;
  }
  forward_ = oracle_forward(layer_);
  size_t at = 0;
  h_ = Operand::matrix(sums_, c.m, total_rank, Layout::kDense,
                       [&] { return forward_.h.values[at++].value; });
  backward_ = oracle_backward(layer_, dy_.read(), h_.read());
}

std::vector<LoraAdapter> LoraProblem::adapters() const {
  std::vector<LoraAdapter> list;
  for (size_t i = 0; i < case_.adapters.size(); ++i) {
    list.push_back({a_[i].view(),
                    b_[i].view(),
                    case_.adapters[i].scale,
                    {case_.adapters[i].dropout, kDropoutSeed, dropout_offset(i)},
                    hidden_dropout(case_.adapters[i], i),
                    rank_dropout(case_.adapters[i], i),
                    case_.adapters[i].given_factors ? factors_[i].view() : TensorView()});
  }
  return list;
}

LoraSamples LoraProblem::samples() const {
  LoraSamples s;
  s.rows = case_.sample_rows;
  if (!case_.sample_adapters.empty()) s.adapter = case_.sample_adapters.data();
  return s;
}

ForwardRun LoraProblem::forward_outputs() const {
  ForwardRun run;
  run.y = Operand::output(case_.dtype, case_.m, case_.n, case_.y);
  if (!a_.empty()) run.h = Operand::output(sums_, case_.m, h_.view().cols());
  return run;
}

LoraLinearArgs LoraProblem::forward_args(const ForwardRun& run, Views* views) const {
  views->adapters = adapters();
  return {x_.view(),    w_.view(),    bias_.view(), views->adapters,
          run.y.view(), run.h.view(), nullptr,      samples()};
}

ForwardRun LoraProblem::forward(const ExecContext& ctx, const char* kernel) const {
  ForwardRun run = forward_outputs();
  Views views;
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel);
  run.status = lora_linear_forward(ctx, forward_args(run, &views));
  return run;
}

BackwardRun LoraProblem::backward_outputs(const Wanted& wanted) const {
  BackwardRun run;
  if (wanted.dx) run.dx = Operand::output(case_.dtype, case_.m, case_.k, case_.y);
  if (wanted.dw) run.dw = Operand::output(case_.dtype, case_.n, case_.k, case_.dw);
  if (wanted.dbias) run.dbias = Operand::vector_output(case_.dtype, case_.n, case_.dw);
  for (const AdapterCase& ad : case_.adapters) {
    run.da.push_back(wanted.da ? Operand::output(ad.dtype, ad.rank, case_.k, case_.adapters_out)
                               : Operand());
    run.db.push_back(wanted.db ? Operand::output(ad.dtype, case_.n, ad.rank, case_.adapters_out)
                               : Operand());
  }
  return run;
}

LoraLinearBackwardArgs LoraProblem::backward_args(const BackwardRun& run, Views* views) const {
  views->adapters = adapters();
  bool needs_h = false;
  for (size_t i = 0; i < run.da.size(); ++i) {
    views->da.push_back(run.da[i].view());
    views->db.push_back(run.db[i].view());
    needs_h = needs_h || run.db[i].view().defined();
  }
  LoraLinearBackwardArgs args;
  args.dy = dy_.view();
  args.x = x_.view();
  args.w = w_.view();
  args.adapters = views->adapters;
  if (needs_h) args.h = h_.view();
  args.grads = {run.dx.view(), run.dw.view(), run.dbias.view(), views->da, views->db};
  args.samples = samples();
  return args;
}

BackwardRun LoraProblem::backward(const ExecContext& ctx, const char* kernel,
                                  const Wanted& wanted) const {
  BackwardRun run = backward_outputs(wanted);
  Views views;
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel);
  run.status = lora_linear_backward(ctx, backward_args(run, &views));
  return run;
}

void LoraProblem::expect_correct(const ForwardRun& run, bool rounds_partials) const {
  ASSERT_TRUE(run.status.ok()) << run.status.message();
  expect_close("y", run.y, forward_.y, Pass::kForward, sums_, rounds_partials);
  expect_close("h", run.h, forward_.h, Pass::kForward, sums_, rounds_partials);
}

void LoraProblem::expect_correct(const BackwardRun& run, bool rounds_partials) const {
  ASSERT_TRUE(run.status.ok()) << run.status.message();
  const auto close = [&](const char* name, const Operand& got, const ExactMatrix& exact) {
    expect_close(name, got, exact, Pass::kBackward, sums_, rounds_partials);
  };
  close("dx", run.dx, backward_.dx);
  close("dw", run.dw, backward_.dw);
  close("dbias", run.dbias, backward_.dbias);
  for (size_t i = 0; i < run.da.size(); ++i) {
    close(("dA of adapter " + std::to_string(i)).c_str(), run.da[i], backward_.da[i]);
    close(("dB of adapter " + std::to_string(i)).c_str(), run.db[i], backward_.db[i]);
  }
}

void LoraProblem::expect_inputs_untouched() const {
  EXPECT_TRUE(x_.untouched()) << "x was written";
  EXPECT_TRUE(w_.untouched()) << "weight was written";
  EXPECT_TRUE(bias_.untouched()) << "bias was written";
  EXPECT_TRUE(dy_.untouched()) << "grad was written";
  EXPECT_TRUE(h_.untouched()) << "hidden was written";
  for (size_t i = 0; i < a_.size(); ++i) {
    EXPECT_TRUE(a_[i].untouched()) << "lora_A was written";
    EXPECT_TRUE(b_[i].untouched()) << "lora_B was written";
  }
}

}  // namespace loraaccel::test
