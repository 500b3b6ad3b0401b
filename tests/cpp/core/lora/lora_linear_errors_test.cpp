// What a caller can get wrong: the code, a message that names operator, argument, what was found and what was expected,
// and outputs that nobody touched.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/env.h"
#include "support/lora_problem.h"

namespace loraaccel::test {
namespace {

using enum StatusCode;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

LoraCase valid_case() {
  LoraCase c;
  c.m = 5;
  c.k = 33;
  c.n = 17;
  c.adapters = {{4, 0.25, DType::kFloat32, 1.0}, {2, 0, DType::kBFloat16, 1.0}};
  return c;
}

struct Forward {
  LoraLinearArgs& args;
  std::vector<LoraAdapter>& adapters;
};

struct ForwardError {
  const char* name;
  StatusCode code;
  std::vector<const char*> message;  // fragments
  std::function<void(Forward)> spoil;
};

void PrintTo(const ForwardError& e, std::ostream* os) { *os << e.name; }

const ForwardError kForwardErrors[] = {
    {"XIsAVector", kShapeMismatch, {"x", "[5]", "[M, K]"}, [](Forward f) { f.args.x.ndim = 1; }},
    {"XIsMissing", kShapeMismatch, {"x", "[M, K]"}, [](Forward f) { f.args.x = {}; }},
    {"WeightOfOtherInputs",
     kShapeMismatch,
     {"weight", "[17, 32]", "[N, 33]"},
     [](Forward f) { f.args.w.shape[1] = 32; }},
    {"WeightIsMissing", kShapeMismatch, {"weight", "[N, 33]"}, [](Forward f) { f.args.w = {}; }},
    {"BiasOfOtherSize",
     kShapeMismatch,
     {"bias", "[16]", "[17]"},
     [](Forward f) { f.args.bias.shape[0] = 16; }},
    {"BiasIsAMatrix",
     kShapeMismatch,
     {"bias", "[17, 1]", "[17]"},
     [](Forward f) {
       f.args.bias.ndim = 2;
       f.args.bias.shape[1] = 1;
     }},
    {"YOfOtherRows",
     kShapeMismatch,
     {"y", "[4, 17]", "[5, 17]"},
     [](Forward f) { f.args.y.shape[0] = 4; }},
    {"YIsMissing", kShapeMismatch, {"y", "[5, 17]"}, [](Forward f) { f.args.y = {}; }},
    {"HiddenOfOtherRank",
     kShapeMismatch,
     {"hidden", "[5, 5]", "[5, 6]"},
     [](Forward f) { f.args.h.shape[1] = 5; }},
    {"HiddenIsMissing", kShapeMismatch, {"hidden", "[5, 6]"}, [](Forward f) { f.args.h = {}; }},
    {"AOfOtherInputs",
     kShapeMismatch,
     {"lora_A", "[4, 32]", "[R, 33]"},
     [](Forward f) { f.adapters[0].a.shape[1] = 32; }},
    {"AWithoutRank",
     kShapeMismatch,
     {"lora_A", "[0, 33]", "rank"},
     [](Forward f) { f.adapters[1].a.shape[0] = 0; }},
    {"BOfOtherOutputs",
     kShapeMismatch,
     {"lora_B", "[16, 2]", "[17, 2]"},
     [](Forward f) { f.adapters[1].b.shape[0] = 16; }},
    {"BOfOtherRank",
     kShapeMismatch,
     {"lora_B", "[17, 3]", "[17, 4]"},
     [](Forward f) { f.adapters[0].b.shape[1] = 3; }},
    {"WeightOfOtherType",
     kUnsupportedDtype,
     {"weight", "float16", "float32"},
     [](Forward f) { f.args.w.dtype = DType::kFloat16; }},
    {"BiasOfOtherType",
     kUnsupportedDtype,
     {"bias", "bfloat16", "float32"},
     [](Forward f) { f.args.bias.dtype = DType::kBFloat16; }},
    {"YOfOtherType",
     kUnsupportedDtype,
     {"y", "float64", "float32"},
     [](Forward f) { f.args.y.dtype = DType::kFloat64; }},
    {"HiddenOfOtherType",
     kUnsupportedDtype,
     {"hidden", "float64", "float32"},
     [](Forward f) { f.args.h.dtype = DType::kFloat64; }},
    {"BOfOtherTypeThanA",
     kUnsupportedDtype,
     {"lora_B", "float32", "bfloat16"},
     [](Forward f) { f.adapters[1].b.dtype = DType::kFloat32; }},
    {"Float64AdapterBesideFloat32",
     kUnsupportedDtype,
     {"lora_A", "float64", "float32"},
     [](Forward f) { f.adapters[0].a.dtype = f.adapters[0].b.dtype = DType::kFloat64; }},
    {"ScaleIsNaN",
     kInvalidArgument,
     {"scaling", "nan", "finite"},
     [](Forward f) { f.adapters[0].scale = kNaN; }},
    {"ScaleIsInfinite",
     kInvalidArgument,
     {"scaling", "inf", "finite"},
     [](Forward f) { f.adapters[1].scale = -kInfinity; }},
    {"DropoutBelowZero",
     kInvalidArgument,
     {"dropout", "-0.1", "0 to 1"},
     [](Forward f) { f.adapters[0].dropout.p = -0.1; }},
    {"DropoutAboveOne",
     kInvalidArgument,
     {"dropout", "1.5", "0 to 1"},
     [](Forward f) { f.adapters[0].dropout.p = 1.5; }},
    {"DropoutIsNaN",
     kInvalidArgument,
     {"dropout", "nan", "0 to 1"},
     [](Forward f) { f.adapters[0].dropout.p = kNaN; }},
    {"XIsNull", kInvalidArgument, {"x", "null"}, [](Forward f) { f.args.x.data = nullptr; }},
    {"WeightIsNull",
     kInvalidArgument,
     {"weight", "null"},
     [](Forward f) { f.args.w.data = nullptr; }},
    {"BiasIsNull",
     kInvalidArgument,
     {"bias", "null"},
     [](Forward f) { f.args.bias.data = nullptr; }},
    {"YIsNull", kInvalidArgument, {"y", "null"}, [](Forward f) { f.args.y.data = nullptr; }},
    {"HiddenIsNull",
     kInvalidArgument,
     {"hidden", "null"},
     [](Forward f) { f.args.h.data = nullptr; }},
    {"AIsNull",
     kInvalidArgument,
     {"lora_A", "null"},
     [](Forward f) { f.adapters[0].a.data = nullptr; }},
    {"BIsNull",
     kInvalidArgument,
     {"lora_B", "null"},
     [](Forward f) { f.adapters[1].b.data = nullptr; }},
    {"HiddenHasGaps",
     kInvalidArgument,
     {"hidden", "dense"},
     [](Forward f) { f.args.h.stride[0] = 8; }},
    // One row only, so that the row stride says nothing.
    {"HiddenOfOneRowHasGaps",
     kInvalidArgument,
     {"hidden", "dense"},
     [](Forward f) {
       f.args.x.shape[0] = f.args.y.shape[0] = f.args.h.shape[0] = 1;
       f.args.h.stride[1] = 2;
     }},
    {"XOnCuda",
     kUnsupportedDevice,
     {"x", "CUDA"},
     [](Forward f) { f.args.x.device = DeviceType::kCUDA; }},
    {"YOnCuda",
     kUnsupportedDevice,
     {"y", "CUDA"},
     [](Forward f) { f.args.y.device = DeviceType::kCUDA; }},
    {"AOnCuda",
     kUnsupportedDevice,
     {"lora_A", "CUDA"},
     [](Forward f) { f.adapters[0].a.device = DeviceType::kCUDA; }},
    {"YIsX", kInvalidArgument, {"y", "overlap"}, [](Forward f) { f.args.y.data = f.args.x.data; }},
    {"YIsTheWeight",
     kInvalidArgument,
     {"y", "overlap"},
     [](Forward f) { f.args.y.data = f.args.w.data; }},
    {"YStartsInsideX",
     kInvalidArgument,
     {"y", "overlap"},
     [](Forward f) { f.args.y.data = static_cast<float*>(f.args.x.data) + 7; }},
    {"YIsB",
     kInvalidArgument,
     {"y", "overlap"},
     [](Forward f) { f.args.y.data = f.adapters[0].b.data; }},
    {"YContainsTheBias",
     kInvalidArgument,
     {"y", "overlap"},
     [](Forward f) { f.args.y.data = static_cast<float*>(f.args.bias.data) - 3; }},
    {"HiddenIsX",
     kInvalidArgument,
     {"hidden", "overlap"},
     [](Forward f) { f.args.h.data = f.args.x.data; }},
    {"HiddenIsA",
     kInvalidArgument,
     {"hidden", "overlap"},
     [](Forward f) { f.args.h.data = f.adapters[0].a.data; }},
};

void expect_refused(const Status& status, const char* op, StatusCode code,
                    const std::vector<const char*>& fragments) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_EQ(status.message().find(std::string(op) + ": "), 0U) << status.message();
  for (const char* fragment : fragments) {
    EXPECT_NE(status.message().find(fragment), std::string::npos)
        << "'" << fragment << "' is not in: " << status.message();
  }
}

class LoraLinearForwardErrors : public ::testing::TestWithParam<ForwardError> {};
INSTANTIATE_TEST_SUITE_P(Argument, LoraLinearForwardErrors, ::testing::ValuesIn(kForwardErrors),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(LoraLinearForwardErrors, AreRefused) {
  const ScopedEnv not_forced("LORAACCEL_FORCE_KERNEL", nullptr);
  const LoraProblem problem(valid_case());
  TestHost host;
  ForwardRun run = problem.forward_outputs();
  LoraProblem::Views views;
  LoraLinearArgs args = problem.forward_args(run, &views);
  GetParam().spoil({args, views.adapters});
  const Status status = lora_linear_forward(host.context(), args);
  expect_refused(status, "lora_linear", GetParam().code, GetParam().message);
  EXPECT_TRUE(run.y.untouched() && run.h.untouched());
  problem.expect_inputs_untouched();
  EXPECT_EQ(host.num_allocations(), 0);
  EXPECT_EQ(host.kernel_ran, nullptr);
}

struct Backward {
  LoraLinearBackwardArgs& args;
  LoraProblem::Views& views;
};

struct BackwardError {
  const char* name;
  StatusCode code;
  std::vector<const char*> message;
  std::function<void(Backward)> spoil;
};

void PrintTo(const BackwardError& e, std::ostream* os) { *os << e.name; }

const BackwardError kBackwardErrors[] = {
    {"GradOfOtherOutputs",
     kShapeMismatch,
     {"grad", "[5, 16]", "[5, 17]"},
     [](Backward b) { b.args.dy.shape[1] = 16; }},
    {"GradOfOtherType",
     kUnsupportedDtype,
     {"grad", "bfloat16", "float32"},
     [](Backward b) { b.args.dy.dtype = DType::kBFloat16; }},
    {"GradIsNull",
     kInvalidArgument,
     {"grad", "null"},
     [](Backward b) { b.args.dy.data = nullptr; }},
    {"XIsMissing", kShapeMismatch, {"x", "[M, K]"}, [](Backward b) { b.args.x = {}; }},
    {"WeightOfOtherInputs",
     kShapeMismatch,
     {"weight", "[17, 32]", "[N, 33]"},
     [](Backward b) { b.args.w.shape[1] = 32; }},
    {"HiddenIsMissing", kShapeMismatch, {"hidden", "[5, 6]"}, [](Backward b) { b.args.h = {}; }},
    {"HiddenOfOtherType",
     kUnsupportedDtype,
     {"hidden", "float16", "float32"},
     [](Backward b) { b.args.h.dtype = DType::kFloat16; }},
    {"HiddenOfOneRowHasGaps",
     kInvalidArgument,
     {"hidden", "dense"},
     [](Backward b) {
       b.args.x.shape[0] = b.args.dy.shape[0] = b.args.h.shape[0] = 1;
       b.args.grads.dx.shape[0] = 1;
       b.args.h.stride[1] = 2;
     }},
    {"GradXOfOtherRows",
     kShapeMismatch,
     {"grad_x", "[4, 33]", "[5, 33]"},
     [](Backward b) { b.args.grads.dx.shape[0] = 4; }},
    {"GradWeightOfOtherType",
     kUnsupportedDtype,
     {"grad_weight", "float64", "float32"},
     [](Backward b) { b.args.grads.dw.dtype = DType::kFloat64; }},
    {"GradBiasOfOtherSize",
     kShapeMismatch,
     {"grad_bias", "[5]", "[17]"},
     [](Backward b) { b.args.grads.dbias.shape[0] = 5; }},
    {"GradAOfOtherRank",
     kShapeMismatch,
     {"grad_A", "[3, 33]", "[4, 33]"},
     [](Backward b) { b.views.da[0].shape[0] = 3; }},
    {"GradBOfOtherType",
     kUnsupportedDtype,
     {"grad_B", "float32", "bfloat16"},
     [](Backward b) { b.views.db[1].dtype = DType::kFloat32; }},
    {"GradBIsNull",
     kInvalidArgument,
     {"grad_B", "null"},
     [](Backward b) { b.views.db[0].data = nullptr; }},
    {"OneGradAMissing",
     kInvalidArgument,
     {"1 grad_A", "2 adapters"},
     [](Backward b) { b.args.grads.da = b.args.grads.da.first(1); }},
    {"DropoutAboveOne",
     kInvalidArgument,
     {"dropout", "2.0", "0 to 1"},
     [](Backward b) { b.views.adapters[0].dropout.p = 2; }},
    {"GradXOnCuda",
     kUnsupportedDevice,
     {"grad_x", "CUDA"},
     [](Backward b) { b.args.grads.dx.device = DeviceType::kCUDA; }},
    {"GradXIsX",
     kInvalidArgument,
     {"grad_x", "overlap"},
     [](Backward b) { b.args.grads.dx.data = b.args.x.data; }},
    {"GradXIsGrad",
     kInvalidArgument,
     {"grad_x", "overlap"},
     [](Backward b) { b.args.grads.dx.data = b.args.dy.data; }},
    {"GradWeightIsTheWeight",
     kInvalidArgument,
     {"grad_weight", "overlap"},
     [](Backward b) { b.args.grads.dw.data = b.args.w.data; }},
    {"GradAIsA",
     kInvalidArgument,
     {"grad_A", "overlap"},
     [](Backward b) { b.views.da[0].data = b.views.adapters[0].a.data; }},
    {"GradBIsB",
     kInvalidArgument,
     {"grad_B", "overlap"},
     [](Backward b) { b.views.db[1].data = b.views.adapters[1].b.data; }},
};

class LoraLinearBackwardErrors : public ::testing::TestWithParam<BackwardError> {};
INSTANTIATE_TEST_SUITE_P(Argument, LoraLinearBackwardErrors, ::testing::ValuesIn(kBackwardErrors),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(LoraLinearBackwardErrors, AreRefused) {
  const ScopedEnv not_forced("LORAACCEL_FORCE_KERNEL", nullptr);
  const LoraProblem problem(valid_case());
  TestHost host;
  BackwardRun run = problem.backward_outputs({});
  LoraProblem::Views views;
  LoraLinearBackwardArgs args = problem.backward_args(run, &views);
  GetParam().spoil({args, views});
  const Status status = lora_linear_backward(host.context(), args);
  expect_refused(status, "lora_linear_backward", GetParam().code, GetParam().message);
  EXPECT_TRUE(run.dx.untouched() && run.dw.untouched() && run.dbias.untouched());
  for (size_t i = 0; i < run.da.size(); ++i) {
    EXPECT_TRUE(run.da[i].untouched() && run.db[i].untouched());
  }
  problem.expect_inputs_untouched();
  EXPECT_EQ(host.num_allocations(), 0);
  EXPECT_EQ(host.kernel_ran, nullptr);
}

// Memory that two outputs share in part is the caller's business, but neighbours are legal: an output may begin where
// an input ends.
TEST(LoraLinearErrors, NeighboursAreNoOverlap) {
  const ScopedEnv not_forced("LORAACCEL_FORCE_KERNEL", nullptr);
  std::vector<float> memory(5 * 33 + 5 * 17, 1);
  const std::vector<float> w(17 * 33, 1);
  LoraLinearArgs args;
  args.x = TensorView::matrix(memory.data(), DType::kFloat32, 5, 33);
  args.w = TensorView::matrix(w.data(), DType::kFloat32, 17, 33);
  args.y = TensorView::matrix(memory.data() + 5 * 33, DType::kFloat32, 5, 17);
  TestHost host;
  EXPECT_TRUE(lora_linear_forward(host.context(), args).ok());
  EXPECT_EQ(memory.back(), 33.0F);
}

// A view that is empty needs no memory.
TEST(LoraLinearErrors, NullIsFineWhereNothingIsStored) {
  const ScopedEnv not_forced("LORAACCEL_FORCE_KERNEL", nullptr);
  const std::vector<float> w(17 * 33, 1);
  LoraLinearArgs args;
  args.x = TensorView::matrix(nullptr, DType::kFloat32, 0, 33);
  args.w = TensorView::matrix(w.data(), DType::kFloat32, 17, 33);
  args.y = TensorView::matrix(nullptr, DType::kFloat32, 0, 17);
  TestHost host;
  const Status status = lora_linear_forward(host.context(), args);
  EXPECT_TRUE(status.ok()) << status.message();
}

}  // namespace
}  // namespace loraaccel::test
