// loraaccel/autograd.h: what it refuses, and how.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "loraaccel/autograd.h"

namespace loraaccel::test {
namespace {

using at::Tensor;

// The message of the exception that f throws; "" where it throws none.
template <class F>
std::string message_of(const F& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

void expect_names(const std::string& message, const std::vector<const char*>& fragments) {
  EXPECT_FALSE(message.empty()) << "nothing was thrown";
  for (const char* fragment : fragments) {
    EXPECT_NE(message.find(fragment), std::string::npos)
        << "'" << fragment << "' is not in: " << message;
  }
}

struct AutogradErrors : ::testing::Test {
  Tensor x = at::ones({2, 6});
  Tensor weight = at::ones({5, 6});
  Tensor bias = at::ones({5});
  Tensor a = at::ones({3, 6}).requires_grad_();
  Tensor b = at::ones({5, 3}).requires_grad_();
  double scaling = 1;
  LoraLinearOptions options;

  std::string message() const {
    return message_of([&] { lora_linear(x, weight, bias, a, b, scaling, options); });
  }
};

TEST_F(AutogradErrors, NoneForAValidCall) { EXPECT_EQ(message(), ""); }

TEST_F(AutogradErrors, Shapes) {
  weight = at::ones({5, 7});
  expect_names(message(), {"lora_linear", "weight", "[5, 7]", "[N, 6]"});
  weight = at::ones({5});
  expect_names(message(), {"lora_linear", "weight", "[5]", "two dimensions"});
  weight = at::ones({5, 6});
  x = at::ones({});
  expect_names(message(), {"lora_linear", "x", "[..., K]"});
  x = at::ones({2, 6});
  b = at::ones({4, 3});
  expect_names(message(), {"lora_linear", "lora_B", "[4, 3]", "[5, 3]"});
}

TEST_F(AutogradErrors, Dtypes) {
  weight = at::ones({5, 6}, at::kHalf);
  expect_names(message(), {"lora_linear", "weight", "float16", "float32"});
  weight = at::ones({5, 6}, at::kInt);
  expect_names(message(), {"lora_linear", "weight", "float32, float64, bfloat16 or float16"});
}

TEST_F(AutogradErrors, Numbers) {
  scaling = std::numeric_limits<double>::quiet_NaN();
  expect_names(message(), {"lora_linear", "scaling", "finite"});
  scaling = 1;
  options = {.input_dropout = 1.5, .training = true};
  expect_names(message(), {"lora_linear", "dropout", "1.5"});
  options.training = false;  // wrong all the same
  expect_names(message(), {"lora_linear", "dropout", "1.5"});
}

TEST_F(AutogradErrors, Devices) {
  bias = at::ones({5}, at::kMeta);
  expect_names(message(), {"lora_linear", "bias", "meta", "cpu"});
  bias = at::ones({5});
  a = at::ones({3, 6}, at::kMeta);
  expect_names(message(), {"lora_linear", "lora_A", "meta", "cpu"});
}

TEST_F(AutogradErrors, UndefinedTensors) {
  for (const auto& [name, tensor] :
       {std::pair{"x", &x}, {"weight", &weight}, {"lora_A", &a}, {"lora_B", &b}}) {
    const Tensor kept = std::exchange(*tensor, Tensor());
    expect_names(message(), {"lora_linear", name, "undefined"});
    *tensor = kept;
  }
  bias = Tensor();  // libtorch's way to say that there is none
  EXPECT_EQ(message(), "");
}

// A first derivative with create_graph is right; only asking for the second one throws.
TEST_F(AutogradErrors, SecondDerivative) {
  const Tensor y = lora_linear(x, weight, bias, a, b);
  const Tensor loss = y.pow(2).sum();
  const auto first = torch::autograd::grad({loss}, {a, b}, {}, std::nullopt, /*create_graph=*/true);
  const auto plain = torch::autograd::grad(
      {(x.matmul(weight.t()) + bias + x.matmul(a.t()).matmul(b.t())).pow(2).sum()}, {a, b});
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::allclose(first[i], plain[i]));
  expect_names(message_of([&] { first[0].sum().backward(); }),
               {"lora_linear", "gradient of a gradient"});
}

// The graph of the first derivative may be built for others: theirs must stay usable.
TEST_F(AutogradErrors, SecondDerivativeOfOtherParts) {
  const Tensor z = at::ones({2, 5}).requires_grad_();
  const Tensor loss = (z.pow(3) + lora_linear(x, weight, bias, a, b)).sum();
  const auto first = torch::autograd::grad({loss}, {z, a}, {}, std::nullopt, /*create_graph=*/true);
  const auto second = torch::autograd::grad({first[0].sum()}, {z});
  EXPECT_TRUE(at::allclose(second[0], 6 * z));
}

TEST_F(AutogradErrors, OperandChangedBeforeBackward) {
  const Tensor y = lora_linear(x, weight, bias, a, b);
  x.add_(1);
  expect_names(message_of([&] { y.sum().backward(); }), {"modified by an inplace operation"});
}

TEST_F(AutogradErrors, BackwardOfAFreedGraph) {
  const Tensor y = lora_linear(x, weight, bias, a, b);
  y.sum().backward();
  EXPECT_NE(message_of([&] { y.sum().backward(); }), "");
}

TEST(FindOp, SaysThatTheLibraryIsMissing) {
  expect_names(
      message_of([] { autograd_detail::find_op<Tensor(const Tensor&)>("loraaccel::nothing"); }),
      {"loraaccel::nothing", "libloraaccel"});
}

}  // namespace
}  // namespace loraaccel::test
