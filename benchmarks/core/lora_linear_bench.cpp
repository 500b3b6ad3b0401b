// The core's LoRA linear layer by itself: forward, backward, decode, packed weights. Counters are multiply-adds (twice their
// number: FLOP/s) and bytes of W a second.
//
//   cmake -S . -B build -DLORAACCEL_BUILD_BENCHMARKS=ON -DLORAACCEL_BUILD_TORCH=OFF && cmake --build build
//   build/benchmarks/core/loraaccel_core_bench --benchmark_filter=Forward --benchmark_enable_random_interleaving=true
#include <benchmark/benchmark.h>

#include <cstring>
#include <random>
#include <vector>

#include "loraaccel/lora_linear.h"
#include "loraaccel/pack.h"

namespace loraaccel {
namespace {

// Memory of one operand, filled with numbers in [-1, 1].
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, DType dtype, float scale = 1.0F) {
    const auto count = static_cast<size_t>(rows * cols);
    memory_.resize(count * dtype_size_bytes(dtype));
    view = TensorView::matrix(memory_.data(), dtype, rows, cols);
    std::uniform_real_distribution<float> number(-scale, scale);
    for (size_t i = 0; i < count; ++i) {
      const float v = number(random());
      if (dtype == DType::kFloat32) reinterpret_cast<float*>(memory_.data())[i] = v;
      if (dtype == DType::kBFloat16) {
        uint32_t bits;
        static_assert(sizeof bits == sizeof v);
        std::memcpy(&bits, &v, sizeof bits);
        reinterpret_cast<BFloat16*>(memory_.data())[i].bits = static_cast<uint16_t>(bits >> 16);
      }
    }
  }
  TensorView view;

 private:
  static std::mt19937& random() {
    static std::mt19937 engine(1);
    return engine;
  }
  std::vector<char> memory_;
};

struct Layer {
  Layer(const benchmark::State& state, DType dtype)
      : m(state.range(0)),
        k(state.range(1)),
        n(state.range(2)),
        r(state.range(3)),
        x(m, k, dtype),
        w(n, k, dtype, 0.05F),
        a(r, k, dtype, 0.05F),
        b(n, r, dtype),
        y(m, n, dtype),
        dx(m, k, dtype),
        h(m, r, DType::kFloat32),
        da(r, k, dtype),
        db(n, r, dtype) {
    adapter.a = a.view;
    adapter.b = b.view;
    adapter.scale = 2.0;
  }

  int64_t m, k, n, r;
  Matrix x, w, a, b, y, dx, h, da, db;
  LoraAdapter adapter;
};

void run(benchmark::State& state, const Status& status) {
  if (!status.ok()) state.SkipWithError(status.to_string().c_str());
}

void count(benchmark::State& state, const Layer& layer, double passes) {
  const double products =
      static_cast<double>(layer.m * (layer.k * layer.n + layer.r * (layer.k + layer.n)));
  state.counters["FLOP/s"] =
      benchmark::Counter(2 * passes * products, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["W bytes/s"] = benchmark::Counter(
      static_cast<double>(layer.w.view.numel()) * dtype_size_bytes(layer.w.view.dtype),
      benchmark::Counter::kIsIterationInvariantRate, benchmark::Counter::kIs1000);
}

template <DType dtype, bool packed>
void BM_Forward(benchmark::State& state) {
  const Layer layer(state, dtype);
  const ExecContext ctx = default_context();
  std::vector<char> memory(packed ? packed_weight_bytes(layer.w.view, WeightUse::kForward) : 0);
  LoraLinearArgs args;
  args.x = layer.x.view;
  args.w = layer.w.view;
  args.adapters = {&layer.adapter, 1};
  args.y = layer.y.view;
  args.h = layer.h.view;
  if (packed) {
    run(state, pack_weight(ctx, layer.w.view, WeightUse::kForward, memory.data(), memory.size()));
    args.packed_w = memory.data();
  }
  for (auto _ : state) run(state, lora_linear_forward(ctx, args));
  count(state, layer, 1);
}

template <DType dtype>
void BM_Backward(benchmark::State& state) {
  const Layer layer(state, dtype);
  LoraLinearBackwardArgs args;
  args.dy = layer.y.view;
  args.x = layer.x.view;
  args.w = layer.w.view;
  args.adapters = {&layer.adapter, 1};
  args.h = layer.h.view;
  args.grads.dx = layer.dx.view;
  args.grads.da = {&layer.da.view, 1};
  args.grads.db = {&layer.db.view, 1};
  const ExecContext ctx = default_context();
  for (auto _ : state) run(state, lora_linear_backward(ctx, args));
  count(state, layer, 1);
}

void layers(benchmark::internal::Benchmark* b) {
  b->ArgNames({"M", "K", "N", "r"})->UseRealTime()->Unit(benchmark::kMicrosecond);
  for (const int64_t m : {77, 256, 1024}) {
    b->Args({m, 320, 320, 8});
    b->Args({m, 768, 768, 8});
    b->Args({m, 768, 2304, 8});
    b->Args({m, 1280, 1280, 64});
  }
}

void decode(benchmark::internal::Benchmark* b) {
  b->ArgNames({"M", "K", "N", "r"})->UseRealTime()->Unit(benchmark::kMicrosecond);
  for (const int64_t m : {1, 2, 4, 8, 16}) b->Args({m, 4096, 4096, 8});
}

BENCHMARK(BM_Forward<DType::kFloat32, false>)->Apply(layers)->Apply(decode);
BENCHMARK(BM_Forward<DType::kFloat32, true>)->Apply(layers);
BENCHMARK(BM_Forward<DType::kBFloat16, false>)->Apply(layers)->Apply(decode);
BENCHMARK(BM_Forward<DType::kBFloat16, true>)->Apply(layers);
BENCHMARK(BM_Backward<DType::kFloat32>)->Apply(layers);
BENCHMARK(BM_Backward<DType::kBFloat16>)->Apply(layers);

}  // namespace
}  // namespace loraaccel

BENCHMARK_MAIN();
