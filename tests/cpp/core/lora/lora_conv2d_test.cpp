// LoRA convolution: every kernel of the list against plain sums in double.
#include "loraaccel/lora_conv2d.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/env.h"
#include "support/kernel_fixture.h"
#include "support/random.h"

namespace loraaccel::test {
namespace {

struct ConvCase {
  ConvShape shape;
  int64_t outputs, rank;
};

// Images narrower and wider than a panel, one pixel, strides, gaps, no padding and much, 1x1 and 1x3 kernels, sums of one
// part and of two, more outputs than stay in a cache together.
const ConvCase kCases[] = {
    {{2, 5, 9, 8, {3, 3}, {1, 1}, {1, 1}, {1, 1}}, 7, 3},
    {{1, 3, 33, 70, {3, 3}, {1, 1}, {1, 1}, {1, 1}}, 20, 4},
    {{1, 4, 17, 33, {3, 3}, {2, 2}, {1, 1}, {1, 1}}, 17, 2},
    {{3, 8, 12, 12, {1, 1}, {1, 1}, {0, 0}, {1, 1}}, 33, 5},
    {{1, 6, 10, 10, {3, 3}, {1, 2}, {2, 0}, {2, 1}}, 15, 1},
    {{1, 3, 3, 3, {3, 3}, {1, 1}, {0, 0}, {1, 1}}, 4, 2},
    {{2, 3, 5, 6, {1, 3}, {1, 1}, {0, 1}, {1, 1}}, 3, 17},
    {{1, 300, 6, 7, {3, 3}, {1, 1}, {4, 3}, {1, 1}}, 9, 3},
    {{1, 40, 9, 9, {3, 3}, {1, 1}, {1, 1}, {1, 1}}, 600, 3},
};

class LoraConv2d : public LoraLinearKernels {
 protected:
  void check(const ConvCase& c, DType dtype, DType adapter, bool bias) const;
};
INSTANTIATE_TEST_SUITE_P(Kernel, LoraConv2d, every_kernel(), kernel_test_name);

void LoraConv2d::check(const ConvCase& c, DType dtype, DType adapter, bool biased) const {
  const ConvShape& s = c.shape;
  SCOPED_TRACE(std::to_string(s.channels) + " x " + std::to_string(s.height) + " x " +
               std::to_string(s.width) + " to " + std::to_string(c.outputs) + " " +
               dtype_name(dtype) + " " + dtype_name(adapter) + (biased ? " bias" : ""));
  Random random(4);
  const auto real = [&] { return random.real(); };
  const int64_t pixels = s.pixels(), taps = s.kernel[0] * s.kernel[1];
  const Operand x =
      Operand::matrix(dtype, s.samples * s.channels, s.height * s.width, Layout::kDense, real);
  const Operand w = Operand::matrix(dtype, c.outputs, s.inputs(), Layout::kDense, real);
  const Operand a = Operand::matrix(adapter, c.rank, s.inputs(), Layout::kDense, real);
  const Operand b = Operand::matrix(adapter, c.outputs, c.rank, Layout::kDense, real);
  const Operand bias = Operand::vector(dtype, c.outputs, Layout::kDense, real);
  const Operand y = Operand::output(dtype, s.samples * c.outputs, pixels);
  const Operand h = Operand::output(DType::kFloat32, s.samples * c.rank, pixels);
  LoraConv2dArgs args;
  args.shape = s;
  args.dtype = dtype;
  args.x = x.view().data;
  args.w = w.view();
  if (biased) args.bias = bias.view();
  args.a = a.view();
  args.b = b.view();
  args.scale = -1.5;
  args.y = const_cast<void*>(y.view().data);
  args.h = static_cast<float*>(const_cast<void*>(h.view().data));
  TestHost host;
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  const Status status = lora_conv2d_forward(context(&host, 3), args);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_STREQ(host.kernel_ran, kernel_->name);

  ExactMatrix exact_y(s.samples * c.outputs, pixels), exact_h(s.samples * c.rank, pixels);
  exact_y.count = exact_h.count = s.inputs();
  for (int64_t sample = 0; sample < s.samples; ++sample) {
    for (int64_t p = 0; p < pixels; ++p) {
      std::vector<double> column(static_cast<size_t>(s.inputs()));
      for (int64_t k = 0; k < s.inputs(); ++k) {
        const int64_t row =
            p / s.output(1) * s.stride[0] - s.padding[0] + k % taps / s.kernel[1] * s.dilation[0];
        const int64_t col =
            p % s.output(1) * s.stride[1] - s.padding[1] + k % taps % s.kernel[1] * s.dilation[1];
        if (row >= 0 && row < s.height && col >= 0 && col < s.width)
          column[static_cast<size_t>(k)] =
              x.at(sample * s.channels + k / taps, row * s.width + col);
      }
      const auto sum = [&](const Operand& m, int64_t i) {
        Exact e{};
        for (int64_t k = 0; k < s.inputs(); ++k) {
          const double term = m.at(i, k) * column[static_cast<size_t>(k)];
          e.value += term;
          e.terms += std::abs(term);
        }
        return e;
      };
      for (int64_t r = 0; r < c.rank; ++r) exact_h(sample * c.rank + r, p) = sum(a, r);
      for (int64_t n = 0; n < c.outputs; ++n) {
        Exact e = sum(w, n);
        if (biased) {
          e.value += bias.at(n);
          e.terms += std::abs(bias.at(n));
        }
        for (int64_t r = 0; r < c.rank; ++r) {
          const Exact& up = exact_h(sample * c.rank + r, p);
          e.value += args.scale * up.value * b.at(n, r);
          e.terms += std::abs(args.scale * b.at(n, r)) * up.terms;
        }
        exact_y(sample * c.outputs + n, p) = e;
      }
    }
  }
  if (adapter != dtype && dtype == DType::kBFloat16) {  // A in two parts of eight digits
    for (Exact& e : exact_h.values) e.stored += 0x1p-9 * e.terms;
  }
  expect_close("y", y, exact_y, Pass::kForward, DType::kFloat32, false);
  for (int64_t i = 0; i < exact_h.rows; ++i) {
    for (int64_t p = 0; p < pixels; ++p) {
      const Exact& e = exact_h(i, p);
      const bool split = adapter != dtype && dtype == DType::kBFloat16;
      EXPECT_NEAR(h.at(i, p), e.value,
                  0x1p-19 * std::sqrt(static_cast<double>(s.inputs())) * e.terms +
                      (split ? 0x1p-16 * e.terms : 0));
    }
  }
  EXPECT_TRUE(y.guards_intact() && h.guards_intact());
  EXPECT_TRUE(x.untouched() && w.untouched() && a.untouched());
  EXPECT_EQ(host.live_bytes(), 0);
  EXPECT_TRUE(host.blocks_intact());
}

TEST_P(LoraConv2d, ShapesAndTypes) {
  for (const ConvCase& c : kCases) {
    check(c, DType::kFloat32, DType::kFloat32, true);
    check(c, DType::kBFloat16, DType::kFloat32, true);
    check(c, DType::kBFloat16, DType::kBFloat16, false);
  }
  check(kCases[0], DType::kFloat16, DType::kFloat32, true);
  check(kCases[0], DType::kFloat32, DType::kBFloat16, false);
}

TEST(LoraConv2dErrors, NameWhatWasFound) {
  std::vector<float> x(72), w(4 * 18), a(2 * 18), b(8), y(4 * 36), h(2 * 36);
  const auto matrix = [](std::vector<float>& v, int64_t rows, int64_t cols) {
    return TensorView::matrix(v.data(), DType::kFloat32, rows, cols);
  };
  LoraConv2dArgs valid;
  valid.shape = {1, 2, 6, 6, {3, 3}, {1, 1}, {1, 1}, {1, 1}};
  valid.x = x.data();
  valid.w = matrix(w, 4, 18);
  valid.a = matrix(a, 2, 18);
  valid.b = matrix(b, 4, 2);
  valid.y = y.data();
  valid.h = h.data();
  TestHost host;
  const auto expect = [&](const LoraConv2dArgs& args, const char* text) {
    const Status status = lora_conv2d_forward(host.context(1), args);
    EXPECT_FALSE(status.ok());
    EXPECT_NE(std::string(status.message()).find(text), std::string::npos) << status.message();
  };
  LoraConv2dArgs wrong = valid;
  wrong.w = matrix(w, 4, 17);
  expect(wrong, "weight has shape [4, 17], expected [4, 18] (N, C kh kw)");
  wrong = valid;
  wrong.a = matrix(a, 2, 9);
  expect(wrong, "lora_A has shape [2, 9], expected [R, 18]");
  wrong = valid;
  wrong.b = matrix(b, 2, 4);
  expect(wrong, "lora_B has shape [2, 4], expected [4, 2]");
  wrong = valid;
  wrong.shape.kernel[0] = 9;
  wrong.w = matrix(w, 1, 54);
  expect(wrong, "the kernel is larger than the padded image");
  wrong = valid;
  wrong.shape.stride[1] = 0;
  expect(wrong, "stride");
  wrong = valid;
  wrong.scale = std::nan("");
  expect(wrong, "scaling is nan");
  EXPECT_TRUE(lora_conv2d_forward(host.context(1), valid).ok());
}

}  // namespace
}  // namespace loraaccel::test
