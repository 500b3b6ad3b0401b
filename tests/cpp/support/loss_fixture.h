// Tests of the losses: once for each kernel of the list, against formulas in double that share nothing with the library.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "loraaccel/losses.h"
#include "support/env.h"
#include "support/kernel_fixture.h"
#include "support/operand.h"
#include "support/random.h"
#include "support/tolerance.h"

namespace loraaccel::test {

// One list of kernels, and one set of names, for all operators.
class LossKernels : public LoraLinearKernels {
 protected:
  void SetUp() override {
    LoraLinearKernels::SetUp();
    forced_.emplace("LORAACCEL_FORCE_KERNEL", kernel_->name);
  }
  void TearDown() override {
    EXPECT_EQ(host_.live_bytes(), 0) << "scratch memory was kept";
    EXPECT_TRUE(host_.blocks_intact()) << "written behind a scratch block";
  }

  bool serves(DType dtype) const {
    const std::string name = kernel_->name;
    return dtype != DType::kFloat64 || name == "ref" || name == "torch";
  }
  ExecContext host_context(int num_threads = 3) {
    return borrows(*kernel_) ? host_.lending_context(num_threads) : host_.context(num_threads);
  }

  TestHost host_;

 private:
  std::optional<ScopedEnv> forced_;
};

// What is summed up or stored: a number, the sum of its terms' magnitudes, and the same of its derivative.
struct LossTerm {
  Exact value, slope;
};

// log(1 + e^x)
inline double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// w [p t softplus(-x) + (1 - t) softplus(x)], the textbook's formula.
inline LossTerm bce_oracle(double x, double t, double w, double p) {
  const double s = 1 / (1 + std::exp(-x));
  const double rest = 1 / (1 + std::exp(x));
  const double hit = p * t * softplus(-x);
  const double miss = (1 - t) * softplus(x);
  return {{w * (hit + miss), std::abs(w) * (std::abs(hit) + std::abs(miss))},
          {w * ((1 - t) * s - p * t * rest),
           std::abs(w) * (std::abs((1 - t) * s) + std::abs(p * t * rest))}};
}

inline LossTerm diffusion_oracle(DiffusionLossType type, double d, double m, double c) {
  double value = 0;
  double slope = 0;
  const double root = std::sqrt(d * d + c * c);
  switch (type) {
    case DiffusionLossType::kL2:
      value = d * d;
      slope = 2 * d;
      break;
    case DiffusionLossType::kL1:
      value = std::abs(d);
      slope = d > 0 ? 1 : d < 0 ? -1 : 0;
      break;
    case DiffusionLossType::kHuber:
      value = 2 * c * (d * d / (root + c));
      slope = 2 * c * d / root;
      break;
    case DiffusionLossType::kSmoothL1:
      value = 2 * (d * d / (root + c));
      slope = 2 * d / root;
      break;
  }
  return {{m * value, std::abs(m * value)}, {m * slope, std::abs(m * slope)}};
}

}  // namespace loraaccel::test
