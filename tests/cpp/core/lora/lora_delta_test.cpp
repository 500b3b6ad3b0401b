// The adapters alone, added to a given output: every kernel of the list against the oracle.
#include "loraaccel/lora_delta.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/env.h"
#include "support/kernel_fixture.h"
#include "support/philox_reference.h"
#include "support/random.h"

namespace loraaccel::test {
namespace {

constexpr uint64_t kSeed = 0xFEDCBA9876543210U;

struct DeltaCase {
  int64_t m = 9, k = 70, n = 35;
  DType x = DType::kFloat32, base = DType::kFloat32, adapter = DType::kFloat32;
  std::vector<int64_t> ranks = {3, 8};
  double input_dropout = 0, hidden_dropout = 0, output_dropout = 0;
  Layout layout = Layout::kDense;
  bool in_place = false;
};

std::string describe(const DeltaCase& c) {
  return "M " + std::to_string(c.m) + " K " + std::to_string(c.k) + " N " + std::to_string(c.n) +
         " x " + dtype_name(c.x) + " base " + dtype_name(c.base) + " adapter " +
         dtype_name(c.adapter) + " " + std::to_string(c.ranks.size()) + " adapters, p " +
         std::to_string(c.input_dropout) + " " + std::to_string(c.hidden_dropout) + " " +
         std::to_string(c.output_dropout) + " " + layout_name(c.layout) +
         (c.in_place ? " in place" : "");
}

class LoraDelta : public LoraLinearKernels {
 protected:
  void check(const DeltaCase& c) const;
};
INSTANTIATE_TEST_SUITE_P(Kernel, LoraDelta, every_kernel(), kernel_test_name);

Matrix mask(const DropoutSpec& d, int64_t rows, int64_t cols) {
  Matrix factors(rows, cols);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      const bool keeps = d.p <= 0 || dropout_keeps(d.p, d.seed, d.offset, i, j);
      factors(i, j) = keeps ? 1 / (1 - d.p) : 0;
    }
  }
  return factors;
}

void LoraDelta::check(const DeltaCase& c) const {
  SCOPED_TRACE(describe(c));
  Random random(7);
  const auto real = [&] { return random.real(); };
  const Operand x = Operand::matrix(c.x, c.m, c.k, c.layout, real);
  const Operand base =
      Operand::matrix(c.base, c.m, c.n, c.in_place ? Layout::kDense : c.layout, real);
  const Operand dy = Operand::matrix(c.base, c.m, c.n, c.layout, real);
  std::vector<Operand> a, b, da, db;
  std::vector<LoraAdapter> adapters;
  OracleLayer layer;
  layer.x = x.read();
  layer.w = Matrix(c.n, c.k);
  int64_t rank = 0;
  for (size_t i = 0; i < c.ranks.size(); ++i) {
    a.push_back(Operand::matrix(c.adapter, c.ranks[i], c.k, c.layout, real));
    b.push_back(Operand::matrix(c.adapter, c.n, c.ranks[i], c.layout, real));
    da.push_back(Operand::output(c.adapter, c.ranks[i], c.k));
    db.push_back(Operand::output(c.adapter, c.n, c.ranks[i]));
    LoraAdapter ad;
    ad.a = a[i].view();
    ad.b = b[i].view();
    ad.scale = 1.5 - static_cast<double>(i);
    ad.dropout = {c.input_dropout, kSeed, i};
    ad.hidden = {c.hidden_dropout, kSeed, 10 + i};
    adapters.push_back(ad);
    layer.adapters.push_back({a[i].read(),
                              b[i].read(),
                              ad.scale,
                              c.input_dropout,
                              kSeed,
                              i,
                              {mask(ad.hidden, c.m, c.ranks[i])}});
    rank += c.ranks[i];
  }
  const DropoutSpec output = {c.output_dropout, kSeed, 99};
  const Matrix kept = mask(output, c.m, c.n);
  const DType sums = c.x == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;

  OracleForward exact = oracle_forward(layer);
  Matrix masked_dy = dy.read();
  for (int64_t m = 0; m < c.m; ++m) {
    for (int64_t n = 0; n < c.n; ++n) {
      Exact& e = exact.y(m, n);
      e.value = e.value * kept(m, n) + base.at(m, n);
      e.terms = e.terms * kept(m, n) + std::abs(base.at(m, n));
      masked_dy(m, n) *= kept(m, n);
    }
  }
  size_t at = 0;
  const Operand h =
      Operand::matrix(sums, c.m, rank, Layout::kDense, [&] { return exact.h.values[at++].value; });
  const OracleBackward gradients = oracle_backward(layer, masked_dy, h.read());

  TestHost host;
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  Operand y = Operand::output(c.base, c.m, c.n);
  if (c.in_place) {
    size_t next = 0;
    y = Operand::matrix(c.base, c.m, c.n, Layout::kDense, [&] {
      const auto i = static_cast<int64_t>(next++);
      return base.at(i / c.n, i % c.n);
    });
  }
  const Operand got_h = Operand::output(sums, c.m, rank);
  LoraDeltaArgs args;
  args.x = x.view();
  args.adapters = adapters;
  args.base = c.in_place ? y.view() : base.view();
  args.y = y.view();
  args.h = got_h.view();
  args.output = output;
  const Status forward = lora_delta_forward(context(&host, 3), args);
  if (forward.code() == StatusCode::kKernelUnavailable) {
    EXPECT_EQ(c.x, DType::kFloat64) << forward.message();
    return;
  }
  ASSERT_TRUE(forward.ok()) << forward.message();
  EXPECT_STREQ(host.kernel_ran, kernel_->name);
  expect_close("y", y, exact.y, Pass::kForward, sums, false);
  expect_close("h", got_h, exact.h, Pass::kForward, sums, false);

  const Operand dx = Operand::output(c.x, c.m, c.k);
  std::vector<TensorView> da_views, db_views;
  for (size_t i = 0; i < adapters.size(); ++i) {
    da_views.push_back(da[i].view());
    db_views.push_back(db[i].view());
  }
  LoraDeltaBackwardArgs back;
  back.dy = dy.view();
  back.x = x.view();
  back.adapters = adapters;
  back.h = h.view();
  back.dx = dx.view();
  back.da = da_views;
  back.db = db_views;
  back.output = output;
  const Status backward = lora_delta_backward(context(&host, 3), back);
  ASSERT_TRUE(backward.ok()) << backward.message();
  expect_close("dx", dx, gradients.dx, Pass::kBackward, sums, false);
  for (size_t i = 0; i < adapters.size(); ++i) {
    expect_close("dA", da[i], gradients.da[i], Pass::kBackward, sums, false);
    expect_close("dB", db[i], gradients.db[i], Pass::kBackward, sums, false);
  }
  EXPECT_TRUE(x.untouched() && base.untouched() && dy.untouched());
  EXPECT_EQ(host.live_bytes(), 0);
  EXPECT_TRUE(host.blocks_intact());
}

TEST_P(LoraDelta, Types) {
  for (const DType x : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const DType base : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const DType adapter : {DType::kFloat32, DType::kBFloat16}) {
        DeltaCase c;
        c.x = x;
        c.base = base;
        c.adapter = adapter;
        check(c);
      }
    }
  }
  DeltaCase c;
  c.x = c.base = c.adapter = DType::kFloat64;
  check(c);
}

TEST_P(LoraDelta, Sizes) {
  for (const int64_t m : {1, 14, 65, 200}) {
    for (const int64_t n : {1, 32, 33, 300}) {
      DeltaCase c;
      c.m = m;
      c.n = n;
      c.ranks = {5};
      check(c);
    }
  }
}

TEST_P(LoraDelta, Dropouts) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    for (const double input : {0.0, 0.3}) {
      for (const double hidden : {0.0, 0.4}) {
        for (const double output : {0.0, 0.5}) {
          DeltaCase c;
          c.x = c.base = type;
          c.n = 130;
          c.input_dropout = input;
          c.hidden_dropout = hidden;
          c.output_dropout = output;
          check(c);
        }
      }
    }
  }
}

TEST_P(LoraDelta, LayoutsAndPlace) {
  for (const Layout layout : kInputLayouts) {
    DeltaCase c;
    c.layout = layout;
    check(c);
  }
  for (const double p : {0.0, 0.5}) {
    DeltaCase c;
    c.in_place = true;
    c.base = DType::kBFloat16;
    c.output_dropout = p;
    check(c);
  }
}

TEST(LoraDeltaErrors, NameWhatWasFound) {
  std::vector<float> x(3 * 8), base(3 * 5), y(3 * 5), a(2 * 8), b(5 * 2), h(3 * 2);
  const auto matrix = [](std::vector<float>& v, int64_t rows, int64_t cols) {
    return TensorView::matrix(v.data(), DType::kFloat32, rows, cols);
  };
  std::vector<LoraAdapter> adapters(1);
  adapters[0].a = matrix(a, 2, 8);
  adapters[0].b = matrix(b, 5, 2);
  LoraDeltaArgs valid;
  valid.x = matrix(x, 3, 8);
  valid.base = matrix(base, 3, 5);
  valid.adapters = adapters;
  valid.y = matrix(y, 3, 5);
  valid.h = matrix(h, 3, 2);
  TestHost host;
  const auto message = [&](const LoraDeltaArgs& args) {
    const Status status = lora_delta_forward(host.context(1), args);
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  };
  const auto expect = [&](const LoraDeltaArgs& args, const char* text) {
    EXPECT_NE(message(args).find(text), std::string::npos) << message(args);
  };
  LoraDeltaArgs wrong = valid;
  wrong.adapters = {};
  expect(wrong, "lora_delta: no adapters, expected at least one");
  wrong = valid;
  wrong.base = matrix(base, 5, 3);
  expect(wrong, "base has shape [5, 3], expected [3, 3] (M, N)");
  wrong = valid;
  wrong.base = matrix(base, 3, 4);
  expect(wrong, "lora_B has shape [5, 2], expected [4, 2] (N, R)");
  wrong = valid;
  wrong.y.dtype = DType::kBFloat16;
  expect(wrong, "y is bfloat16, expected float32 as base");
  wrong = valid;
  wrong.y = matrix(x, 3, 5);
  expect(wrong, "y overlaps an input");
  wrong = valid;
  wrong.output.p = 2;
  expect(wrong, "output_dropout is 2");
  wrong = valid;
  wrong.h = matrix(h, 2, 3);
  expect(wrong, "hidden has shape [2, 3], expected [3, 2]");
  EXPECT_TRUE(lora_delta_forward(host.context(1), valid).ok());
}

}  // namespace
}  // namespace loraaccel::test
