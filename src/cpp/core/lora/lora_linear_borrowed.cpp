// The frozen layer by the host's GEMM; the adapters accumulated into its output in one pass.
// float64 has no vector tables of ours: there the low-rank products are borrowed as well.
#include <algorithm>

#include "lora/lora_linear_kernels.h"
#include "lora/lora_own.h"
#include "lora/lora_rank.h"
#include "random/philox.h"

namespace loraaccel {
namespace {

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
Status dropped_input(const ExecContext& ctx, const char* op, const DropoutSpec& d,
                     const TensorView& x, Scratch<double>* scratch, TensorView* out) {
  *out = x;
  if (d.p <= 0) return Status();
  if (!scratch->allocate(ctx, x.numel())) return out_of_memory(op);
  const auto* in = static_cast<const double*>(x.data);
  double* to = scratch->data();
  const int64_t cols = x.cols();
  for_dropout(ctx, d, x.rows(), cols, [&](int64_t m, int64_t k, double factor) {
    to[m * cols + k] = in[m * x.stride[0] + k * x.stride[1]] * factor;
  });
  *out = TensorView::matrix(to, DType::kFloat64, x.rows(), cols);
  return Status();
}

// Multiplies the rank activations of an adapter by H.
void mask_rank(const ExecContext& ctx, const LoraAdapter& ad, const LoraSamples& samples,
               int64_t index, const TensorView& h) {
  if (!has_rank_masks(ad) && samples.adapter == nullptr) return;
  parallel_for(ctx, h.rows(), [&](int64_t m) {
    double* row = static_cast<double*>(h.data) + m * h.stride[0];
    const bool has = row_has(samples, m, index);
    for (int64_t r = 0; r < h.cols(); ++r)
      row[r] = has ? row[r] * rank_mask_factor(ad, samples, m, r) : 0;
  });
}

// scale * a b in scratch. (With beta = 1 a GEMM may add to the large output step by step, and round each step.)
Status update_product(const ExecContext& ctx, const char* op, const TensorView& a,
                      const TensorView& b, double scale, Scratch<double>* update) {
  if (!update->allocate(ctx, a.rows() * b.cols())) return out_of_memory(op);
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

Status forward_float64(const ExecContext& ctx, const char* op, const TensorView& x,
                       const LoraProjection& p, const LoraSamples& samples, const TensorView& h,
                       int64_t start) {
  for (size_t i = 0; i < p.adapters.size(); ++i) {
    const LoraAdapter& ad = p.adapters[i];
    const TensorView hidden = columns(h, start, ad.a.rows());
    Scratch<double> scratch, update;
    TensorView dropped;
    LORAACCEL_RETURN_IF_ERROR(dropped_input(ctx, op, ad.dropout, x, &scratch, &dropped));
    LORAACCEL_RETURN_IF_ERROR(lend_gemm(ctx, dropped, ad.a.transposed(), hidden, 1, 0));
    mask_rank(ctx, ad, samples, static_cast<int64_t>(i), hidden);
    LORAACCEL_RETURN_IF_ERROR(
        update_product(ctx, op, hidden, ad.b.transposed(), ad.scale, &update));
    add_update(ctx, {}, update.data(), p.y);
    start += ad.a.rows();
  }
  return Status();
}

Status backward_float64(const ExecContext& ctx, const char* op, const LoraQkvBackwardArgs& args,
                        const LoraProjectionBackward& p, int64_t start) {
  const int64_t rows = args.x.rows();
  for (size_t i = 0; i < p.adapters.size(); ++i) {
    const LoraAdapter& ad = p.adapters[i];
    Scratch<double> u_scratch, x_scratch, update;
    if (!u_scratch.allocate(ctx, rows * ad.a.rows())) return out_of_memory(op);
    const TensorView u = TensorView::matrix(u_scratch.data(), DType::kFloat64, rows, ad.a.rows());
    LORAACCEL_RETURN_IF_ERROR(lend_gemm(ctx, p.dy, ad.b, u, ad.scale, 0));
    mask_rank(ctx, ad, args.samples, static_cast<int64_t>(i), u);
    if (args.dx.defined()) {
      LORAACCEL_RETURN_IF_ERROR(update_product(ctx, op, u, ad.a, 1, &update));
      add_update(ctx, ad.dropout, update.data(), args.dx);
    }
    if (p.da[i].defined()) {
      TensorView x;
      LORAACCEL_RETURN_IF_ERROR(dropped_input(ctx, op, ad.dropout, args.x, &x_scratch, &x));
      LORAACCEL_RETURN_IF_ERROR(lend_gemm(ctx, u.transposed(), x, p.da[i], 1, 0));
    }
    if (p.db[i].defined()) {
      LORAACCEL_RETURN_IF_ERROR(lend_gemm(
          ctx, p.dy.transposed(), columns(args.h, start, ad.a.rows()), p.db[i], ad.scale, 0));
    }
    start += ad.a.rows();
  }
  return Status();
}

// y += bias, of float32 beside a 16-bit y; y has unit columns.
Status add_bias(const ExecContext& ctx, const char* op, const TensorView& bias,
                const TensorView& y) {
  Scratch<float> values;
  Rows<float> row;
  LORAACCEL_RETURN_IF_ERROR(rows_as<float>(
      ctx, op, TensorView::strided(bias.data, bias.dtype, 1, bias.rows(), 0, bias.stride[0]),
      &values, &row));
  if (row.data == nullptr) return Status();  // no columns
  visit_dtype(y.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(ctx, y.rows(), [&](int64_t m) {
      T* at = static_cast<T*>(y.data) + m * y.stride[0];
      for (int64_t n = 0; n < y.cols(); ++n)
        from_float(static_cast<float>(to_float(at[n])) + row.data[n], at + n);
    });
  });
  return Status();
}

// No gradient arrived: what is wanted of this projection is zero.
void store_zeros(const ExecContext& ctx, const LoraProjectionBackward& p) {
  const auto zero = [&](const TensorView& v) {
    const double none = 0;
    if (v.defined()) store_view(ctx, &none, 0, 0, 1.0, v);
  };
  zero(p.dw);
  zero(p.dbias);
  for (const TensorView& v : p.da) zero(v);
  for (const TensorView& v : p.db) zero(v);
}

}  // namespace

Status lora_group_forward_borrowed(const ExecContext& ctx, const char* op,
                                   const LoraQkvArgs& args) {
  int64_t start = 0;
  RankAdapters adapters(args.samples);
  for (const LoraProjection& p : args.projections) {
    const bool lends_bias = !p.bias.defined() || p.bias.dtype == args.x.dtype;
    LORAACCEL_RETURN_IF_ERROR(
        lend_gemm(ctx, args.x, p.w.transposed(), p.y, 1, 0, lends_bias ? p.bias : TensorView()));
    if (!lends_bias) LORAACCEL_RETURN_IF_ERROR(add_bias(ctx, op, p.bias, p.y));
    if (args.x.dtype == DType::kFloat64)
      LORAACCEL_RETURN_IF_ERROR(forward_float64(ctx, op, args.x, p, args.samples, args.h, start));
    start += total_rank(p.adapters);
    adapters.add(p.adapters);
  }
  if (adapters.list.empty() || args.x.dtype == DType::kFloat64) return Status();
  const LoraSimd& simd = lora_simd_best();
  Scratch<char> x_copy;
  AnyRows x;
  LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, args.x, &x_copy, &x));
  LORAACCEL_RETURN_IF_ERROR(
      rank_hidden(simd, ctx, op, x, args.x.rows(), args.x.cols(), adapters, args.h));
  start = 0;
  for (const LoraProjection& p : args.projections) {
    const int64_t rank = total_rank(p.adapters);
    LORAACCEL_RETURN_IF_ERROR(
        rank_expand(simd, ctx, op, p.adapters, args.samples, columns(args.h, start, rank), p.y));
    start += rank;
  }
  return Status();
}

Status lora_group_backward_borrowed(const ExecContext& ctx, const char* op,
                                    const LoraQkvBackwardArgs& args) {
  const bool in_double = args.x.dtype == DType::kFloat64;
  const int64_t rows = args.x.rows();
  std::vector<Scratch<char>> dy_copies(args.projections.size());
  std::vector<RankLayer> layers;
  bool some = false;
  for (size_t j = 0; j < args.projections.size(); ++j) {
    const LoraProjectionBackward& p = args.projections[j];
    AnyRows dy;
    if (p.dy.defined()) {
      if (args.dx.defined())
        LORAACCEL_RETURN_IF_ERROR(lend_gemm(ctx, p.dy, p.w, args.dx, 1, some ? 1 : 0));
      if (p.dw.defined())
        LORAACCEL_RETURN_IF_ERROR(lend_gemm(ctx, p.dy.transposed(), args.x, p.dw, 1, 0));
      LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, p.dy, &dy_copies[j], &dy));
      if (p.dbias.defined()) column_sums(ctx, dy, rows, p.dbias);
      some = true;
    } else {
      store_zeros(ctx, p);
    }
    layers.push_back({dy, p.w.rows(), p.adapters, p.da, p.db});
  }
  if (args.dx.defined() && !some) {
    const double none = 0;
    store_view(ctx, &none, 0, 0, 1.0, args.dx);
  }
  if (in_double) {
    int64_t start = 0;
    for (const LoraProjectionBackward& p : args.projections) {
      if (p.dy.defined()) LORAACCEL_RETURN_IF_ERROR(backward_float64(ctx, op, args, p, start));
      start += total_rank(p.adapters);
    }
    return Status();
  }
  Scratch<char> x_copy;
  AnyRows x;
  if (reads_input(args)) LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, args.x, &x_copy, &x));
  const LoraSimd& simd = lora_simd_best();
  RankBackward rank;
  LORAACCEL_RETURN_IF_ERROR(rank.prepare(simd, ctx, op, rows, layers, args.samples));
  if (rank.adapters().empty()) return Status();
  const Tasks tasks = rank.tasks();
  run_tasks(ctx, {&tasks, 1});
  if (args.dx.defined())
    LORAACCEL_RETURN_IF_ERROR(rank.add_to_dx(simd, ctx, args.dx, /*plain_too=*/true));
  return rank.adapter_gradients(simd, ctx, x, args.x.cols(), args.h);
}

}  // namespace loraaccel
