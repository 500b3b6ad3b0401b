// The activations of the vector tables against double arithmetic.
//
// Bounds of float32, u = 2^-24. The constants are what torch 2.13 reaches (x86, AVX-512; F.silu, F.gelu, F.relu and their
// gradients by autograd, 670000 arguments: -30..30, -0.01..0.01, -110..110, +-1e-45..1e-2): the largest error, and the
// largest relative to the result, which below -1 is of use for silu alone:
//
//                 f: absolute   relative            f': absolute   relative, v >= 0
//   silu             1.274e-6   2.92 u, v >= -87        9.76e-7    16.4 u
//   gelu             1.070e-6   5.90 u, v >= -1         2.56e-7     7.93 u
//   gelu_tanh        4.326e-7   4.29 u, v >= -1         1.039e-6   17.5 u
//   relu             0                                  0
//
// Further down torch's gelu and gelu_tanh lose every digit (3.7e6 u at -5), from -13, -10 and, silu, -88.7 on the result
// is zero: a relative error of 1. Here, what is left of the digits is derived:
//   gelu       Phi(v) has an absolute error of 5e-8, as 0.5 (1 + erf) has in floats, times v; two more roundings.
//   gelu_tanh  s = sigmoid(z), z = 2 c (v + 0.044715 v^3): z in six operations, of which four matter, so 4 |z| u in
//              exp(-z), and five more.
//   f'         of the sum of the sizes of its terms: silu 6 u; gelu_tanh (6 + 4 |z|) u; gelu 5e-8 for Phi, (5 + v^2) u of
//              v phi(v), where the exponent v^2 / 2 has two roundings.
//              Above 4 that is 5e-7 without FMA, a little more than torch's 0.5 v (1 + tanh).
//   zero       is allowed where torch has it: silu below -87, gelu below -4 sqrt(2), gelu_tanh where z < -87.
// Results of 16 bits: the same, and half a step of their type.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "lora/simd/simd.h"
#include "support/lora_problem.h"
#include "support/random.h"
#include "support/tolerance.h"

namespace loraaccel::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kFloatMax = std::numeric_limits<float>::max();
constexpr double kU = 0x1p-24;
constexpr double kStep = 0x1p-149;
constexpr double kHalfSqrt = 0.70710678118654752440;        // 1 / sqrt(2)
constexpr double kTwoC = 1.59576912160573071176;            // 2 sqrt(2 / pi)
constexpr double kInverseSqrt2Pi = 0.39894228040143267794;  // 1 / sqrt(2 pi)
constexpr Activation kKinds[] = {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
                                 Activation::kRelu};
constexpr DType kStorage[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
// Both sides of every edge of a vector and of the block of 64.
constexpr int64_t kCounts[] = {0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 200};

const char* kind_name(Activation kind) {
  constexpr const char* kNames[] = {"silu", "gelu", "gelu_tanh", "relu"};
  return kNames[static_cast<int>(kind)];
}

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }
double tanh_argument(double v) { return kTwoC * (v + 0.044715 * v * v * v); }

// A number and how far a result may lie from it, before it is rounded to 16 bits.
struct Bounded {
  double value, limit;
};

Bounded exact_value(Activation kind, double v) {
  double f = v < 0 ? 0 : v;
  double limit = 0;
  if (kind == Activation::kSilu) {
    f = v * sigmoid(v);
    limit = v < -87 ? std::abs(f) : std::min(1.274e-6, 2.92 * kU * std::abs(f));
  } else if (kind == Activation::kGelu) {
    f = v * 0.5 * std::erfc(-v * kHalfSqrt);
    limit = v >= -1 ? 5.90 * kU * std::abs(f) : 5e-8 * std::abs(v) + 2 * kU * std::abs(f);
    limit = v < -4 / kHalfSqrt ? std::abs(f) : std::min(1.070e-6, limit);
  } else if (kind == Activation::kGeluTanh) {
    const double z = tanh_argument(v);
    f = v * sigmoid(z);
    limit = (v >= -1 ? 4.29 : 5 + 4 * std::abs(z)) * kU * std::abs(f);
    limit = z < -87 ? std::abs(f) : std::min(6e-7, limit);
  } else {
    return {f, 0};
  }
  return {f, limit + kStep};
}

Bounded exact_slope(Activation kind, double v) {
  double slope = v > 0 ? 1 : 0;
  double limit = 0;
  if (kind == Activation::kSilu) {
    const double s = sigmoid(v);
    const double rest = v * s * sigmoid(-v);
    slope = s + rest;
    limit = v >= 0 ? 16.4 * kU * slope : 6 * kU * (s + std::abs(rest));
    limit = v < -87 ? std::abs(slope) : std::min(9.76e-7, limit);
  } else if (kind == Activation::kGelu) {
    const double cdf = 0.5 * std::erfc(-v * kHalfSqrt);
    const double rest = v * kInverseSqrt2Pi * std::exp(-0.5 * v * v);
    slope = cdf + rest;
    limit = v >= 0 ? 7.93 * kU * slope : 5e-8 + (5 + v * v) * kU * std::abs(rest);
    limit = v < -4 / kHalfSqrt ? std::abs(slope) : std::min(2.56e-7, limit);
  } else if (kind == Activation::kGeluTanh) {
    const double z = tanh_argument(v);
    const double s = sigmoid(z);
    const double rest = v * s * sigmoid(-z) * kTwoC * (1 + 3 * 0.044715 * v * v);
    slope = s + rest;
    limit = v >= 0 ? 17.5 * kU * slope : (6 + 4 * std::abs(z)) * kU * (s + std::abs(rest));
    limit = z < -87 ? std::abs(slope) : std::min(1.039e-6, limit);
  } else {
    return {slope, 0};
  }
  return {slope, limit + kStep};
}

double half_step(DType dtype, double value) {
  if (dtype == DType::kFloat32 || value == 0) return 0;
  return std::max(unit_roundoff(dtype) * std::exp2(std::ilogb(value)), smallest_step(dtype) / 2);
}

// Arrays of one call, in memory with guards around them.
struct Row {
  Operand gate, up, dt, t, dgate, dup;

  // up and dt may be empty: null pointers.
  Row(DType dtype, Layout layout, const std::vector<double>& g, const std::vector<double>& u = {},
      const std::vector<double>& d = {}) {
    const auto input = [&](const std::vector<double>& values) {
      size_t at = 0;
      if (values.empty()) return Operand();
      return Operand::vector(dtype, static_cast<int64_t>(values.size()), layout,
                             [&] { return values[at++]; });
    };
    const auto n = static_cast<int64_t>(g.size());
    gate = Operand::vector(dtype, n, layout, [&, at = size_t{0}]() mutable { return g[at++]; });
    up = input(u);
    dt = input(d);
    if (d.empty()) {
      t = Operand::vector_output(dtype, n, layout);
    } else {
      dgate = Operand::vector_output(dtype, n, layout);
      if (!u.empty()) dup = Operand::vector_output(dtype, n, layout);
    }
  }

  ActivationRow arguments() const {
    return {gate.view().dtype, gate.view().rows(), gate.view().data,  up.view().data,
            dt.view().data,    t.view().data,      dgate.view().data, dup.view().data};
  }

  void expect_clean() const {
    EXPECT_TRUE(gate.untouched() && up.untouched() && dt.untouched()) << "an input was written";
    EXPECT_TRUE(t.guards_intact() && dgate.guards_intact() && dup.guards_intact())
        << "written outside the elements";
  }
};

struct TableName {
  const char* name;
  const LoraSimd* (*table)();
};
constexpr TableName kTables[] = {{"avx512_bf16", lora_simd_avx512_bf16},
                                 {"avx512", lora_simd_avx512},
                                 {"avx2", lora_simd_avx2},
                                 {"neon_bf16", lora_simd_neon_bf16},
                                 {"neon", lora_simd_neon},
                                 {"portable", lora_simd_portable}};

std::vector<std::string> tables_of_this_build() {
  std::vector<std::string> names;
  for (const TableName& t : kTables) {
    if (t.table() != nullptr) names.emplace_back(t.name);
  }
  return names;
}

class ActivationTables : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const LoraLinearKernel* kernel = find_kernel(GetParam());
    ASSERT_NE(kernel, nullptr);
    if (const char* why = kernel->unavailable(false)) GTEST_SKIP() << why;
    for (const TableName& t : kTables) {
      if (GetParam() == t.name) simd_ = t.table();
    }
  }

  // f and f' of each argument: forward without up, backward with dt = 1 and up = 1.
  void expect_values(Activation kind, DType dtype, const std::vector<double>& arguments) const {
    const Row forward(dtype, Layout::kDense, arguments);
    simd_->activate(kind, forward.arguments());
    const std::vector<double> ones(arguments.size(), 1);
    const Row backward(dtype, Layout::kDense, arguments, ones, ones);
    simd_->activate(kind, backward.arguments());
    forward.expect_clean();
    backward.expect_clean();
    int64_t wrong = 0;
    std::string first;
    const auto check = [&](const char* what, double v, double got, const Bounded& exact) {
      double allowed = exact.limit + half_step(dtype, exact.value);
      // The instructions that round to bfloat16 make zeros of subnormal numbers.
      if (simd_->pairs && dtype == DType::kBFloat16 && std::abs(exact.value) < 0x1p-126)
        allowed = std::abs(exact.value) + smallest_step(dtype);
      if (std::abs(got - exact.value) <= allowed || wrong++ != 0) return;
      char text[160];
      std::snprintf(text, sizeof text, "%s(%.9g) is %.9g, expected %.9g +- %.3g", what, v, got,
                    exact.value, allowed);
      first = text;
    };
    for (int64_t i = 0; i < forward.t.view().rows(); ++i) {
      const double v = forward.gate.at(i);
      check("f", v, forward.t.at(i), exact_value(kind, v));
      check("f", v, backward.dup.at(i), exact_value(kind, v));
      // The formula of gelu_tanh squares v; in floats that overflows, in torch as well.
      const bool lost = kind == Activation::kGeluTanh && v * v > kFloatMax;
      if (!lost || !std::isnan(backward.dgate.at(i)))
        check("f'", v, backward.dgate.at(i), exact_slope(kind, v));
    }
    EXPECT_EQ(wrong, 0) << kind_name(kind) << " " << dtype_name(dtype) << ", first " << first;
  }

  const LoraSimd* simd_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(Table, ActivationTables, ::testing::ValuesIn(tables_of_this_build()),
                         [](const auto& test) { return test.param; });

// -30..30 and around zero.
std::vector<double> ordinary_arguments() {
  std::vector<double> v = {0.0, -0.0};
  for (int i = -60000; i <= 60000; ++i) v.push_back(i * 0.00050001);
  for (int i = -5000; i <= 5000; ++i) v.push_back(i * 1.9e-6);
  return v;
}

// Subnormal numbers and their neighbours; the edges of exp; whatever is finite.
std::vector<double> extreme_arguments() {
  std::vector<double> v = {kFloatMax, -kFloatMax};
  for (double magnitude = 1e-45; magnitude < 3.4e38; magnitude *= 1.07) {
    v.push_back(magnitude);
    v.push_back(-magnitude);
  }
  for (int i = 8500; i <= 10500; ++i) {
    v.push_back(i * 0.01);
    v.push_back(i * -0.01);
  }
  return v;
}

TEST_P(ActivationTables, Float32) {
  for (const Activation kind : kKinds) expect_values(kind, DType::kFloat32, ordinary_arguments());
}

TEST_P(ActivationTables, Float32Extremes) {
  for (const Activation kind : kKinds) expect_values(kind, DType::kFloat32, extreme_arguments());
}

// Every finite number of both types.
TEST_P(ActivationTables, SixteenBits) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<double> all;
    for (int bits = 0; bits < 0x10000; ++bits) {
      const auto b = static_cast<uint16_t>(bits);
      const double v = dtype == DType::kBFloat16 ? to_float(BFloat16{b}) : to_float(Float16{b});
      if (std::isfinite(v)) all.push_back(v);
    }
    for (const Activation kind : kKinds) expect_values(kind, dtype, all);
  }
}

// NaN stays NaN; f(inf) = inf. What else is a limit (f(-inf) = 0, f'(inf) = 1, f'(-inf) = 0) may be NaN, as in torch,
// where it is inf - inf or 0 inf, but nothing else. Neighbours in the vector do not notice.
TEST_P(ActivationTables, SpecialNumbersStayInTheirLane) {
  for (const DType dtype : kStorage) {
    for (const Activation kind : kKinds) {
      SCOPED_TRACE(std::string(kind_name(kind)) + " " + dtype_name(dtype));
      Random random(3);
      std::vector<double> plain(200);
      for (double& v : plain) v = 6 * random.real();
      const std::vector<double> ones(plain.size(), 1);
      std::vector<double> special = plain;
      for (size_t i = 0; i < special.size(); i += 5) {
        constexpr double kSpecial[] = {kNaN, kInfinity, -kInfinity};
        special[i] = kSpecial[i / 5 % 3];
      }
      const Row without(dtype, Layout::kDense, plain, ones, ones);
      const Row with(dtype, Layout::kDense, special, ones, ones);
      simd_->activate(kind, without.arguments());
      simd_->activate(kind, with.arguments());
      for (int64_t i = 0; i < 200; ++i) {
        const double f = with.dup.at(i);
        const double slope = with.dgate.at(i);
        const double v = special[static_cast<size_t>(i)];
        if (std::isfinite(v)) {
          EXPECT_EQ(f, without.dup.at(i));
          EXPECT_EQ(slope, without.dgate.at(i));
        } else if (std::isnan(v)) {
          EXPECT_TRUE(std::isnan(f));
          EXPECT_TRUE(std::isnan(slope) || kind == Activation::kRelu) << slope;
        } else if (v > 0) {
          EXPECT_EQ(f, kInfinity);
          EXPECT_TRUE(slope == 1 || std::isnan(slope)) << slope;
        } else {
          EXPECT_TRUE(f == 0 || std::isnan(f)) << f;
          EXPECT_TRUE(slope == 0 || std::isnan(slope)) << slope;
        }
      }
    }
  }
}

// t = f up; dgate = dt up f', dup = dt f: two more roundings in floats, and one at the store.
TEST_P(ActivationTables, ProductsAtEveryCount) {
  Random random(7);
  for (const DType dtype : kStorage) {
    for (const Activation kind : kKinds) {
      for (const int64_t count : kCounts) {
        for (const Layout layout : {Layout::kDense, Layout::kMisaligned}) {
          SCOPED_TRACE(std::string(kind_name(kind)) + " " + dtype_name(dtype) + " count " +
                       std::to_string(count) + " " + layout_name(layout));
          std::vector<double> values[3];
          for (std::vector<double>& v : values) {
            for (int64_t i = 0; i < count; ++i) v.push_back(4 * random.real());
          }
          const Row forward(dtype, layout, values[0], values[1]);
          const Row backward(dtype, layout, values[0], values[1], values[2]);
          simd_->activate(kind, forward.arguments());
          simd_->activate(kind, backward.arguments());
          forward.expect_clean();
          backward.expect_clean();
          const auto close = [&](double got, const Bounded& exact, double factor) {
            const double value = exact.value * factor;
            const double limit = std::abs(factor) * exact.limit + 2 * kU * std::abs(value);
            const double stored = unit_roundoff(dtype) * (std::abs(value) + limit);
            EXPECT_NEAR(got, value,
                        limit + (dtype == DType::kFloat32 ? 0 : stored) + smallest_step(dtype));
          };
          for (int64_t i = 0; i < count; ++i) {
            const double v = forward.gate.at(i);
            const double up = forward.up.at(i);
            const double dt = backward.dt.at(i);
            close(forward.t.at(i), exact_value(kind, v), up);
            close(backward.dup.at(i), exact_value(kind, v), dt);
            close(backward.dgate.at(i), exact_slope(kind, v), dt * up);
          }
        }
      }
    }
  }
}

// Bit for bit the same where dup takes the place of dt, and where there is no up as where it is 1.
TEST_P(ActivationTables, InPlaceAndWithoutUp) {
  Random random(11);
  for (const DType dtype : kStorage) {
    for (const Activation kind : kKinds) {
      for (const int64_t count : kCounts) {
        if (count == 0) continue;
        SCOPED_TRACE(std::string(kind_name(kind)) + " " + dtype_name(dtype) + " count " +
                     std::to_string(count));
        std::vector<double> values[3];
        for (std::vector<double>& v : values) {
          for (int64_t i = 0; i < count; ++i) v.push_back(4 * random.real());
        }
        const Row apart(dtype, Layout::kDense, values[0], values[1], values[2]);
        const Row in_place(dtype, Layout::kDense, values[0], values[1], values[2]);
        ActivationRow row = in_place.arguments();
        row.dup = row.dt == nullptr ? nullptr : in_place.dt.view().data;
        simd_->activate(kind, apart.arguments());
        simd_->activate(kind, row);
        EXPECT_EQ(in_place.dt.element_bytes(), apart.dup.element_bytes());
        EXPECT_EQ(in_place.dgate.element_bytes(), apart.dgate.element_bytes());
        EXPECT_TRUE(in_place.dt.guards_intact() && in_place.dup.untouched());

        const std::vector<double> ones(values[0].size(), 1);
        const Row forward(dtype, Layout::kDense, values[0]);
        const Row with_one(dtype, Layout::kDense, values[0], ones);
        const Row backward(dtype, Layout::kDense, values[0], {}, values[2]);
        const Row backward_with_one(dtype, Layout::kDense, values[0], ones, values[2]);
        for (const Row* r : {&forward, &with_one, &backward, &backward_with_one}) {
          simd_->activate(kind, r->arguments());
          r->expect_clean();
        }
        EXPECT_EQ(forward.t.element_bytes(), with_one.t.element_bytes());
        EXPECT_EQ(backward.dgate.element_bytes(), backward_with_one.dgate.element_bytes());
      }
    }
  }
}

}  // namespace
}  // namespace loraaccel::test
