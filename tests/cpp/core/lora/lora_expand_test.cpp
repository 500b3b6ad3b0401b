// The second half of an adapter, for matrices by rows and by columns: every kernel of the list against plain sums.
#include "loraaccel/lora_expand.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/env.h"
#include "support/kernel_fixture.h"
#include "support/random.h"

namespace loraaccel::test {
namespace {

struct ExpandCase {
  int64_t pairs = 3, m = 37, n = 21, rank = 5;
  DType base = DType::kFloat32, hidden = DType::kFloat32, b = DType::kFloat32;
  Layout layout = Layout::kTransposed;
  bool in_place = false;
};

std::string describe(const ExpandCase& c) {
  return std::to_string(c.pairs) + " pairs M " + std::to_string(c.m) + " N " + std::to_string(c.n) +
         " R " + std::to_string(c.rank) + " base " + dtype_name(c.base) + " hidden " +
         dtype_name(c.hidden) + " B " + dtype_name(c.b) + " " + layout_name(c.layout) +
         (c.in_place ? " in place" : "");
}

class LoraExpand : public LoraLinearKernels {
 protected:
  void check(const ExpandCase& c) const;
};
INSTANTIATE_TEST_SUITE_P(Kernel, LoraExpand, every_kernel(), kernel_test_name);

constexpr double kScale = -1.25;

void LoraExpand::check(const ExpandCase& c) const {
  SCOPED_TRACE(describe(c));
  Random random(3);
  const auto real = [&] { return random.real(); };
  const DType sums = c.b == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const Operand b = Operand::matrix(c.b, c.n, c.rank, Layout::kDense, real);
  std::vector<Operand> base, hidden, dy, y, dhidden;
  std::vector<TensorView> base_views, hidden_views, dy_views, y_views, dh_views;
  std::vector<ExactMatrix> exact_y, exact_dh;
  ExactMatrix exact_db(c.n, c.rank);
  exact_db.count = c.pairs * c.m;
  for (int64_t i = 0; i < c.pairs; ++i) {
    base.push_back(Operand::matrix(c.base, c.m, c.n, c.layout, real));
    hidden.push_back(Operand::matrix(c.hidden, c.m, c.rank, c.layout, real));
    dy.push_back(Operand::matrix(c.base, c.m, c.n, c.layout, real));
    y.push_back(Operand::output(c.base, c.m, c.n, c.layout));
    dhidden.push_back(Operand::output(c.hidden, c.m, c.rank, c.layout));
    ExactMatrix ey(c.m, c.n), eh(c.m, c.rank);
    ey.count = c.rank + 1;
    eh.count = c.n;
    for (int64_t m = 0; m < c.m; ++m) {
      for (int64_t n = 0; n < c.n; ++n) {
        ey(m, n) = {base[i].at(m, n), std::abs(base[i].at(m, n)), 0};
        for (int64_t r = 0; r < c.rank; ++r) {
          const double up = kScale * hidden[i].at(m, r) * b.at(n, r);
          const double back = kScale * dy[i].at(m, n) * b.at(n, r);
          const double factor = kScale * dy[i].at(m, n) * hidden[i].at(m, r);
          ey(m, n).value += up;
          ey(m, n).terms += std::abs(up);
          eh(m, r).value += back;
          eh(m, r).terms += std::abs(back);
          exact_db(n, r).value += factor;
          exact_db(n, r).terms += std::abs(factor);
        }
      }
    }
    exact_y.push_back(ey);
    exact_dh.push_back(eh);
  }
  for (int64_t i = 0; i < c.pairs; ++i) {
    base_views.push_back(base[i].view());
    hidden_views.push_back(hidden[i].view());
    dy_views.push_back(dy[i].view());
    y_views.push_back(c.in_place ? base[i].view() : y[i].view());
    dh_views.push_back(dhidden[i].view());
  }
  TestHost host;
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  const Operand db = Operand::output(c.b, c.n, c.rank);
  const Status back = lora_expand_backward(
      context(&host, 3), {dy_views, b.view(), kScale, hidden_views, dh_views, db.view()});
  const Status status =
      lora_expand_forward(context(&host, 3), {b.view(), kScale, base_views, hidden_views, y_views});
  if (status.code() == StatusCode::kKernelUnavailable) {
    EXPECT_TRUE(c.b == DType::kFloat64 || c.layout == Layout::kStepped ||
                c.layout == Layout::kReversed)
        << status.message();
    return;
  }
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(back.ok()) << back.message();
  EXPECT_STREQ(host.kernel_ran, kernel_->name);
  for (int64_t i = 0; i < c.pairs; ++i) {
    expect_close("y", c.in_place ? base[i] : y[i], exact_y[i], Pass::kForward, sums, false);
    expect_close("dh", dhidden[i], exact_dh[i], Pass::kBackward, sums, false);
    EXPECT_TRUE(hidden[i].untouched() && dy[i].untouched());
    EXPECT_TRUE(c.in_place || base[i].untouched());
  }
  expect_close("db", db, exact_db, Pass::kBackward, sums, false);
  EXPECT_EQ(host.live_bytes(), 0);
  EXPECT_TRUE(host.blocks_intact());
}

TEST_P(LoraExpand, Layouts) {
  for (const Layout layout : kOutputLayouts) {
    ExpandCase c;
    c.layout = layout;
    check(c);
    c.in_place = true;
    check(c);
  }
}

TEST_P(LoraExpand, Sizes) {
  for (const Layout layout : {Layout::kDense, Layout::kTransposed}) {
    for (const int64_t m : {1, 31, 32, 33, 300}) {
      for (const int64_t n : {1, 20, 64, 150}) {
        for (const int64_t rank : {1, 16, 33}) {
          ExpandCase c;
          c.layout = layout;
          c.pairs = 2;
          c.m = m;
          c.n = n;
          c.rank = rank;
          check(c);
        }
      }
    }
  }
}

TEST_P(LoraExpand, ManyPairs) {  // more than one group of the sum over pairs
  for (const Layout layout : {Layout::kDense, Layout::kTransposed}) {
    ExpandCase c;
    c.layout = layout;
    c.pairs = 150;
    c.m = 9;
    c.n = 4;
    c.rank = 3;
    check(c);
  }
}

TEST_P(LoraExpand, Types) {
  for (const Layout layout : {Layout::kDense, Layout::kTransposed}) {
    for (const DType base : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const DType hidden : {DType::kFloat32, DType::kBFloat16}) {
        for (const DType b : {DType::kFloat32, DType::kFloat16}) {
          ExpandCase c;
          c.layout = layout;
          c.base = base;
          c.hidden = hidden;
          c.b = b;
          check(c);
        }
      }
    }
    ExpandCase c;
    c.layout = layout;
    c.base = c.hidden = c.b = DType::kFloat64;
    check(c);
  }
}

TEST(LoraExpandErrors, NameWhatWasFound) {
  std::vector<float> base(12), hidden(6), y(12), b(8);
  const auto matrix = [](std::vector<float>& v, int64_t rows, int64_t cols) {
    return TensorView::matrix(v.data(), DType::kFloat32, rows, cols);
  };
  const TensorView bases[] = {matrix(base, 3, 4)};
  const TensorView hiddens[] = {matrix(hidden, 3, 2)};
  const TensorView outputs[] = {matrix(y, 3, 4)};
  const LoraExpandArgs valid = {matrix(b, 4, 2), 1, bases, hiddens, outputs};
  TestHost host;
  const auto expect = [&](const LoraExpandArgs& args, const char* text) {
    const Status status = lora_expand_forward(host.context(1), args);
    EXPECT_FALSE(status.ok());
    EXPECT_NE(std::string(status.message()).find(text), std::string::npos) << status.message();
  };
  LoraExpandArgs wrong = valid;
  wrong.b = matrix(b, 2, 4);
  expect(wrong, "hidden has shape [3, 2], expected [M, 4] to go with lora_B [2, 4]");
  wrong = valid;
  wrong.b = matrix(b, 2, 2);
  expect(wrong, "base has shape [3, 4], expected [3, 2] (M, N)");
  wrong = valid;
  wrong.y = {};
  expect(wrong, "1 and 0 matrices");
  wrong = valid;
  wrong.scale = std::nan("");
  expect(wrong, "scaling is nan");

  wrong = valid;
  const TensorView over[] = {TensorView::matrix(b.data(), DType::kFloat32, 3, 4)};
  wrong.y = over;
  expect(wrong, "y overlaps an input");

  EXPECT_TRUE(lora_expand_forward(host.context(1), valid).ok());
}

}  // namespace
}  // namespace loraaccel::test
