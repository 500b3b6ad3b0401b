// The GEMM of the LoRA family: for every output j
//
//   out_j = sum over terms t of left_t right_tj  +  left2_j right2_j  +  bias_j
//
// with the second product (the adapters' rank update) continued in the registers of the first, and one rounding.
// A forward pass over several projections has one left, x, and an output for each; a backward pass of theirs has a left
// dy_t for each and one output, dx.
#pragma once

#include <functional>
#include <span>

#include "lora/lora_rank.h"
#include "lora/operands.h"
#include "lora/simd/simd.h"

namespace loraaccel {

class PackedWeight;
class PixelColumns;

struct ProductTerm {
  AnyRows left;  // [rows, depth]
  int64_t depth = 0;
};

// Element (k, n) of a right factor is rows(k, n), or rows(n, k) where it is given transposed.
struct ProductRight {
  AnyRows rows;
  bool transposed = false;
  // In their place: columns that are gathered where they are packed, and what to do with every packed panel before it is
  // multiplied: packed(panel, data, first element of the depth, words, is it the panel's first part). It runs once
  // for each panel and part at a time.
  const PixelColumns* columns = nullptr;
  std::function<void(int64_t, const void*, int64_t, int64_t, bool)> packed = {};
};

struct ProductOutput {
  std::span<const ProductRight> rights;  // one for each term
  const PackedWeight* packed = nullptr;  // the same, packed before; null: packed now
  const float* left2 = nullptr;          // [rows, depth of right2]
  int64_t left2_stride = 0;
  const RankPanels* right2 = nullptr;
  // Where samples have different adapters: which columns of left2 multiply which rows of right2. Null: all.
  const std::vector<RankRun>* runs = nullptr;
  const float* bias = nullptr;      // [columns rounded up to whole panels], or null
  const TensorView* out = nullptr;  // [rows, columns], unit columns, any type but float64

  // The last pass of rows [row, row + p.m) over a panel: p has the frozen product's part, or its sums in `partial`; the
  // rank update, the bias and the place of the result are this output's.
  void finish(const LoraSimd& simd, int64_t row, int64_t panel, PanelProduct p) const;

 private:
  void place(const RankRun& run, int64_t panel, int width, PanelProduct* p) const;
};

// `before`: work that must be done before the product is, such as that of the rank factors; it shares a parallel region
// with packing or copying that everybody waits for. All lefts and rights share one type up to 32 bits: bfloat16 is multiplied in pairs where the table can, every other
// type as floats. The result does not depend on the number of threads.
Status blocked_product(const LoraSimd& simd, const ExecContext& ctx, const char* op, int64_t rows,
                       std::span<const ProductTerm> terms, std::span<const ProductOutput> outputs,
                       std::span<const Tasks> before = {});

}  // namespace loraaccel
