// The frozen layer by the host's GEMM; the adapters accumulated into its output in one pass.
// float64 has no vector tables of ours: there the low-rank products are borrowed as well.
#include <algorithm>

#include "lora/lora_linear_kernels.h"
#include "lora/lora_linear_rank.h"
#include "random/philox.h"

namespace loraaccel {
namespace {

constexpr const char* kOp = "lora_linear";

Status lend_gemm(const ExecContext& ctx, const TensorView& a, const TensorView& b,
                 const TensorView& c, double alpha, double beta, const TensorView& bias = {}) {
  GemmArgs args;
  args.a = a;
  args.b = b;
  args.c = c;
  args.bias = bias;
  args.alpha = alpha;
  args.beta = beta;
  return ctx.gemm(ctx.host, args);
}

TensorView columns(const TensorView& v, int64_t start, int64_t count) {
  TensorView part = v;
  part.data = static_cast<char*>(v.data) +
              start * v.stride[1] * static_cast<int64_t>(dtype_size_bytes(v.dtype));
  part.shape[1] = count;
  return part;
}

// f(element (m, k) of the view, its dropout factor), for float64.
template <class F>
void for_dropout(const ExecContext& ctx, const DropoutSpec& d, int64_t rows, int64_t cols,
                 const F& f) {
  const uint64_t threshold = dropout_threshold(d.p);
  const double keep = d.p < 1 ? 1 / (1 - d.p) : 0;
  parallel_for(ctx, rows, [&](int64_t m) {
    for (int64_t k = 0; k < cols; ++k)
      f(m, k, dropout_word(d.seed, d.offset, m, k) < threshold ? 0.0 : keep);
  });
}

// D(x) as a dense matrix, or x itself where there is no dropout.
Status dropped_input(const ExecContext& ctx, const DropoutSpec& d, const TensorView& x,
                     Scratch<double>* scratch, TensorView* out) {
  *out = x;
  if (d.p <= 0) return Status();
  if (!scratch->allocate(ctx, x.numel())) return out_of_memory(kOp);
  const auto* in = static_cast<const double*>(x.data);
  double* to = scratch->data();
  const int64_t cols = x.cols();
  for_dropout(ctx, d, x.rows(), cols, [&](int64_t m, int64_t k, double factor) {
    to[m * cols + k] = in[m * x.stride[0] + k * x.stride[1]] * factor;
  });
  *out = TensorView::matrix(to, DType::kFloat64, x.rows(), cols);
  return Status();
}

// scale * a b in scratch. (With beta = 1 a GEMM may add to the large output step by step, and round each step.)
Status update_product(const ExecContext& ctx, const TensorView& a, const TensorView& b,
                      double scale, Scratch<double>* update) {
  if (!update->allocate(ctx, a.rows() * b.cols())) return out_of_memory(kOp);
  return lend_gemm(
      ctx, a, b, TensorView::matrix(update->data(), DType::kFloat64, a.rows(), b.cols()), scale, 0);
}

// out += D(update)
void add_update(const ExecContext& ctx, const DropoutSpec& dropout, const double* update,
                const TensorView& out) {
  auto* to = static_cast<double*>(out.data);
  const int64_t cols = out.cols();
  const auto add = [&](int64_t m, int64_t k, double factor) {
    to[m * out.stride[0] + k * out.stride[1]] += update[m * cols + k] * factor;
  };
  if (dropout.p > 0) return for_dropout(ctx, dropout, out.rows(), cols, add);
  parallel_for(ctx, out.rows(), [&](int64_t m) {
    for (int64_t k = 0; k < cols; ++k) add(m, k, 1);
  });
}

Status forward_float64(const ExecContext& ctx, const LoraLinearArgs& args) {
  int64_t start = 0;
  for (const LoraAdapter& ad : args.adapters) {
    const TensorView h = columns(args.h, start, ad.a.rows());
    Scratch<double> scratch;
    TensorView x;
    LORAACCEL_RETURN_IF_ERROR(dropped_input(ctx, ad.dropout, args.x, &scratch, &x));
    LORAACCEL_RETURN_IF_ERROR(lend_gemm(ctx, x, ad.a.transposed(), h, 1, 0));
    Scratch<double> update;
    LORAACCEL_RETURN_IF_ERROR(update_product(ctx, h, ad.b.transposed(), ad.scale, &update));
    add_update(ctx, {}, update.data(), args.y);
    start += ad.a.rows();
  }
  return Status();
}

Status backward_float64(const ExecContext& ctx, const LoraLinearBackwardArgs& args) {
  const int64_t rows = args.x.rows();
  int64_t start = 0;
  for (size_t i = 0; i < args.adapters.size(); ++i) {
    const LoraAdapter& ad = args.adapters[i];
    Scratch<double> u_scratch, x_scratch, update;
    if (!u_scratch.allocate(ctx, rows * ad.a.rows())) return out_of_memory(kOp);
    const TensorView u = TensorView::matrix(u_scratch.data(), DType::kFloat64, rows, ad.a.rows());
    LORAACCEL_RETURN_IF_ERROR(lend_gemm(ctx, args.dy, ad.b, u, ad.scale, 0));
    if (args.grads.dx.defined()) {
      LORAACCEL_RETURN_IF_ERROR(update_product(ctx, u, ad.a, 1, &update));
      add_update(ctx, ad.dropout, update.data(), args.grads.dx);
    }
    if (args.grads.da[i].defined()) {
      TensorView x;
      LORAACCEL_RETURN_IF_ERROR(dropped_input(ctx, ad.dropout, args.x, &x_scratch, &x));
      LORAACCEL_RETURN_IF_ERROR(lend_gemm(ctx, u.transposed(), x, args.grads.da[i], 1, 0));
    }
    if (args.grads.db[i].defined()) {
      LORAACCEL_RETURN_IF_ERROR(lend_gemm(ctx, args.dy.transposed(),
                                          columns(args.h, start, ad.a.rows()), args.grads.db[i],
                                          ad.scale, 0));
    }
    start += ad.a.rows();
  }
  return Status();
}

}  // namespace

Status lora_linear_forward_borrowed(const ExecContext& ctx, const LoraLinearArgs& args) {
  LORAACCEL_RETURN_IF_ERROR(lend_gemm(ctx, args.x, args.w.transposed(), args.y, 1, 0, args.bias));
  if (args.adapters.empty()) return Status();
  if (args.x.dtype == DType::kFloat64) return forward_float64(ctx, args);
  const LoraSimd& simd = lora_simd_best();
  Scratch<char> x_copy;
  AnyRows x;
  LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, kOp, args.x, &x_copy, &x));
  LORAACCEL_RETURN_IF_ERROR(
      rank_hidden(simd, ctx, x, args.x.rows(), args.x.cols(), args.adapters, args.h));
  return rank_expand(simd, ctx, args.adapters, args.h, args.y);
}

Status lora_linear_backward_borrowed(const ExecContext& ctx, const LoraLinearBackwardArgs& args) {
  const LoraLinearGrads& grads = args.grads;
  if (grads.dx.defined())
    LORAACCEL_RETURN_IF_ERROR(lend_gemm(ctx, args.dy, args.w, grads.dx, 1, 0));
  if (grads.dw.defined())
    LORAACCEL_RETURN_IF_ERROR(lend_gemm(ctx, args.dy.transposed(), args.x, grads.dw, 1, 0));
  Scratch<char> x_copy, dy_copy;
  AnyRows x, dy;
  if (needs_input(args)) LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, kOp, args.x, &x_copy, &x));
  LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, kOp, args.dy, &dy_copy, &dy));
  if (grads.dbias.defined()) column_sums(ctx, dy, args.dy.rows(), grads.dbias);
  if (args.adapters.empty()) return Status();
  if (args.x.dtype == DType::kFloat64) return backward_float64(ctx, args);

  const LoraSimd& simd = lora_simd_best();
  RankBackward rank;
  LORAACCEL_RETURN_IF_ERROR(rank.prepare(simd, ctx, args));
  if (grads.dx.defined()) {
    LORAACCEL_RETURN_IF_ERROR(rank.add_to_dx(simd, ctx, args, /*plain_too=*/true));
  }
  return rank.adapter_gradients(simd, ctx, args, x, dy);
}

}  // namespace loraaccel
