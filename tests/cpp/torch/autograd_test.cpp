// loraaccel/autograd.h: values and gradients against the composition of torch's own operators.
#include "loraaccel/autograd.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/torch_composition.h"

namespace loraaccel::test {
namespace {

using at::Tensor;

// Leaves of one layer, in float64 unless said otherwise. K 6, N 5.
struct Layer {
  Tensor x, weight, bias;
  std::vector<LoraTensors> adapters;

  static Layer make(std::vector<int64_t> x_shape, const std::vector<int64_t>& ranks,
                    double dropout = 0) {
    torch::manual_seed(11);
    const auto leaf = [](at::IntArrayRef shape) {
      return at::randn(shape, at::kDouble).requires_grad_();
    };
    Layer l;
    x_shape.push_back(6);
    l.x = leaf(x_shape);
    l.weight = leaf({5, 6});
    l.bias = leaf({5});
    for (const int64_t r : ranks)
      l.adapters.push_back({leaf({r, 6}), leaf({5, r}), 0.5 + static_cast<double>(r), dropout});
    return l;
  }
  std::vector<Tensor> leaves() const {
    std::vector<Tensor> all = {x, weight, bias};
    for (const LoraTensors& ad : adapters) all.insert(all.end(), {ad.lora_A, ad.lora_B});
    return all;
  }
  Tensor ours(bool training = true) const {
    return lora_linear(x, weight, bias, adapters, training);
  }
};

// float64 sums of at most a few dozen terms of size one.
void expect_equal(const Tensor& got, const Tensor& expected) {
  ASSERT_TRUE(got.defined());
  ASSERT_EQ(got.sizes(), expected.sizes());
  ASSERT_EQ(got.dtype(), expected.dtype());
  EXPECT_TRUE(at::allclose(got, expected, 1e-12, 1e-12)) << got << "\nexpected\n" << expected;
}

void expect_same_gradients(const Layer& l, const Tensor& seed = {}) {
  const Tensor y = l.ours();
  const Tensor expected = composition(l.x, l.weight, l.bias, l.adapters, seed);
  expect_equal(y, expected);
  const Tensor upstream = at::randn_like(y);
  const auto got = torch::autograd::grad({y}, l.leaves(), {upstream});
  const auto wanted = torch::autograd::grad({expected}, l.leaves(), {upstream});
  for (size_t i = 0; i < got.size(); ++i) expect_equal(got[i], wanted[i]);
}

TEST(Autograd, OneAdapter) { expect_same_gradients(Layer::make({4}, {3})); }
TEST(Autograd, NoAdapter) { expect_same_gradients(Layer::make({4}, {})); }
TEST(Autograd, SeveralAdapters) { expect_same_gradients(Layer::make({4}, {1, 3, 8})); }
TEST(Autograd, LeadingDimensions) { expect_same_gradients(Layer::make({2, 3, 1, 4}, {3})); }
TEST(Autograd, OneDimension) { expect_same_gradients(Layer::make({}, {3})); }
TEST(Autograd, NoRows) { expect_same_gradients(Layer::make({0}, {3})); }
TEST(Autograd, NoRowsInTheMiddle) { expect_same_gradients(Layer::make({2, 0}, {3, 2})); }

TEST(Autograd, Dropout) {
  const Layer l = Layer::make({4, 5}, {3}, 0.4);
  expect_same_gradients(l, next_seed());
}

TEST(Autograd, DropoutOfSeveralAdapters) {
  Layer l = Layer::make({7}, {3, 2, 1}, 0.5);
  l.adapters[1].input_dropout = 0;
  expect_same_gradients(l, next_seed());
}

TEST(Autograd, DropoutOfRankActivations) {
  Layer l = Layer::make({3, 5}, {3, 4, 70});
  l.adapters[0].hidden_dropout = 0.4;
  l.adapters[1].rank_dropout = 0.5;
  l.adapters[2].input_dropout = l.adapters[2].hidden_dropout = l.adapters[2].rank_dropout = 0.3;
  expect_same_gradients(l, next_seed());
  expect_equal(l.ours(/*training=*/false), composition(l.x, l.weight, l.bias, l.adapters));
}

TEST(Autograd, FullDropout) {
  const Layer l = Layer::make({4}, {3}, 1.0);
  expect_equal(l.ours(), composition(l.x, l.weight, l.bias, {}));
}

TEST(Autograd, NoRowsWithDropout) {
  const Layer l = Layer::make({0}, {3}, 0.5);
  expect_same_gradients(l, next_seed());
}

TEST(Autograd, OneAdapterIsTheListOfOne) {
  const Layer l = Layer::make({4}, {3});
  const LoraTensors& ad = l.adapters[0];
  expect_equal(lora_linear(l.x, l.weight, l.bias, ad.lora_A, ad.lora_B, ad.scaling), l.ours());
  const Tensor seed = next_seed();
  const Tensor y = lora_linear(l.x, l.weight, std::nullopt, ad.lora_A, ad.lora_B, 2.0,
                               {.input_dropout = 0.5, .training = true});
  expect_equal(
      y, composition(l.x, l.weight, std::nullopt, {{{ad.lora_A, ad.lora_B, 2.0, 0.5}}}, seed));
  const Tensor next = next_seed();
  expect_equal(lora_linear(l.x, l.weight, std::nullopt, ad.lora_A, ad.lora_B, 2.0,
                           {.hidden_dropout = 0.5, .rank_dropout = 0.25}),
               composition(l.x, l.weight, std::nullopt,
                           {{{ad.lora_A, ad.lora_B, 2.0, 0, 0.5, 0.25}}}, next));
}

TEST(Autograd, StridedOperands) {
  Layer l = Layer::make({4}, {3});
  l.x = at::randn({6, 9}, at::kDouble).t().slice(0, 1, 9, 2).requires_grad_();
  l.weight = at::randn({6, 5}, at::kDouble).t().requires_grad_();
  l.adapters[0].lora_A = at::randn({3, 12}, at::kDouble).slice(1, 0, 12, 2).requires_grad_();
  l.bias = at::randn({1}, at::kDouble).expand({5}).requires_grad_();
  expect_same_gradients(l);
}

// sum() hands back a gradient that is one number seen everywhere.
TEST(Autograd, ExpandedGradient) {
  const Layer l = Layer::make({4}, {3});
  l.ours().sum().backward();
  const auto expected =
      torch::autograd::grad({composition(l.x, l.weight, l.bias, l.adapters).sum()}, l.leaves());
  for (size_t i = 0; i < expected.size(); ++i) expect_equal(l.leaves()[i].grad(), expected[i]);
}

TEST(Autograd, OnlyWantedGradients) {
  const std::vector<Tensor> all = Layer::make({4}, {3, 2}).leaves();
  const Tensor upstream = at::randn({4, 5}, at::kDouble);
  for (size_t only = 0; only < all.size(); ++only) {
    const Layer l = Layer::make({4}, {3, 2});
    const std::vector<Tensor> leaves = l.leaves();
    for (size_t i = 0; i < leaves.size(); ++i) leaves[i].set_requires_grad(i == only);
    l.ours().backward(upstream);
    for (size_t i = 0; i < leaves.size(); ++i)
      EXPECT_EQ(leaves[i].grad().defined(), i == only) << i;
    const auto expected = torch::autograd::grad({composition(l.x, l.weight, l.bias, l.adapters)},
                                                {leaves[only]}, {upstream});
    expect_equal(leaves[only].grad(), expected[0]);
  }
}

TEST(Autograd, WithoutBias) {
  const Layer l = Layer::make({4}, {3});
  const Tensor y = lora_linear(l.x, l.weight, std::nullopt, l.adapters);
  const Tensor expected = composition(l.x, l.weight, std::nullopt, l.adapters);
  expect_equal(y, expected);
  const std::vector<Tensor> leaves = {l.x, l.weight, l.adapters[0].lora_A, l.adapters[0].lora_B};
  const auto got = torch::autograd::grad({y.sum()}, leaves);
  const auto wanted = torch::autograd::grad({expected.sum()}, leaves);
  for (size_t i = 0; i < got.size(); ++i) expect_equal(got[i], wanted[i]);
  expect_equal(lora_linear(l.x, l.weight, Tensor(), l.adapters),
               expected);  // undefined is none as well
}

TEST(Autograd, EachGradientHasItsOwnDtype) {
  torch::manual_seed(5);
  const auto leaf = [](at::IntArrayRef shape, at::ScalarType type) {
    return at::randn(shape).to(type).requires_grad_();
  };
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const at::ScalarType adapter_type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const Tensor x = leaf({4, 6}, type);
      const Tensor weight = leaf({5, 6}, type);
      const Tensor a = leaf({3, 6}, adapter_type);
      const Tensor b = leaf({5, 3}, adapter_type);
      const Tensor y = lora_linear(x, weight, std::nullopt, a, b, 2.0);
      EXPECT_EQ(y.scalar_type(), type);
      y.sum().backward();
      for (const Tensor& t : {x, weight, a, b}) EXPECT_EQ(t.grad().scalar_type(), t.scalar_type());
      const double u = type == at::kFloat ? 1e-6 : type == at::kHalf ? 1e-3 : 1e-2;
      const Tensor expected = composition(x.to(at::kDouble), weight.to(at::kDouble), std::nullopt,
                                          {{{a.to(at::kDouble), b.to(at::kDouble), 2.0}}});
      EXPECT_TRUE(at::allclose(y.to(at::kDouble), expected, 4 * u, 16 * u));
    }
  }
}

TEST(Autograd, SecondBackwardIsTheSame) {
  const Layer l = Layer::make({4}, {3}, 0.5);
  const Tensor x_before = l.x.detach().clone();
  const Tensor y = l.ours();
  y.sum().backward({}, /*retain_graph=*/true);
  std::vector<Tensor> once;
  for (const Tensor& t : l.leaves()) once.push_back(t.grad().clone());
  y.sum().backward();
  for (size_t i = 0; i < once.size(); ++i)
    EXPECT_TRUE(at::equal(l.leaves()[i].grad(), 2 * once[i]));
  EXPECT_TRUE(at::equal(l.x.detach(), x_before));
}

// x and the adapter have a second use each: gradients add up.
TEST(Autograd, SharedOperands) {
  const Layer l = Layer::make({4}, {3});
  const auto twice = [&](const auto& layer) {
    const Tensor y = layer(l.x);
    return (y + layer(l.x * 2) + l.x.sum(-1, /*keepdim=*/true)).pow(2).sum();
  };
  const Tensor got =
      twice([&](const Tensor& x) { return lora_linear(x, l.weight, l.bias, l.adapters); });
  const Tensor expected =
      twice([&](const Tensor& x) { return composition(x, l.weight, l.bias, l.adapters); });
  const auto got_grads = torch::autograd::grad({got}, l.leaves());
  const auto expected_grads = torch::autograd::grad({expected}, l.leaves());
  for (size_t i = 0; i < got_grads.size(); ++i) expect_equal(got_grads[i], expected_grads[i]);
}

// (VT9) Gradients of parts of a batch add up to those of the whole; rows of zeros at its end change nothing.
TEST(Autograd, SplitBatches) {
  const Layer l = Layer::make({4}, {3});
  const std::vector<Tensor> parameters = {l.weight, l.bias, l.adapters[0].lora_A,
                                          l.adapters[0].lora_B};
  const auto gradients = [&](const Tensor& x, const Tensor& upstream) {
    return torch::autograd::grad({lora_linear(x, l.weight, l.bias, l.adapters)}, parameters,
                                 {upstream});
  };
  const Tensor upstream = at::randn({4, 5}, at::kDouble);
  const auto whole = gradients(l.x, upstream);
  for (const int64_t first : {1, 2, 4}) {
    const auto head = gradients(l.x.slice(0, 0, first), upstream.slice(0, 0, first));
    const auto tail = gradients(l.x.slice(0, first), upstream.slice(0, first));
    for (size_t i = 0; i < whole.size(); ++i) expect_equal(head[i] + tail[i], whole[i]);
  }
  const auto padded = gradients(at::constant_pad_nd(l.x, {0, 0, 0, 3}),
                                at::constant_pad_nd(upstream, {0, 0, 0, 3}));
  for (size_t i = 0; i < whole.size(); ++i) expect_equal(padded[i], whole[i]);
}

TEST(Autograd, NoGraphWhereNoneIsWanted) {
  const Layer l = Layer::make({4}, {3});
  const Tensor expected = l.ours().detach();
  {
    const torch::NoGradGuard no_grad;
    const Tensor y = l.ours();
    EXPECT_FALSE(y.requires_grad());
    expect_equal(y, expected);
  }
  {
    const c10::InferenceMode inference;
    const Tensor y = l.ours();
    EXPECT_FALSE(y.requires_grad());
    EXPECT_TRUE(at::equal(y, expected));
  }
  for (const Tensor& t : l.leaves()) t.set_requires_grad(false);
  EXPECT_FALSE(l.ours().requires_grad());
}

TEST(Autograd, DropoutFollowsTheGenerator) {
  const Layer l = Layer::make({40}, {3}, 0.5);
  torch::manual_seed(1);
  const Tensor first = l.ours();
  const Tensor second = l.ours();
  torch::manual_seed(1);
  EXPECT_TRUE(at::equal(l.ours(), first));
  EXPECT_FALSE(at::equal(first, second));
}

// Outside training there is no dropout, and the generator is left alone.
TEST(Autograd, EvaluationHasNoDropout) {
  const Layer l = Layer::make({4}, {3}, 0.5);
  const auto state = [] { return at::detail::getDefaultCPUGenerator().get_state(); };
  const Tensor before = state();
  expect_equal(l.ours(/*training=*/false), composition(l.x, l.weight, l.bias, l.adapters));
  EXPECT_TRUE(at::equal(state(), before));
  l.ours(/*training=*/true);
  EXPECT_FALSE(at::equal(state(), before));
}

// Steps of gradient descent on the adapter alone bring the loss down and leave the frozen layer as it is.
TEST(Autograd, Training) {
  const Layer l = Layer::make({16}, {2});
  l.weight.set_requires_grad(false);
  const Tensor weight_before = l.weight.clone();
  const Tensor target = at::randn({16, 5}, at::kDouble);
  torch::optim::SGD optimizer({l.adapters[0].lora_A, l.adapters[0].lora_B}, 0.01);
  std::vector<double> losses;
  for (int step = 0; step < 50; ++step) {
    optimizer.zero_grad();
    const Tensor loss = (l.ours() - target).pow(2).mean();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  EXPECT_LT(losses.back(), 0.5 * losses.front());
  EXPECT_TRUE(at::equal(l.weight, weight_before));
}

}  // namespace
}  // namespace loraaccel::test
