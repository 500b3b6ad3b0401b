// Norms of adapted weights and gains of columns: every kernel of the list against plain sums in double.
#include "loraaccel/dora.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/env.h"
#include "support/kernel_fixture.h"
#include "support/random.h"

namespace loraaccel::test {
namespace {

class Dora : public LoraLinearKernels {
 protected:
  void check_gain(DType type, bool bias, bool centred, int64_t cols) const;
};
INSTANTIATE_TEST_SUITE_P(Kernel, Dora, every_kernel(), kernel_test_name);

double roundoff(DType t) {
  switch (t) {
    case DType::kBFloat16:
      return 0x1p-8;
    case DType::kFloat16:
      return 0x1p-11;
    case DType::kFloat32:
      return 0x1p-24;
    default:
      return 0x1p-53;
  }
}

TEST_P(Dora, WeightNorms) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    for (const bool weight : {true, false}) {
      for (const int64_t inputs : {1, 33, 300}) {
        SCOPED_TRACE(std::string(dtype_name(type)) + (weight ? " weight " : " none ") +
                     std::to_string(inputs));
        Random random(5);
        const auto real = [&] { return random.real(); };
        const int64_t outputs = 70;
        const DType adapter = type == DType::kFloat64 ? type : DType::kFloat32;
        const Operand w = Operand::matrix(type, outputs, inputs, Layout::kPadded, real);
        std::vector<Operand> a, b;
        std::vector<LoraAdapter> adapters(2);
        for (const int64_t rank : {3, 8}) {
          a.push_back(Operand::matrix(adapter, rank, inputs, Layout::kDense, real));
          b.push_back(Operand::matrix(adapter, outputs, rank, Layout::kTransposed, real));
        }
        for (size_t i = 0; i < 2; ++i) {
          adapters[i].a = a[i].view();
          adapters[i].b = b[i].view();
          adapters[i].scale = i == 0 ? 1.5 : -0.5;
        }
        const Operand norms = Operand::vector_output(adapter, outputs);
        TestHost host;
        const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
        const Status status = weight_norms(
            context(&host, 3), {weight ? w.view() : TensorView(), adapters, norms.view()});
        if (status.code() == StatusCode::kKernelUnavailable) {
          EXPECT_EQ(type, DType::kFloat64) << status.message();
          continue;
        }
        ASSERT_TRUE(status.ok()) << status.message();
        for (int64_t n = 0; n < outputs; ++n) {
          double square = 0, terms = 0;
          for (int64_t k = 0; k < inputs; ++k) {
            double v = weight ? w.at(n, k) : 0, size = std::abs(v);
            for (size_t i = 0; i < 2; ++i) {
              for (int64_t r = 0; r < a[i].view().rows(); ++r) {
                const double term = adapters[i].scale * b[i].at(n, r) * a[i].at(r, k);
                v += term;
                size += std::abs(term);
              }
            }
            square += v * v;
            terms += size * size;
          }
          const double u = adapter == DType::kFloat64 ? 0x1p-50 : 0x1p-20;
          EXPECT_NEAR(norms.at(n), std::sqrt(square), u * (std::sqrt(terms) + std::sqrt(square)));
        }
        EXPECT_EQ(host.live_bytes(), 0);
        EXPECT_TRUE(host.blocks_intact() && norms.guards_intact());
      }
    }
  }
}

void Dora::check_gain(DType type, bool bias, bool centred, int64_t cols) const {
  SCOPED_TRACE(std::string(dtype_name(type)) + (bias ? " bias " : " none ") +
               (centred ? "centred " : "") + std::to_string(cols));
  Random random(6);
  const auto real = [&] { return random.real(); };
  const int64_t rows = 150;  // more than one block of a sum
  const DType sums = type == DType::kFloat64 ? type : DType::kFloat32;
  const Operand z = Operand::matrix(type, rows, cols, Layout::kDense, real);
  const Operand dy = Operand::matrix(type, rows, cols, Layout::kPadded, real);
  const Operand gain = Operand::vector(sums, cols, Layout::kDense, real);
  const Operand b = Operand::vector(type, cols, Layout::kDense, real);
  const Operand y = Operand::output(type, rows, cols), dz = Operand::output(type, rows, cols);
  const Operand dgain = Operand::vector_output(sums, cols);
  const Operand dbias = Operand::vector_output(type, cols);
  TestHost host;
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  const TensorView offset = bias ? b.view() : TensorView();
  const Status status =
      column_gain_forward(context(&host, 3), {z.view(), gain.view(), offset, y.view(), centred});
  const Status back = column_gain_backward(
      context(&host, 3), {dy.view(), z.view(), gain.view(), offset, dz.view(), dgain.view(),
                          bias ? dbias.view() : TensorView(), centred});
  if (status.code() == StatusCode::kKernelUnavailable) {
    EXPECT_EQ(type, DType::kFloat64) << status.message();
    return;
  }
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(back.ok()) << back.message();
  const double u = 2 * roundoff(type);
  const double tiny = type == DType::kFloat16 ? 0x1p-24 : 0;  // below its normal numbers
  for (int64_t n = 0; n < cols; ++n) {
    const double g = gain.at(n), at = bias ? b.at(n) : 0;
    double sum = 0, terms = 0, grads = 0, sizes = 0;
    for (int64_t m = 0; m < rows; ++m) {
      const double v = z.at(m, n), up = dy.at(m, n);
      const double value = centred ? v + (g - 1) * (v - at) : g * v + at;
      const double size = std::abs(v) + (std::abs(g) + 1) * (std::abs(v) + std::abs(at));
      EXPECT_NEAR(y.at(m, n), value, u * std::abs(value) + 0x1p-22 * size + tiny);
      EXPECT_NEAR(dz.at(m, n), g * up, u * std::abs(g * up) + tiny);
      sum += up * (centred ? v - at : v);
      terms += std::abs(up) * (std::abs(v) + std::abs(at));
      grads += up;
      sizes += std::abs(up);
    }
    EXPECT_NEAR(dgain.at(n), sum, 0x1p-18 * terms);
    if (bias) {
      const double wanted = (centred ? 1 - g : 1) * grads;
      EXPECT_NEAR(dbias.at(n), wanted,
                  u * std::abs(wanted) + 0x1p-18 * (std::abs(g) + 1) * sizes + tiny);
    }
  }
  EXPECT_EQ(host.live_bytes(), 0);
  EXPECT_TRUE(y.guards_intact() && dz.guards_intact() && dgain.guards_intact());
}

TEST_P(Dora, ColumnGain) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (const bool bias : {true, false}) {
      for (const bool centred : {true, false}) {
        for (const int64_t cols : {1, 15, 32, 300}) check_gain(type, bias, centred, cols);
      }
    }
  }
}

// Centred, with a gain of 1, the output is the input, bit for bit.
TEST_P(Dora, GainOfOne) {
  std::vector<float> z(40), gain(8, 1), bias(8), y(40);
  Random random(8);
  for (float& v : z) v = static_cast<float>(random.real());
  for (float& v : bias) v = static_cast<float>(random.real());
  TestHost host;
  const ScopedEnv forced("LORAACCEL_FORCE_KERNEL", kernel_->name);
  ASSERT_TRUE(column_gain_forward(context(&host, 2),
                                  {TensorView::matrix(z.data(), DType::kFloat32, 5, 8),
                                   TensorView::vector(gain.data(), DType::kFloat32, 8),
                                   TensorView::vector(bias.data(), DType::kFloat32, 8),
                                   TensorView::matrix(y.data(), DType::kFloat32, 5, 8), true})
                  .ok());
  EXPECT_EQ(y, z);
}

TEST(DoraErrors, NameWhatWasFound) {
  std::vector<float> z(40), gain(8), y(40);
  const auto matrix = [](std::vector<float>& v, int64_t rows, int64_t cols) {
    return TensorView::matrix(v.data(), DType::kFloat32, rows, cols);
  };
  TestHost host;
  const ColumnGainArgs valid = {matrix(z, 5, 8),
                                TensorView::vector(gain.data(), DType::kFloat32, 8), TensorView(),
                                matrix(y, 5, 8)};
  const auto expect = [&](const ColumnGainArgs& args, const char* text) {
    const Status status = column_gain_forward(host.context(1), args);
    EXPECT_NE(std::string(status.message()).find(text), std::string::npos) << status.message();
  };
  ColumnGainArgs wrong = valid;
  wrong.z = matrix(z, 8, 5);
  expect(wrong, "gain has shape [8], expected [5] (N)");
  wrong = valid;
  wrong.y = matrix(z, 4, 8);
  expect(wrong, "y has shape [4, 8], expected [5, 8]");
  wrong = valid;
  wrong.gain.dtype = DType::kFloat64;
  expect(wrong, "gain is float64 and z float32");
  std::vector<LoraAdapter> adapters(1);
  adapters[0].a = matrix(z, 2, 8);
  adapters[0].b = matrix(y, 5, 3);
  const Status status =
      weight_norms(host.context(1),
                   {TensorView(), adapters, TensorView::vector(gain.data(), DType::kFloat32, 5)});
  EXPECT_NE(std::string(status.message()).find("lora_B has shape [5, 3], expected [5, 2]"),
            std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace loraaccel::test
