// Our own kernels: the frozen product and the rank update in one pass over the outputs. Any type but float64.
#include "lora/lora_own.h"

#include <algorithm>
#include <atomic>

#include "lora/blocked_product.h"
#include "lora/lora_rank.h"
#include "lora/packed_weight.h"

namespace loraaccel {
namespace {

// Up to so many rows, W is read where it lies, as one factor of dot products: packing it would cost more than it saves.
constexpr int64_t kDotMaxRows = 16;
// The same for a weight that comes from memory, where reading it in the order in which it lies is what counts.
constexpr int64_t kDotMaxRowsFromMemory = 32;
constexpr int64_t kCachedWeightBytes = 16 << 20;

// Rows of w in the order in which they lie: [N, K], or [K, N] of a weight that is stored transposed.
Status weight_rows(const ExecContext& ctx, const char* op, const TensorView& w,
                   Scratch<char>* scratch, AnyRows* rows, bool* swapped) {
  *swapped = !has_unit_columns(w) && has_unit_columns(w.transposed());
  return rows_of(ctx, op, *swapped ? w.transposed() : w, scratch, rows);
}

// bias in floats, padded to whole panels.
Status padded_bias(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                   const TensorView& bias, Scratch<float>* out) {
  const int64_t padded = ceil_div(bias.rows(), simd.width) * simd.width;
  if (!out->allocate(ctx, padded)) return out_of_memory(op);
  std::fill(out->data() + bias.rows(), out->data() + padded, 0.0F);
  visit_dtype(bias.dtype, [&](auto tag) {
    const auto* source = static_cast<const typename decltype(tag)::type*>(bias.data);
    for (int64_t n = 0; n < bias.rows(); ++n)
      from_float(to_float(source[n * bias.stride[0]]), out->data() + n);
  });
  return Status();
}

// All that one projection contributes to a forward pass.
struct Projection {
  Scratch<char> w_copy;
  Scratch<float> bias;
  RankPanels right2;
  std::vector<RankRun> runs;
  ProductRight right;
  PackedWeight packed;
};

// Up to how many rows dot products are the faster way for this weight.
int64_t dot_rows_of(const TensorView& w, bool packed, bool swapped) {
  if (swapped) return 0;
  const int64_t bytes = w.numel() * static_cast<int64_t>(dtype_size_bytes(w.dtype));
  return packed || bytes < kCachedWeightBytes ? kDotMaxRows : kDotMaxRowsFromMemory;
}

// Few rows: dot products with the rows of W, then the last pass of the blocked product over each panel's columns.
void few_rows_forward(const LoraSimd& simd, const ExecContext& ctx, const AnyRows& x, int64_t rows,
                      int64_t inputs, std::span<const ProductOutput> outputs) {
  std::vector<int64_t> first{0};
  for (const ProductOutput& output : outputs)
    first.push_back(first.back() + ceil_div(output.out->cols(), simd.width));
  parallel_for(ctx, first.back(), [&](int64_t panel) {
    const auto next = std::upper_bound(first.begin(), first.end(), panel);
    const auto j = static_cast<size_t>(next - first.begin()) - 1;
    const ProductOutput& output = outputs[j];
    const AnyRows& w = output.rights[0].rows;
    const int64_t index = panel - first[j];
    const int64_t col = index * simd.width;
    alignas(64) float sums[kDotMaxRowsFromMemory * kMaxPanelWidth];
    PanelProduct p{};
    p.m = rows;
    const int64_t columns = std::min<int64_t>(simd.width, output.out->cols() - col);
    simd.dot(x.dtype, x.data, x.stride, w.dtype, w.at(col), w.stride, 1.0F, sums, simd.width, rows,
             columns, inputs);
    p.partial = sums;
    p.partial_stride = simd.width;
    output.finish(simd, 0, index, p);
  });
}

}  // namespace

Status lora_group_forward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                              const LoraQkvArgs& args) {
  const int64_t rows = args.x.rows();
  const int64_t inputs = args.x.cols();
  Scratch<char> x_copy;
  ProductTerm term;
  term.depth = inputs;
  LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, args.x, &x_copy, &term.left));

  std::vector<Projection> projections(args.projections.size());
  std::vector<ProductOutput> outputs(projections.size());
  RankAdapters adapters(args.samples);
  std::vector<Tasks> before(1);
  int64_t column = 0;
  int64_t dot_max_rows = kDotMaxRowsFromMemory;
  for (size_t j = 0; j < projections.size(); ++j) {
    const LoraProjection& given = args.projections[j];
    Projection& own = projections[j];
    ProductOutput& output = outputs[j];
    bool swapped = false;
    LORAACCEL_RETURN_IF_ERROR(
        weight_rows(ctx, op, given.w, &own.w_copy, &own.right.rows, &swapped));
    own.right.transposed = !swapped;
    if (given.packed_w != nullptr) own.packed = PackedWeight(given.packed_w);
    if (given.bias.defined())
      LORAACCEL_RETURN_IF_ERROR(padded_bias(simd, ctx, op, given.bias, &own.bias));
    LORAACCEL_RETURN_IF_ERROR(
        own.right2.prepare(simd, ctx, op, given.adapters, RankFactor::kScaledB,
                           used_adapters(args.samples, rows, given.adapters.size())));
    own.runs = layer_runs(args.samples, rows, given.adapters);
    before.push_back(own.right2.tasks());
    output.rights = {&own.right, 1};
    output.packed = own.packed.serves(simd) ? &own.packed : nullptr;
    dot_max_rows = std::min(dot_max_rows, dot_rows_of(given.w, output.packed != nullptr, swapped));
    output.left2 = static_cast<const float*>(args.h.data) + column;
    output.left2_stride = args.h.stride[0];
    output.right2 = &own.right2;
    output.runs = &own.runs;
    output.bias = own.bias.data();
    output.out = &given.y;
    column += total_rank(given.adapters);
    adapters.add(given.adapters);
  }
  RankHidden hidden;
  LORAACCEL_RETURN_IF_ERROR(
      hidden.prepare(simd, ctx, op, term.left, rows, inputs, adapters, args.h));
  before[0] = hidden.tasks();
  if (rows <= dot_max_rows) {
    run_tasks(ctx, before);
    few_rows_forward(simd, ctx, term.left, rows, inputs, outputs);
  } else {
    LORAACCEL_RETURN_IF_ERROR(blocked_product(simd, ctx, op, rows, {&term, 1}, outputs, before));
  }
  return hidden.status();
}

namespace {

// dx = sum of G_j W_j, and of the rank updates.
Status input_gradient(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                      const LoraQkvBackwardArgs& args, std::span<const AnyRows> dy,
                      RankBackward* rank_backward) {
  const RankBackward& rank = *rank_backward;
  std::vector<ProductTerm> terms;
  std::vector<ProductRight> rights;
  std::vector<Scratch<char>> copies(args.projections.size());
  PackedWeight packed;
  for (size_t j = 0; j < args.projections.size(); ++j) {
    if (dy[j].data == nullptr) continue;
    const LoraProjectionBackward& given = args.projections[j];
    terms.push_back({dy[j], given.w.rows()});
    bool swapped = false;
    ProductRight right;
    LORAACCEL_RETURN_IF_ERROR(weight_rows(ctx, op, given.w, &copies[j], &right.rows, &swapped));
    right.transposed = swapped;
    rights.push_back(right);
    if (given.packed_w != nullptr) packed = PackedWeight(given.packed_w);
  }
  RankPanels right2;
  LORAACCEL_RETURN_IF_ERROR(
      right2.prepare(simd, ctx, op, rank.adapters(), RankFactor::kA, rank.in_panels()));
  const Tasks before[] = {rank_backward->tasks(), right2.tasks()};
  // Adapters with dropout are added to the stored product: in float32, so that a 16-bit dx is rounded once.
  TensorView dx = args.dx;
  Scratch<float> dx_sum;
  if (dx.dtype != DType::kFloat32 && rank.has_dropout()) {
    if (!dx_sum.allocate(ctx, dx.numel())) return out_of_memory(op);
    dx = TensorView::matrix(dx_sum.data(), DType::kFloat32, dx.rows(), dx.cols());
  }
  ProductOutput output;
  output.rights = rights;
  // (Several packed weights would be several panels per term: those are packed for the call.)
  output.packed = terms.size() == 1 && packed.serves(simd) ? &packed : nullptr;
  output.left2 = rank.u();
  output.left2_stride = rank.u_stride();
  output.right2 = &right2;
  output.runs = &rank.runs();
  output.out = &dx;
  LORAACCEL_RETURN_IF_ERROR(blocked_product(simd, ctx, op, dx.rows(), terms, {&output, 1}, before));
  LORAACCEL_RETURN_IF_ERROR(rank.add_to_dx(simd, ctx, dx, /*plain_too=*/false));
  if (dx_sum.data() != nullptr) store_view(ctx, dx_sum.data(), dx.cols(), 1, 1.0F, args.dx);
  return Status();
}

// dW = G^T x
Status weight_gradient(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                       const TensorView& dy, const AnyRows& x, const TensorView& dw) {
  Scratch<char> copy;
  ProductTerm term;
  term.depth = dy.rows();
  LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, dy.transposed(), &copy, &term.left));
  const ProductRight right = {x, false};
  ProductOutput output;
  output.rights = {&right, 1};
  output.out = &dw;
  return blocked_product(simd, ctx, op, dw.rows(), {&term, 1}, {&output, 1});
}

}  // namespace

Status lora_group_backward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                               const LoraQkvBackwardArgs& args) {
  const size_t count = args.projections.size();
  std::vector<Scratch<char>> dy_copies(count);
  std::vector<AnyRows> dy(count);
  std::vector<RankLayer> layers;
  for (size_t j = 0; j < count; ++j) {
    const LoraProjectionBackward& given = args.projections[j];
    if (given.dy.defined())
      LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, given.dy, &dy_copies[j], &dy[j]));
    layers.push_back({dy[j], given.w.rows(), given.adapters, given.da, given.db});
  }
  Scratch<char> x_copy;
  AnyRows x;
  if (reads_input(args)) LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, args.x, &x_copy, &x));
  RankBackward rank;
  LORAACCEL_RETURN_IF_ERROR(rank.prepare(simd, ctx, op, args.x.rows(), layers, args.samples));
  if (args.dx.defined()) {
    LORAACCEL_RETURN_IF_ERROR(input_gradient(simd, ctx, op, args, dy, &rank));
  } else {
    const Tasks tasks = rank.tasks();
    run_tasks(ctx, {&tasks, 1});
  }
  LORAACCEL_RETURN_IF_ERROR(rank.adapter_gradients(simd, ctx, x, args.x.cols(), args.h));
  for (size_t j = 0; j < count; ++j) {
    const LoraProjectionBackward& given = args.projections[j];
    const bool zero = !given.dy.defined();
    if (given.dw.defined()) {
      TensorView no_rows = TensorView::matrix(nullptr, given.w.dtype, 0, given.w.rows());
      LORAACCEL_RETURN_IF_ERROR(
          weight_gradient(simd, ctx, op, zero ? no_rows : given.dy, x, given.dw));
    }
    if (given.dbias.defined()) column_sums(ctx, dy[j], zero ? 0 : args.x.rows(), given.dbias);
  }
  return Status();
}

bool reads_input(const LoraQkvBackwardArgs& args) {
  return std::ranges::any_of(args.projections, [](const LoraProjectionBackward& p) {
    return p.dw.defined() ||
           std::ranges::any_of(p.da, [](const TensorView& v) { return v.defined(); });
  });
}

}  // namespace loraaccel
