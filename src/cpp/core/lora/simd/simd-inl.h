// The vector bodies of the LoRA family, compiled once per instruction set: a unit defines a vector trait V in a namespace
// of its own and then includes this file inside that namespace. Nothing here may be inline code shared between units:
// the linker would keep one copy, compiled for whichever CPU.
//
// V: kLanes, kRows (rows of the register tile), kDotRows, kDotCols; F; zero, set1, add, mul, fma(a, b, c) = a b + c,
//    sum (of the lanes); load / load_n (n < kLanes lanes, the rest zero) / store / store_n for float, BFloat16, Float16;
//    transpose_block(load, out): out[k][n] = row n, word k, for 16 k and 2 kLanes n; load(n, k) gives kLanes words;
//    add_sums(v, out) where kDotCols is 8: out[j] += sum of the lanes of v[j], j < 8;
//    kPairs. Where it is true: dot_pairs(a, b, c) = c + both products of each word, load_words(p) (2 kLanes bfloat16s),
//    pair(low, high): words of two vectors of bfloat16 that `load` widened.

// Accumulators are arrays that live in registers only where the function around them is inlined; left to itself gcc 12
// makes calls of these as soon as there are two of a kind, and the kernel is half as fast.
#define LORAACCEL_INLINE inline __attribute__((always_inline))

constexpr int kWidth = 2 * V::kLanes;
constexpr int64_t kWord = 4;  // bytes
// Sums longer than this are split: error grows with the square root of the block length instead of the whole length.
constexpr int64_t kSumBlock = 128;

// c + a b, word by word.
template <bool kPairs, class Trait = V>
LORAACCEL_INLINE Trait::F multiply(const typename Trait::F& a, const typename Trait::F& b,
                                   const typename Trait::F& c) {
  if constexpr (kPairs) {
    return Trait::dot_pairs(a, b, c);
  } else {
    return Trait::fma(a, b, c);
  }
}

template <class T>
inline void load_two(const T* p, int n, V::F* v) {
  if (n == kWidth) {
    v[0] = V::load(p);
    v[1] = V::load(p + V::kLanes);
  } else {
    v[0] = n >= V::kLanes ? V::load(p) : V::load_n(p, n);
    v[1] = n > V::kLanes ? V::load_n(p + V::kLanes, n - V::kLanes) : V::zero();
  }
}

template <class T>
inline void store_two(T* p, int n, const V::F* v) {
  if (n == kWidth) {
    V::store(p, v[0]);
    V::store(p + V::kLanes, v[1]);
    return;
  }
  if (n >= V::kLanes) {
    V::store(p, v[0]);
    if (n > V::kLanes) V::store_n(p + V::kLanes, v[1], n - V::kLanes);
  } else {
    V::store_n(p, v[0], n);
  }
}

// acc[i] += sum over k of left[i][k] right[k], `depth` words; `stride` bytes between rows of left, `step` between its
// columns. Three rows share a base pointer: base, base + stride and base + 2 stride are one addressing mode each, so that
// 14 rows need 5 registers.
template <bool kPairs, int MR, class TR>
LORAACCEL_INLINE void multiply_add(V::F (&acc)[MR][2], const char* left, int64_t stride,
                                   int64_t step, const TR* right, int64_t right_stride, int n,
                                   int64_t depth) {
  constexpr int kBases = (MR + 2) / 3;
  const char* base[kBases];
#pragma GCC unroll 8
  for (int b = 0; b < kBases; ++b) base[b] = left + 3 * b * stride;
  for (int64_t k = 0; k < depth; ++k) {
    // The panel comes from the second cache: asked for 12 steps (168 cycles of the 14-row tile) ahead.
    __builtin_prefetch(right + 12 * right_stride);
    if constexpr (kWidth * sizeof(TR) > 64)
      __builtin_prefetch(right + 12 * right_stride + V::kLanes);
    V::F r[2];
    load_two(right, n, r);
    right += right_stride;
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      float word;
      memcpy(&word, base[i / 3] + (i % 3) * stride, sizeof word);
      const V::F a = V::set1(word);
      acc[i][0] = multiply<kPairs>(a, r[0], acc[i][0]);
      acc[i][1] = multiply<kPairs>(a, r[1], acc[i][1]);
    }
#pragma GCC unroll 8
    for (int b = 0; b < kBases; ++b) base[b] += step;
  }
}

// Sums of finished blocks, [rows][kWidth]. The compiler must not know where the pointer points: it would keep the array
// in registers that the accumulators need, and move all of them to the stack and back around every block.
struct Total {
  float* sums;
  bool empty = true;

  explicit Total(float* memory) : sums(memory) { asm volatile("" : "+r"(sums) : : "memory"); }
};

// Adds acc to the total (or makes it the total) and starts acc from zero.
template <int MR>
LORAACCEL_INLINE void fold(V::F (&acc)[MR][2], Total* total) {
  if (total->empty) {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      V::store(total->sums + i * kWidth, acc[i][0]);
      V::store(total->sums + i * kWidth + V::kLanes, acc[i][1]);
      acc[i][0] = acc[i][1] = V::zero();
    }
    total->empty = false;
    return;
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
    float* t = total->sums + i * kWidth;
    V::store(t, V::add(V::load(t), acc[i][0]));
    V::store(t + V::kLanes, V::add(V::load(t + V::kLanes), acc[i][1]));
    acc[i][0] = acc[i][1] = V::zero();
  }
}

// The sum over `depth` in blocks: all but the last block go through `total`, the last one stays in acc.
template <int MR, class TR>
LORAACCEL_INLINE void multiply_add_blocked(V::F (&acc)[MR][2], Total* total, const char* left,
                                           int64_t stride, int64_t step, const TR* right,
                                           int64_t right_stride, int n, int64_t depth) {
  while (depth > kSumBlock) {
    multiply_add<false, MR>(acc, left, stride, step, right, right_stride, n, kSumBlock);
    fold<MR>(acc, total);
    left += kSumBlock * step;
    right += kSumBlock * right_stride;
    depth -= kSumBlock;
  }
  multiply_add<false, MR>(acc, left, stride, step, right, right_stride, n, depth);
}

template <int MR, bool kPairs, class TC>
void product_tile(const PanelProduct& p, int64_t row) {
  V::F acc[MR][2];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) acc[i][0] = acc[i][1] = V::zero();
  alignas(64) float memory[MR * kWidth];
  Total total(memory);
  const char* left = static_cast<const char*>(p.left) + row * p.left_stride;
  const float* panel = static_cast<const float*>(p.panel);
  if constexpr (kPairs) {
    // One block: the products are of 8 bits each, and what reads the sum is a bfloat16 or close to one.
    multiply_add<true, MR>(acc, left, p.left_stride, kWord, panel, kWidth, kWidth, p.depth);
  } else if (p.depth > 0) {
    multiply_add_blocked<MR>(acc, &total, left, p.left_stride, kWord, panel, kWidth, kWidth,
                             p.depth);
  }
  if (p.depth2 > 0) {
    // A block of its own: in the accumulator of the first product each of its steps would be rounded at that one's size.
    // (Beside the rounding of a bfloat16 result that is nothing.)
    if (!kPairs && p.depth > 0) fold<MR>(acc, &total);
    multiply_add_blocked<MR>(acc, &total,
                             reinterpret_cast<const char*>(p.left2 + row * p.left2_stride),
                             p.left2_stride * kWord, kWord, p.panel2, kWidth, kWidth, p.depth2);
  }
  V::F bias[2] = {V::zero(), V::zero()};
  if (p.bias != nullptr) load_two(p.bias, kWidth, bias);
  const float* partial = p.partial == nullptr ? nullptr : p.partial + row * p.partial_stride;
  TC* c = static_cast<TC*>(p.c) + row * p.c_stride;
  for (int i = 0; i < MR; ++i, c += p.c_stride) {
    V::F v[2] = {acc[i][0], acc[i][1]};
    if (!total.empty) {
      v[0] = V::add(V::load(total.sums + i * kWidth), v[0]);
      v[1] = V::add(V::load(total.sums + i * kWidth + V::kLanes), v[1]);
    }
    if (partial != nullptr) {
      v[0] = V::add(V::load(partial), v[0]);
      v[1] = V::add(V::load(partial + V::kLanes), v[1]);
      partial += p.partial_stride;
    }
    if (p.bias != nullptr) {
      v[0] = V::add(v[0], bias[0]);
      v[1] = V::add(v[1], bias[1]);
    }
    if (p.add) {
      V::F old[2];
      load_two(c, p.n, old);
      v[0] = V::add(old[0], v[0]);
      v[1] = V::add(old[1], v[1]);
    }
    store_two(c, p.n, v);
  }
}

// Calls the tile of a height known at run time, 1..MR.
template <int MR, bool kPairs, class TC>
void product_rows(const PanelProduct& p, int64_t row, int64_t rows) {
  if (rows == MR) {
    product_tile<MR, kPairs, TC>(p, row);
  } else if constexpr (MR > 1) {
    product_rows<MR - 1, kPairs, TC>(p, row, rows);
  }
}

// Tiles of about the same height: 8 + 8 rows are faster than 14 + 2.
template <bool kPairs, class TC>
void product_of(const PanelProduct& p) {
  const int64_t tiles = (p.m + V::kRows - 1) / V::kRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row = t * p.m / tiles;
    product_rows<V::kRows, kPairs, TC>(p, row, (t + 1) * p.m / tiles - row);
  }
}

template <class TC>
void product_into(const PanelProduct& p) {
  if constexpr (V::kPairs) {
    if (p.pairs) return product_of<true, TC>(p);
  }
  product_of<false, TC>(p);
}

void product(const PanelProduct& p) {
  switch (p.c_dtype) {
    case DType::kBFloat16:
      return product_into<BFloat16>(p);
    case DType::kFloat16:
      return product_into<Float16>(p);
    default:
      return product_into<float>(p);
  }
}

template <class T>
void widen_of(const T* x, int64_t x_stride, float* out, int64_t out_stride, int64_t m, int64_t k) {
  for (int64_t i = 0; i < m; ++i, x += x_stride, out += out_stride) {
    int64_t j = 0;
    for (; j + V::kLanes <= k; j += V::kLanes) V::store(out + j, V::load(x + j));
    if (j < k) V::store_n(out + j, V::load_n(x + j, (int)(k - j)), (int)(k - j));
  }
}

void widen(DType x_dtype, const void* x, int64_t x_stride, float* out, int64_t out_stride,
           int64_t m, int64_t k) {
  switch (x_dtype) {
    case DType::kBFloat16:
      return widen_of(static_cast<const BFloat16*>(x), x_stride, out, out_stride, m, k);
    case DType::kFloat16:
      return widen_of(static_cast<const Float16*>(x), x_stride, out, out_stride, m, k);
    default:
      return widen_of(static_cast<const float*>(x), x_stride, out, out_stride, m, k);
  }
}

template <int MR, class TR>
void outer_tile(const float* left, int64_t left_stride, const TR* right, int64_t right_stride,
                float* out, int64_t out_stride, int64_t m, int n, bool add) {
  V::F acc[MR][2];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) acc[i][0] = acc[i][1] = V::zero();
  alignas(64) float memory[MR * kWidth];
  Total total(memory);
  const char* first = reinterpret_cast<const char*>(left);
  const int64_t step = left_stride * kWord;
  // Two copies of the loop: the one with the constant has no test for the right edge in it.
  if (n == kWidth) {
    multiply_add_blocked<MR>(acc, &total, first, kWord, step, right, right_stride, kWidth, m);
  } else {
    multiply_add_blocked<MR>(acc, &total, first, kWord, step, right, right_stride, n, m);
  }
  for (int i = 0; i < MR; ++i, out += out_stride) {
    V::F v[2] = {acc[i][0], acc[i][1]};
    if (!total.empty) {
      v[0] = V::add(V::load(total.sums + i * kWidth), v[0]);
      v[1] = V::add(V::load(total.sums + i * kWidth + V::kLanes), v[1]);
    }
    if (add) {
      V::F old[2];
      load_two(out, n, old);
      v[0] = V::add(old[0], v[0]);
      v[1] = V::add(old[1], v[1]);
    }
    store_two(out, n, v);
  }
}

template <int MR, class TR>
void outer_rows(const float* left, int64_t left_stride, const TR* right, int64_t right_stride,
                float* out, int64_t out_stride, int64_t rows, int64_t m, int n, bool add) {
  if (rows >= MR) {
    outer_tile<MR, TR>(left, left_stride, right, right_stride, out, out_stride, m, n, add);
  } else if constexpr (MR > 1) {
    outer_rows<MR - 1, TR>(left, left_stride, right, right_stride, out, out_stride, rows, m, n,
                           add);
  }
}

template <class TR>
void outer_of(const float* left, int64_t left_stride, const void* right_v, int64_t right_stride,
              float* out, int64_t out_stride, int64_t r, int64_t m, int64_t n, bool add) {
  const TR* right = static_cast<const TR*>(right_v);
  for (int64_t col = 0; col < n; col += kWidth) {
    const int cols = (int)(n - col < kWidth ? n - col : kWidth);
    for (int64_t row = 0; row < r; row += V::kRows) {
      outer_rows<V::kRows, TR>(left + row, left_stride, right + col, right_stride,
                               out + row * out_stride + col, out_stride, r - row, m, cols, add);
    }
  }
}

void outer(const float* left, int64_t left_stride, DType right_dtype, const void* right,
           int64_t right_stride, float* out, int64_t out_stride, int64_t r, int64_t m, int64_t n,
           bool add) {
  switch (right_dtype) {
    case DType::kBFloat16:
      return outer_of<BFloat16>(left, left_stride, right, right_stride, out, out_stride, r, m, n,
                                add);
    case DType::kFloat16:
      return outer_of<Float16>(left, left_stride, right, right_stride, out, out_stride, r, m, n,
                               add);
    default:
      return outer_of<float>(left, left_stride, right, right_stride, out, out_stride, r, m, n, add);
  }
}

#include "simd/exp-inl.h"

#include "lora/simd/activation-inl.h"
#include "lora/simd/dot-inl.h"
#include "lora/simd/dropout-inl.h"
#include "lora/simd/gain-inl.h"
#include "lora/simd/gather-inl.h"
#include "lora/simd/pack-inl.h"

const LoraSimd kTable = {kWidth, V::kRows, V::kPairs,   pack,     product, widen, dot,
                         outer,  dropout,  dropout_add, activate, gather,  gain,  multiply_sums};

#undef LORAACCEL_INLINE
