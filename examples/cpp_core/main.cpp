// A LoRA layer without torch. All ones, alpha 16, rank 8: each output is 16 / 8 * 8 * 4 = 64.
//
//   cmake -S . -B build -DCMAKE_PREFIX_PATH=$(loraaccel config --cmake-prefix-path) && cmake --build build
#include <loraaccel/lora_linear.h>

#include <cstdio>
#include <vector>

using loraaccel::TensorView;

int main() {
  const int64_t M = 3, K = 4, N = 5, R = 8;  // rows, inputs, outputs, rank
  const auto f32 = loraaccel::DType::kFloat32;
  std::vector<float> x(M * K, 1), w(N * K, 0), a(R * K, 1), b(N * R, 1), y(M * N), h(M * R);

  loraaccel::LoraAdapter adapter;
  adapter.a = TensorView::matrix(a.data(), f32, R, K);
  adapter.b = TensorView::matrix(b.data(), f32, N, R);
  adapter.scale = 16.0 / R;  // alpha / rank

  loraaccel::LoraLinearArgs args;
  args.x = TensorView::matrix(x.data(), f32, M, K);
  args.w = TensorView::matrix(w.data(), f32, N, K);
  args.adapters = {&adapter, 1};
  args.y = TensorView::matrix(y.data(), f32, M, N);
  args.h = TensorView::matrix(h.data(), f32, M, R);  // for the backward pass

  const char* kernel = nullptr;
  loraaccel::ExecContext ctx = loraaccel::default_context();
  ctx.kernel_ran = &kernel;
  const loraaccel::Status status = loraaccel::lora_linear_forward(ctx, args);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.to_string().c_str());
    return 1;
  }
  std::printf("y[0][0] = %g, computed by %s\n", y[0], kernel);
  return y[0] == 64 ? 0 : 1;
}
