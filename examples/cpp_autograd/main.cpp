// Trains an adapter on a frozen layer with libtorch: the adapter learns the difference between two weights.
//
//   cmake -S . -B build -DCMAKE_PREFIX_PATH="$(loraaccel config --cmake-prefix-path);<torch>" && cmake --build build
#include <loraaccel/autograd.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  torch::manual_seed(0);
  const int64_t K = 32, N = 16, R = 4;
  const at::Tensor weight = torch::randn({N, K});  // frozen
  const at::Tensor difference = torch::randn({N, R}).matmul(torch::randn({R, K})) / K;
  at::Tensor lora_A = (torch::randn({R, K}) / 8).requires_grad_();
  at::Tensor lora_B = torch::zeros({N, R}).requires_grad_();
  torch::optim::Adam optimizer({lora_A, lora_B}, 0.02);

  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    const at::Tensor x = torch::randn({64, K});
    const at::Tensor y =
        loraaccel::lora_linear(x, weight, /*bias=*/std::nullopt, lora_A, lora_B, /*scaling=*/2.0);
    const at::Tensor loss = torch::mse_loss(y, x.matmul((weight + difference).t()));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("loss %.4f -> %.6f\n", first, last);
  return last < first / 20 ? 0 : 1;
}
