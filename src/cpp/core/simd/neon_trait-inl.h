// The NEON trait, shared by the units with and without BFDOT: included inside a namespace of each.
// 10 x 8 register tile: 20 accumulators, 2 columns of the panel and up to 10 words of the left factor, of 32 registers.
// (A 12-row tile leaves gcc 12 so few for the words that it moves accumulators to the stack.)
// What stands in loops avoids the intrinsics of arithmetic and conversion: gcc 12 takes those for calls that may trap,
// and stores an array of accumulators in every step of a loop around them.

struct Neon {
  static constexpr bool kPairs = false;
  static constexpr int kLanes = 4;
  static constexpr int kRows = 10;
  static constexpr int kDotRows = 4;
  static constexpr int kDotCols = 4;
  using F = float32x4_t;

  static F zero() { return vdupq_n_f32(0); }
  static F set1(float v) {
    // One load and FMLA by element, instead of a load of all lanes that takes a multiply-add's place in the pipe.
    asm("" : "+w"(v));
    return vdupq_n_f32(v);
  }
  static F add(F a, F b) { return a + b; }
  static F mul(F a, F b) { return a * b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static float sum(F v) { return vaddvq_f32(v); }

  static F load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, F v) { vst1q_f32(p, v); }
  static F load_n(const float* p, int n) {
    F v = zero();
    if (n > 0) v = vld1q_lane_f32(p, v, 0);
    if (n > 1) v = vld1q_lane_f32(p + 1, v, 1);
    if (n > 2) v = vld1q_lane_f32(p + 2, v, 2);
    return v;
  }
  static void store_n(float* p, F v, int n) {
    if (n > 0) vst1q_lane_f32(p, v, 0);
    if (n > 1) vst1q_lane_f32(p + 1, v, 1);
    if (n > 2) vst1q_lane_f32(p + 2, v, 2);
  }

  static F widen(uint16x4_t bits, BFloat16) { return vreinterpretq_f32_u32(vshll_n_u16(bits, 16)); }
  static F widen(uint16x4_t bits, Float16) {
    F v;
    asm("fcvtl %0.4s, %1.4h" : "=w"(v) : "w"(bits));
    return v;
  }
  static uint16x4_t narrow(F v, Float16) { return vreinterpret_u16_f16(vcvt_f16_f32(v)); }
  // Round to nearest even by adding half of the last kept bit (less one, plus that bit); NaN keeps its top bits, quiet.
  static uint16x4_t narrow(F v, BFloat16) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16);
  }
  template <class T>
  static F load(const T* p) {
    return widen(vld1_u16(&p->bits), T{});
  }
  template <class T>
  static F load_n(const T* p, int n) {
    uint16x4_t bits = vdup_n_u16(0);
    if (n > 0) bits = vld1_lane_u16(&p[0].bits, bits, 0);
    if (n > 1) bits = vld1_lane_u16(&p[1].bits, bits, 1);
    if (n > 2) bits = vld1_lane_u16(&p[2].bits, bits, 2);
    return widen(bits, T{});
  }
  template <class T>
  static void store(T* p, F v) {
    vst1_u16(&p->bits, narrow(v, T{}));
  }
  static void store_bits(uint16_t* p, uint16x4_t bits, int n) {
    if (n > 0) vst1_lane_u16(p, bits, 0);
    if (n > 1) vst1_lane_u16(p + 1, bits, 1);
    if (n > 2) vst1_lane_u16(p + 2, bits, 2);
  }
  template <class T>
  static void store_n(T* p, F v, int n) {
    store_bits(&p->bits, narrow(v, T{}), n);
  }

  // Eight 4 x 4 transposes in two levels of shuffles.
  template <class Load>
  static void transpose_block(const Load& load, float* out) {
    for (int k = 0; k < 16; k += 4) {
      transpose_4x4(load, 0, k, out + k * 8);
      transpose_4x4(load, 4, k, out + k * 8 + 4);
    }
  }
  template <class Load>
  static void transpose_4x4(const Load& load, int n, int k, float* out) {
    const F r0 = load(n, k);
    const F r1 = load(n + 1, k);
    const F r2 = load(n + 2, k);
    const F r3 = load(n + 3, k);
    // Even and odd columns of two rows, then of all four.
    const float64x2_t even01 = vreinterpretq_f64_f32(vtrn1q_f32(r0, r1));
    const float64x2_t odd01 = vreinterpretq_f64_f32(vtrn2q_f32(r0, r1));
    const float64x2_t even23 = vreinterpretq_f64_f32(vtrn1q_f32(r2, r3));
    const float64x2_t odd23 = vreinterpretq_f64_f32(vtrn2q_f32(r2, r3));
    store(out, vreinterpretq_f32_f64(vtrn1q_f64(even01, even23)));
    store(out + 8, vreinterpretq_f32_f64(vtrn1q_f64(odd01, odd23)));
    store(out + 16, vreinterpretq_f32_f64(vtrn2q_f64(even01, even23)));
    store(out + 24, vreinterpretq_f32_f64(vtrn2q_f64(odd01, odd23)));
  }
};
