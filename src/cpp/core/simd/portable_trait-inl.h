// The trait for any CPU: vectors of eight floats that the compiler lowers to what the baseline has (SSE2, NEON, ...).
// Included inside a namespace of each unit that uses it, after half.h.

struct Portable {
  static constexpr bool kPairs = false;
  static constexpr int kLanes = 8;
  static constexpr int kRows = 2;
  static constexpr int kDotRows = 2;
  static constexpr int kDotCols = 2;
  typedef float F __attribute__((vector_size(32)));

  static F zero() { return F{}; }
  static F set1(float v) { return F{v, v, v, v, v, v, v, v}; }
  static F add(const F& a, const F& b) { return a + b; }
  static F mul(const F& a, const F& b) { return a * b; }
  static F fma(const F& a, const F& b, const F& c) { return a * b + c; }
  static float sum(const F& v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
  }

  template <class T>
  static F load(const T* p) {
    F v;
    for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
    return v;
  }
  template <class T>
  static F load_n(const T* p, int n) {
    F v{};
    for (int i = 0; i < n; ++i) v[i] = to_float(p[i]);
    return v;
  }
  template <class T>
  static void store(T* p, const F& v) {
    for (int i = 0; i < kLanes; ++i) from_float(v[i], p + i);
  }
  template <class T>
  static void store_n(T* p, const F& v, int n) {
    for (int i = 0; i < n; ++i) from_float(v[i], p + i);
  }
  static F load(const float* p) {
    F v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(float* p, const F& v) { memcpy(p, &v, sizeof v); }

  template <class Load>
  static void transpose_block(const Load& load, float* out) {
    for (int n = 0; n < 2 * kLanes; ++n) {
      for (int k = 0; k < 16; k += kLanes) {
        const F v = load(n, k);
        for (int i = 0; i < kLanes; ++i) out[(k + i) * 2 * kLanes + n] = v[i];
      }
    }
  }
};
