// The losses on blocks of floats that the compiler turns into vector code of this unit's CPU; loading, storing and 16-bit
// types go through the trait V. Included inside a namespace of each unit; nothing here may be shared between units.

#define LORAACCEL_INLINE inline __attribute__((always_inline))
#include "simd/exp-inl.h"

constexpr int kBlock = 64;

template <class T>
LORAACCEL_INLINE void load_block(const T* p, int n, float* out) {
  int i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::store(out + i, V::load(p + i));
  if (i < n) V::store(out + i, V::load_n(p + i, n - i));
  for (i += V::kLanes; i < kBlock; i += V::kLanes) V::store(out + i, V::zero());
}

template <class T>
LORAACCEL_INLINE void store_block(T* p, int n, const float* values) {
  int i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::store(p + i, V::load(values + i));
  if (i < n) V::store_n(p + i, V::load(values + i), n - i);
}

void store_numbers(DType dtype, void* data, int64_t at, int n, const float* values) {
  switch (dtype) {
    case DType::kBFloat16:
      return store_block(static_cast<BFloat16*>(data) + at, n, values);
    case DType::kFloat16:
      return store_block(static_cast<Float16*>(data) + at, n, values);
    default:
      return store_block(static_cast<float*>(data) + at, n, values);
  }
}

// Elements [at, at + n) of an operand: where they lie, or in `memory`. A number for all is in `memory` from the start.
const float* numbers_at(const LossNumbers& a, int64_t at, int n, float* memory) {
  if (a.data == nullptr) return memory;
  switch (a.dtype) {
    case DType::kBFloat16:
      load_block(static_cast<const BFloat16*>(a.data) + at, n, memory);
      return memory;
    case DType::kFloat16:
      load_block(static_cast<const Float16*>(a.data) + at, n, memory);
      return memory;
    default:
      break;
  }
  const float* p = static_cast<const float*>(a.data) + at;
  if (n == kBlock) return p;
  load_block(p, n, memory);
  return memory;
}

// Pairwise: at most six roundings, and none where all numbers are the same.
LORAACCEL_INLINE float block_sum(const float* v) {
  constexpr int kVectors = kBlock / V::kLanes;
  typename V::F sums[kVectors];
#pragma GCC unroll 16
  for (int k = 0; k < kVectors; ++k) sums[k] = V::load(v + k * V::kLanes);
#pragma GCC unroll 4
  for (int half = kVectors / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int k = 0; k < half; ++k) sums[k] = V::add(sums[k], sums[k + half]);
  }
  return V::sum(sums[0]);
}

// log(1 + e), 0 <= e <= 1, within 2 ulp: 2 atanh z with z = e / (2 + e), a polynomial in z^2 <= 1 / 9 fitted at Chebyshev
// points (relative error 4e-10).
LORAACCEL_INLINE float fast_log1p(float e) {
  const float z = e / (2.0F + e);
  const float w = z * z;
  float p = 0.11619654F;
  p = p * w + 0.10851625F;
  p = p * w + 0.14296295F;
  p = p * w + 0.19999851F;
  p = p * w + 0.33333334F;
  const float twice = z + z;
  return twice + twice * (w * p);
}

// log v of a normal v > 0: v = 2^n m with m from sqrt(1/2) to sqrt(2), and the same series (relative error 3e-9).
LORAACCEL_INLINE float fast_log(float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  const int32_t n = (int32_t)(bits - 0x3F3504F3U) >> 23;
  bits -= (uint32_t)n << 23;
  float m;
  memcpy(&m, &bits, sizeof m);
  const float z = (m - 1.0F) / (m + 1.0F);
  const float w = z * z;
  float p = 0.14790548F;
  p = p * w + 0.19994374F;
  p = p * w + 0.33333343F;
  const float twice = z + z;
  return twice + twice * (w * p) + (float)n * 0.693147181F;
}

struct Block {
  const float* __restrict x;
  const float* __restrict target;
  const float* __restrict weight;
  const float* __restrict pos_weight;
  const float* __restrict upstream;
};

template <LossKind kind>
LORAACCEL_INLINE void difference_block(const LossRun& r, const Block& in, float* __restrict loss,
                                       float* __restrict grad) {
  constexpr bool kRoot = kind == LossKind::kHuber || kind == LossKind::kSmoothL1;
  const float c = r.huber_c;
  const float square_c = c * c;
  const float outer = kind == LossKind::kHuber ? 2.0F * c : 2.0F;
  const float scale = r.grad_scale;
  for (int i = 0; i < kBlock; ++i) {
    const float d = in.x[i] - in.target[i];
    float value;
    float slope;
    if constexpr (kRoot) {
      // sqrt(d^2 + c^2) - c without the cancellation where d is small; by the difference where d^2 may be infinite.
      const float square = d * d;
      const float root = sqrtf(square + square_c);
      const float plus = root + c;
      const float inverse = 1.0F / (root * plus);
      value = outer * (square > square_c ? root - c : square * root * inverse);
      slope = outer * (d * plus * inverse);
    } else if constexpr (kind == LossKind::kL1) {
      value = d < 0.0F ? -d : d;
      slope = d > 0.0F ? 1.0F : d < 0.0F ? -1.0F : d;
    } else {
      value = d * d;
      slope = 2.0F * d;
    }
    loss[i] = value * in.weight[i];
    grad[i] = slope * (in.weight[i] * scale * in.upstream[i]);
  }
}

template <bool kFocal>
LORAACCEL_INLINE void bce_block(const LossRun& r, const Block& in, float* __restrict loss,
                                float* __restrict grad) {
  const float keep = 1.0F - r.smoothing;
  const float lift = 0.5F * r.smoothing;
  const float gamma = r.focal_gamma;
  const float ignored = r.ignore_index;
  const float scale = r.grad_scale;
  // Two loops: one of them would be a chain so long that few of its turns overlap.
  alignas(64) float exps[kBlock];
  for (int i = 0; i < kBlock; ++i) exps[i] = fast_exp(in.x[i] < 0.0F ? in.x[i] : -in.x[i]);
  for (int i = 0; i < kBlock; ++i) {
    const float x = in.x[i];
    const float given = in.target[i];
    const float t = given * keep + lift;
    const float p = in.pos_weight[i];
    const float e = exps[i];
    const float near = 1.0F / (1.0F + e);  // the sigmoid of |x|, and of -|x|
    const float far = e * near;
    const float s = x < 0.0F ? far : near;
    const float rest = x < 0.0F ? near : far;
    // (1 - t) x - (1 + (p - 1) t) min(x, 0) is one of two products: nothing cancels where the loss is small.
    const float linear = (x < 0.0F ? -p * t : 1.0F - t) * x;
    float value = linear + (1.0F + (p - 1.0F) * t) * fast_log1p(e);
    float slope = (1.0F - t) * s - p * t * rest;
    if constexpr (kFocal) {
      const float q = t * rest + (1.0F - t) * s;
      const float clamped = q > 1.2e-38F ? q : 1.2e-38F;
      const float power = fast_exp(gamma * fast_log(clamped));
      const float factor = q > 1.2e-38F ? power : q >= 0.0F ? 0.0F : NAN;
      // q' / q stays finite where q and q' vanish together.
      const float relative = (1.0F - 2.0F * t) * s * rest / clamped;
      slope = factor * (slope + gamma * relative * value);
      value = factor == 0.0F ? 0.0F : factor * value;
    }
    const float w = in.weight[i];
    value *= w;
    slope *= w * scale * in.upstream[i];
    loss[i] = given == ignored ? 0.0F : value;
    grad[i] = given == ignored ? 0.0F : slope;
  }
}

template <LossKind kind>
double run_of(const LossRun& r) {
  alignas(64) float memory[5][kBlock];
  alignas(64) float loss[kBlock];
  alignas(64) float grads[kBlock];
  const LossNumbers* const operands[5] = {&r.x, &r.target, &r.weight, &r.pos_weight, &r.upstream};
  for (int k = 0; k < 5; ++k) {
    for (int i = 0; i < kBlock; ++i) memory[k][i] = operands[k]->value;
  }
  const bool direct = r.grad != nullptr && r.grad_dtype == DType::kFloat32;
  double sum = 0;
  for (int64_t at = 0; at < r.count; at += kBlock) {
    const int n = (int)(r.count - at < kBlock ? r.count - at : kBlock);
    const float* p[5];
    for (int k = 0; k < 5; ++k) p[k] = numbers_at(*operands[k], at, n, memory[k]);
    const Block in = {p[0], p[1], p[2], p[3], p[4]};
    float* grad = direct && n == kBlock ? static_cast<float*>(r.grad) + at : grads;
    if constexpr (kind == LossKind::kBce || kind == LossKind::kFocalBce) {
      bce_block<kind == LossKind::kFocalBce>(r, in, loss, grad);
    } else {
      difference_block<kind>(r, in, loss, grad);
    }
    if (r.grad != nullptr && grad == grads) store_numbers(r.grad_dtype, r.grad, at, n, grads);
    if (r.loss != nullptr) {
      for (int i = 0; i < kBlock; ++i) grads[i] = loss[i] * r.loss_scale;
      store_numbers(r.loss_dtype, r.loss, at, n, grads);
    }
    if (r.sum) {
      for (int i = n; i < kBlock; ++i) loss[i] = 0;
      sum += block_sum(loss);
    }
  }
  return sum;
}

double run(const LossRun& r) {
  switch (r.kind) {
    case LossKind::kL2:
      return run_of<LossKind::kL2>(r);
    case LossKind::kL1:
      return run_of<LossKind::kL1>(r);
    case LossKind::kHuber:
      return run_of<LossKind::kHuber>(r);
    case LossKind::kSmoothL1:
      return run_of<LossKind::kSmoothL1>(r);
    case LossKind::kFocalBce:
      return run_of<LossKind::kFocalBce>(r);
    default:
      return run_of<LossKind::kBce>(r);
  }
}

const LossSimd kTable = {run};

#undef LORAACCEL_INLINE
