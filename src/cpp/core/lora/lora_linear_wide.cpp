// Our own GEMM with the adapters' rank update continued in its registers. It multiplies float32: 16-bit operands are
// widened to scratch first, and rounded once at the store.
#include <algorithm>
#include <atomic>

#include "lora/lora_linear_kernels.h"
#include "lora/lora_linear_rank.h"

namespace loraaccel {
namespace {

constexpr const char* kOp = "lora_linear";
// Panels that a task packs at once: they stay in the second cache while every row block passes over them.
constexpr int64_t kPanelBytes = 512 * 1024;
// Rows that pass over one panel before the next: their left operand stays in the second cache as well.
constexpr int64_t kTilesPerBlock = 4;

// out[M, cols] = left right + left2 right2 + bias with right given panel by panel: pack(first column, count, destination).
struct WideProduct {
  Rows<float> left;
  int64_t rows, depth, cols;
  const float* left2;
  int64_t left2_stride;
  const RankPanels* right2;
  const float* bias;      // [cols rounded up to whole panels], or null
  const TensorView* out;  // [rows, cols], unit columns, any dtype but float64
};

template <class Pack>
Status wide_product(const LoraSimd& simd, const ExecContext& ctx, const WideProduct& w,
                    const Pack& pack) {
  const int64_t width = simd.width;
  const int64_t panels = ceil_div(w.cols, width);
  if (panels == 0 || w.rows == 0) return Status();
  const int64_t panel_size = std::max<int64_t>(w.depth, 1) * width;
  const int64_t fitting =
      std::max<int64_t>(1, kPanelBytes / (panel_size * static_cast<int64_t>(sizeof(float))));
  // A whole number of tasks per thread, each with about the same number of panels.
  const int64_t threads = ctx.num_threads;
  const int64_t groups = std::min(panels, ceil_div(ceil_div(panels, fitting), threads) * threads);
  // Fewer panels than threads: rows are split too, and each part packs for itself.
  const int64_t row_parts =
      groups >= threads ? 1 : std::min(ceil_div(threads, groups), ceil_div(w.rows, simd.rows));
  const int64_t part_rows = ceil_div(ceil_div(w.rows, row_parts), simd.rows) * simd.rows;
  const auto element = static_cast<int64_t>(dtype_size_bytes(w.out->dtype));
  std::atomic<bool> no_memory{false};
  parallel_for(ctx, groups * row_parts, [&](int64_t task) {
    const int64_t group = task / row_parts;
    const int64_t first = group * panels / groups;
    const int64_t last = (group + 1) * panels / groups;
    const int64_t row_begin = (task % row_parts) * part_rows;
    const int64_t row_end = std::min(w.rows, row_begin + part_rows);
    if (row_begin >= row_end) return;
    Scratch<float> packed;
    // Panels are packed in turns where they do not all fit.
    const int64_t turn = std::min(fitting, last - first);
    if (!packed.allocate(ctx, turn * panel_size)) {
      no_memory = true;
      return;
    }
    for (int64_t p0 = first; p0 < last; p0 += turn) {
      const int64_t p1 = std::min(last, p0 + turn);
      for (int64_t p = p0; p < p1; ++p) {
        pack(p * width, static_cast<int>(std::min(width, w.cols - p * width)),
             packed.data() + (p - p0) * panel_size);
      }
      const int64_t block = simd.rows * kTilesPerBlock;
      for (int64_t row = row_begin; row < row_end; row += block) {
        PanelProduct product{};
        product.left = w.left.data + row * w.left.stride;
        product.left_stride = w.left.stride;
        product.depth = w.depth;
        product.left2 = w.left2 == nullptr ? nullptr : w.left2 + row * w.left2_stride;
        product.left2_stride = w.left2_stride;
        product.depth2 = w.right2 == nullptr ? 0 : w.right2->depth();
        product.c_stride = w.out->stride[0];
        product.c_dtype = w.out->dtype;
        product.m = std::min(block, row_end - row);
        for (int64_t p = p0; p < p1; ++p) {
          product.panel = packed.data() + (p - p0) * panel_size;
          product.panel2 = product.depth2 == 0 ? nullptr : w.right2->panel(p);
          product.bias = w.bias == nullptr ? nullptr : w.bias + p * width;
          product.c =
              static_cast<char*>(w.out->data) + (row * w.out->stride[0] + p * width) * element;
          product.n = static_cast<int>(std::min(width, w.cols - p * width));
          simd.product(product);
        }
      }
    }
  });
  return no_memory ? out_of_memory(kOp) : Status();
}

}  // namespace

Status lora_linear_forward_simd(const LoraSimd& simd, const ExecContext& ctx,
                                const LoraLinearArgs& args) {
  Scratch<float> x_copy, w_copy, bias;
  Rows<float> x, w;
  LORAACCEL_RETURN_IF_ERROR(rows_as<float>(ctx, kOp, args.x, &x_copy, &x));
  LORAACCEL_RETURN_IF_ERROR(rows_as<float>(ctx, kOp, args.w, &w_copy, &w));
  const int64_t outputs = args.w.rows();
  if (args.bias.defined()) {
    const int64_t padded = ceil_div(outputs, simd.width) * simd.width;
    if (!bias.allocate(ctx, padded)) return out_of_memory(kOp);
    std::fill(bias.data() + outputs, bias.data() + padded, 0.0F);
    visit_dtype(args.bias.dtype, [&](auto tag) {
      const auto* source = static_cast<const typename decltype(tag)::type*>(args.bias.data);
      for (int64_t n = 0; n < outputs; ++n)
        from_float(to_float(source[n * args.bias.stride[0]]), bias.data() + n);
    });
  }
  LORAACCEL_RETURN_IF_ERROR(rank_hidden(simd, ctx, {x.data, x.stride, DType::kFloat32},
                                        args.x.rows(), args.x.cols(), args.adapters, args.h));
  RankPanels right2;
  LORAACCEL_RETURN_IF_ERROR(right2.build(simd, ctx, args.adapters, RankFactor::kScaledB,
                                         std::vector<bool>(args.adapters.size(), true)));
  const WideProduct product = {x,
                               args.x.rows(),
                               args.x.cols(),
                               outputs,
                               static_cast<const float*>(args.h.data),
                               args.h.stride[0],
                               &right2,
                               args.bias.defined() ? bias.data() : nullptr,
                               &args.y};
  return wide_product(simd, ctx, product, [&](int64_t col, int count, float* panel) {
    simd.pack_transposed(w.data + col * w.stride, w.stride, count, args.x.cols(), 1.0F, panel);
  });
}

Status lora_linear_backward_simd(const LoraSimd& simd, const ExecContext& ctx,
                                 const LoraLinearBackwardArgs& args) {
  Scratch<float> dy_copy, x_copy, w_copy;
  Rows<float> dy, x, w;
  LORAACCEL_RETURN_IF_ERROR(rows_as<float>(ctx, kOp, args.dy, &dy_copy, &dy));
  if (needs_input(args)) {
    LORAACCEL_RETURN_IF_ERROR(rows_as<float>(ctx, kOp, args.x, &x_copy, &x));
  }
  const int64_t rows = args.x.rows();
  const int64_t inputs = args.x.cols();
  const int64_t outputs = args.w.rows();
  const AnyRows any_dy = {dy.data, dy.stride, DType::kFloat32};
  const AnyRows any_x = {x.data, x.stride, DType::kFloat32};

  RankBackward rank;
  LORAACCEL_RETURN_IF_ERROR(rank.prepare(simd, ctx, args));
  if (args.grads.dx.defined()) {
    LORAACCEL_RETURN_IF_ERROR(rows_as<float>(ctx, kOp, args.w, &w_copy, &w));
    RankPanels right2;
    LORAACCEL_RETURN_IF_ERROR(right2.build(simd, ctx, args.adapters, RankFactor::kA, rank.plain()));
    // Adapters with dropout are added to the stored product: in float32, so that a 16-bit dx is
    // rounded once.
    LoraLinearBackwardArgs sum_args = args;
    TensorView& dx = sum_args.grads.dx;
    Scratch<float> dx_sum;
    if (dx.dtype != DType::kFloat32 && std::ranges::count(rank.plain(), false) != 0) {
      if (!dx_sum.allocate(ctx, rows * inputs)) return out_of_memory(kOp);
      dx = TensorView::matrix(dx_sum.data(), DType::kFloat32, rows, inputs);
    }
    const WideProduct product = {dy,      rows,    outputs, inputs, rank.u(), rank.u_stride(),
                                 &right2, nullptr, &dx};
    LORAACCEL_RETURN_IF_ERROR(
        wide_product(simd, ctx, product, [&](int64_t col, int count, float* panel) {
          simd.pack_rows(w.data + col, w.stride, count, outputs, panel);
        }));
    LORAACCEL_RETURN_IF_ERROR(rank.add_to_dx(simd, ctx, sum_args, /*plain_too=*/false));
    if (dx_sum.data() != nullptr) store_view(ctx, dx_sum.data(), inputs, 1, 1.0F, args.grads.dx);
  }
  LORAACCEL_RETURN_IF_ERROR(rank.adapter_gradients(simd, ctx, args, any_x, any_dy));
  if (args.grads.dw.defined()) {
    // dW = G^T x: left is G^T, read by the same kernel, so it is made row by row.
    Scratch<float> transposed;
    Rows<float> dyt;
    LORAACCEL_RETURN_IF_ERROR(rows_as<float>(ctx, kOp, args.dy.transposed(), &transposed, &dyt));
    const WideProduct dw = {dyt, outputs, rows,    inputs,        nullptr,
                            0,   nullptr, nullptr, &args.grads.dw};
    LORAACCEL_RETURN_IF_ERROR(
        wide_product(simd, ctx, dw, [&](int64_t col, int count, float* panel) {
          simd.pack_rows(x.data + col, x.stride, count, rows, panel);
        }));
  }
  if (args.grads.dbias.defined()) column_sums(ctx, any_dy, rows, args.grads.dbias);
  return Status();
}

}  // namespace loraaccel
