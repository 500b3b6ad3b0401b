// Activations of the MLP, on arrays that the compiler turns into vector code of this unit's CPU. Included by simd-inl.h.

constexpr int kActivationBlock = 64;

// 1 / (1 + e^-v), and 1 minus that with all its digits.
LORAACCEL_INLINE float sigmoid(float v, float* rest) {
  const float e = fast_exp(-v);
  const float s = v < -87.0F ? 0.0F : 1.0F / (1.0F + e);
  *rest = e * s;
  return s;
}

// The normal distribution function. With z = |v| / sqrt(2): below 1, erf z = z (1 + q(z^2)); above, -ln erfc z is a
// polynomial; both fitted to scipy.special at Chebyshev points. Absolute error below 5e-8, as 0.5 (1 + erf) has in floats.
LORAACCEL_INLINE float normal_cdf(float v) {
  const float a = v < 0 ? -v : v;
  const float z = a * 0.707106781F;
  const float t = z * z;
  float q = 7.882497448e-5F;
  q = q * t - 8.0188550055e-4F;
  q = q * t + 5.1893121562e-3F;
  q = q * t - 2.6854328811e-2F;
  q = q * t + 1.1283597350e-1F;
  q = q * t - 3.7612625957e-1F;
  q = q * t + 1.2837910652e-1F;
  const float near = 0.5F * (z + z * q);
  float g = -1.6140616026e-6F;
  g = g * z + 4.5590622903e-5F;
  g = g * z - 5.9276953107e-4F;
  g = g * z + 4.7402223572e-3F;
  g = g * z - 2.6364717633e-2F;
  g = g * z + 1.0997824371e-1F;
  g = g * z + 6.3193708658e-1F;
  g = g * z + 1.1301666498F;
  g = g * z - 3.0321296072e-4F;
  const float far = z > 4.0F ? 0.0F : 0.5F * fast_exp(-g);  // upper tail
  const float upper = z < 1.0F ? 0.5F - near : far;
  const float lower = z < 1.0F ? 0.5F + near : 1.0F - far;
  return v < 0 ? upper : v == v ? lower : v;
}

// f(v), and with `derivative` f'(v).
template <Activation kind>
LORAACCEL_INLINE float activation_value(float v, float* derivative) {
  if constexpr (kind == Activation::kSilu) {
    float rest;
    const float s = sigmoid(v, &rest);
    *derivative = s + v * s * rest;
    return v * s;
  } else if constexpr (kind == Activation::kGeluTanh) {
    float rest;
    const float s = sigmoid(1.59576912F * (v + 0.044715F * v * v * v), &rest);
    *derivative = s + v * s * rest * 1.59576912F * (1.0F + 0.134145F * v * v);
    return v * s;
  } else if constexpr (kind == Activation::kGelu) {
    const float cdf = normal_cdf(v);
    *derivative = cdf + v * 0.398942280F * fast_exp(-0.5F * v * v);
    return v * cdf;
  } else {
    *derivative = v > 0 ? 1.0F : 0.0F;
    return v < 0 ? 0.0F : v;
  }
}

template <class T>
LORAACCEL_INLINE void load_block(const T* p, int n, float* out) {
  int i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::store(out + i, V::load(p + i));
  if (i < n) V::store(out + i, V::load_n(p + i, n - i));
}

template <class T>
LORAACCEL_INLINE void store_block(T* p, int n, const float* values) {
  int i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::store(p + i, V::load(values + i));
  if (i < n) V::store_n(p + i, V::load(values + i), n - i);
}

template <Activation kind, class T>
void activate_row(const ActivationRow& a) {
  alignas(64) float gate[kActivationBlock];
  alignas(64) float up[kActivationBlock];
  alignas(64) float dt[kActivationBlock];
  float unused;
  for (int64_t j = 0; j < a.count; j += kActivationBlock) {
    const int n = (int)(a.count - j < kActivationBlock ? a.count - j : kActivationBlock);
    for (int i = n; i < kActivationBlock; ++i) gate[i] = 0;
    load_block(static_cast<const T*>(a.gate) + j, n, gate);
    for (int i = 0; i < kActivationBlock; ++i) up[i] = 1;
    if (a.up != nullptr) load_block(static_cast<const T*>(a.up) + j, n, up);
    if (a.dt == nullptr) {
      for (int i = 0; i < kActivationBlock; ++i)
        gate[i] = activation_value<kind>(gate[i], &unused) * up[i];
      store_block(static_cast<T*>(a.t) + j, n, gate);
      continue;
    }
    load_block(static_cast<const T*>(a.dt) + j, n, dt);
    for (int i = 0; i < kActivationBlock; ++i) {
      float slope;
      const float value = activation_value<kind>(gate[i], &slope);
      gate[i] = dt[i] * up[i] * slope;
      up[i] = dt[i] * value;
    }
    store_block(static_cast<T*>(a.dgate) + j, n, gate);
    if (a.up != nullptr) store_block(static_cast<T*>(a.dup) + j, n, up);
  }
}

template <Activation kind>
void activate_of(const ActivationRow& a) {
  switch (a.dtype) {
    case DType::kBFloat16:
      return activate_row<kind, BFloat16>(a);
    case DType::kFloat16:
      return activate_row<kind, Float16>(a);
    default:
      return activate_row<kind, float>(a);
  }
}

void activate(Activation kind, const ActivationRow& a) {
  switch (kind) {
    case Activation::kGelu:
      return activate_of<Activation::kGelu>(a);
    case Activation::kGeluTanh:
      return activate_of<Activation::kGeluTanh>(a);
    case Activation::kRelu:
      return activate_of<Activation::kRelu>(a);
    default:
      return activate_of<Activation::kSilu>(a);
  }
}
