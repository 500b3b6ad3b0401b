#include "lora/lora_linear_rank.h"

#include <algorithm>
#include <atomic>

#include "random/philox.h"

namespace loraaccel {
namespace {

constexpr const char* kOp = "lora_linear";
// Rows that one task handles: x of a block stays in the second cache while each adapter reads it.
constexpr int64_t kRowBlock = 64;

int64_t row_block(const ExecContext& ctx, int64_t rows) {
  return std::clamp<int64_t>(ceil_div(rows, ctx.num_threads), 1, kRowBlock);
}

DropoutBlock dropout_block(const DropoutSpec& d, int64_t row0, int64_t rows, int64_t col0,
                           int64_t cols) {
  return {row0, rows, col0, cols, d.seed, d.offset, d.p};
}

// out[c][m] = in[m][c]
void transpose_rank(const float* in, int64_t in_stride, int64_t rows, int64_t ranks, float* out) {
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t c = 0; c < ranks; ++c) out[c * rows + m] = in[m * in_stride + c];
  }
}

}  // namespace

RankColumns rank_columns(std::span<const LoraAdapter> adapters) {
  RankColumns columns;
  for (const LoraAdapter& ad : adapters) {
    columns.start.push_back(columns.total);
    columns.total += ad.a.rows();
  }
  return columns;
}

Status rank_hidden(const LoraSimd& simd, const ExecContext& ctx, const AnyRows& x, int64_t rows,
                   int64_t inputs, std::span<const LoraAdapter> adapters, const TensorView& h) {
  const RankColumns columns = rank_columns(adapters);
  const int64_t block = row_block(ctx, rows);
  for (size_t i = 0; i < adapters.size(); ++i) {
    const LoraAdapter& ad = adapters[i];
    Scratch<float> a_copy;
    Rows<float> a;
    LORAACCEL_RETURN_IF_ERROR(rows_as<float>(ctx, kOp, ad.a, &a_copy, &a));
    std::atomic<bool> no_memory{false};
    parallel_for(ctx, ceil_div(rows, block), [&](int64_t task) {
      const int64_t row0 = task * block;
      const int64_t count = std::min(block, rows - row0);
      float* out = static_cast<float*>(h.data) + row0 * h.stride[0] + columns.start[i];
      if (ad.dropout.p <= 0) {
        simd.shrink(x.dtype, x.at(row0), x.stride, a.data, a.stride, 1.0F, out, h.stride[0], count,
                    ad.a.rows(), inputs);
        return;
      }
      Scratch<float> dropped;
      if (!dropped.allocate(ctx, count * inputs)) {
        no_memory = true;
        return;
      }
      simd.dropout(x.dtype, x.at(row0), x.stride, dropout_block(ad.dropout, row0, count, 0, inputs),
                   dropped.data(), inputs);
      simd.shrink(DType::kFloat32, dropped.data(), inputs, a.data, a.stride, 1.0F, out, h.stride[0],
                  count, ad.a.rows(), inputs);
    });
    if (no_memory) return out_of_memory(kOp);
  }
  return Status();
}

Status RankPanels::build(const LoraSimd& simd, const ExecContext& ctx,
                         std::span<const LoraAdapter> adapters, RankFactor factor,
                         const std::vector<bool>& take) {
  width_ = simd.width;
  depth_ = 0;
  int64_t columns = 0;
  for (size_t i = 0; i < adapters.size(); ++i) {
    columns = factor == RankFactor::kScaledB ? adapters[i].b.rows() : adapters[i].a.cols();
    if (take[i]) depth_ += adapters[i].a.rows();
  }
  if (depth_ == 0) return Status();
  const int64_t panels = ceil_div(columns, width_);
  if (!panels_.allocate(ctx, panels * depth_ * width_)) return out_of_memory(kOp);
  int64_t at = 0;
  for (size_t i = 0; i < adapters.size(); ++i) {
    if (!take[i]) continue;
    const LoraAdapter& ad = adapters[i];
    Scratch<float> copy;
    Rows<float> source;
    LORAACCEL_RETURN_IF_ERROR(
        rows_as<float>(ctx, kOp, factor == RankFactor::kScaledB ? ad.b : ad.a, &copy, &source));
    const int64_t rank = ad.a.rows();
    parallel_for(ctx, ctx.num_threads, [&](int64_t part) {
      for (int64_t p = part; p < panels; p += ctx.num_threads) {
        const int count = static_cast<int>(std::min(width_, columns - p * width_));
        float* out = panels_.data() + (p * depth_ + at) * width_;
        if (factor == RankFactor::kScaledB) {
          simd.pack_transposed(source.data + p * width_ * source.stride, source.stride, count, rank,
                               static_cast<float>(ad.scale), out);
        } else {
          simd.pack_rows(source.data + p * width_, source.stride, count, rank, out);
        }
      }
    });
    at += rank;
  }
  return Status();
}

namespace {

// c = [c +] left2 panels for the rows of c, one pass over c; c has unit columns.
void rank_rows(const LoraSimd& simd, const float* left2, int64_t left2_stride,
               const RankPanels& panels, const TensorView& c, bool add) {
  PanelProduct p{};
  p.left2 = left2;
  p.left2_stride = left2_stride;
  p.depth2 = panels.depth();
  p.c_stride = c.stride[0];
  p.c_dtype = c.dtype;
  p.m = c.rows();
  p.add = add;
  const auto element = static_cast<int64_t>(dtype_size_bytes(c.dtype));
  for (int64_t col = 0; col < c.cols(); col += simd.width) {
    p.panel2 = panels.panel(col / simd.width);
    p.c = static_cast<char*>(c.data) + col * element;
    p.n = static_cast<int>(std::min<int64_t>(simd.width, c.cols() - col));
    simd.product(p);
  }
}

// c += left2 panels, on all threads.
void add_rank_product(const LoraSimd& simd, const ExecContext& ctx, const float* left2,
                      int64_t left2_stride, const RankPanels& panels, const TensorView& c) {
  const int64_t block = row_block(ctx, c.rows());
  const auto element = static_cast<int64_t>(dtype_size_bytes(c.dtype));
  parallel_for(ctx, ceil_div(c.rows(), block), [&](int64_t task) {
    const int64_t row0 = task * block;
    TensorView part = c;
    part.data = static_cast<char*>(c.data) + row0 * c.stride[0] * element;
    part.shape[0] = std::min(block, c.rows() - row0);
    rank_rows(simd, left2 + row0 * left2_stride, left2_stride, panels, part, /*add=*/true);
  });
}

}  // namespace

Status rank_expand(const LoraSimd& simd, const ExecContext& ctx,
                   std::span<const LoraAdapter> adapters, const TensorView& h,
                   const TensorView& y) {
  RankPanels panels;
  LORAACCEL_RETURN_IF_ERROR(panels.build(simd, ctx, adapters, RankFactor::kScaledB,
                                         std::vector<bool>(adapters.size(), true)));
  if (panels.depth() != 0) {
    add_rank_product(simd, ctx, static_cast<const float*>(h.data), h.stride[0], panels, y);
  }
  return Status();
}

Status RankBackward::prepare(const LoraSimd& simd, const ExecContext& ctx,
                             const LoraLinearBackwardArgs& args) {
  const int64_t rows = args.dy.rows();
  const int64_t outputs = args.dy.cols();
  columns_.start.resize(args.adapters.size());
  for (const bool dropped : {false, true}) {
    for (size_t i = 0; i < args.adapters.size(); ++i) {
      if ((args.adapters[i].dropout.p > 0) != dropped) continue;
      columns_.start[i] = columns_.total;
      columns_.total += args.adapters[i].a.rows();
    }
    if (!dropped) plain_depth_ = columns_.total;
  }
  for (const LoraAdapter& ad : args.adapters) plain_.push_back(ad.dropout.p <= 0);
  if (columns_.total == 0) return Status();
  if (!u_.allocate(ctx, rows * columns_.total) ||
      !u_transposed_.allocate(ctx, rows * columns_.total)) {
    return out_of_memory(kOp);
  }
  AnyRows dy;
  LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, kOp, args.dy, &dy_copy_, &dy));
  const int64_t block = row_block(ctx, rows);
  for (size_t i = 0; i < args.adapters.size(); ++i) {
    const LoraAdapter& ad = args.adapters[i];
    Scratch<float> b_copy;  // B^T, [R, N]
    if (!b_copy.allocate(ctx, ad.b.numel())) return out_of_memory(kOp);
    const TensorView bt = ad.b.transposed();
    visit_dtype(bt.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      convert_rows(ctx, static_cast<const T*>(bt.data), bt.stride[0], bt.stride[1], b_copy.data(),
                   outputs, 1, bt.rows(), outputs);
    });
    parallel_for(ctx, ceil_div(rows, block), [&](int64_t task) {
      const int64_t row0 = task * block;
      simd.shrink(dy.dtype, dy.at(row0), dy.stride, b_copy.data(), outputs,
                  static_cast<float>(ad.scale),
                  u_.data() + row0 * columns_.total + columns_.start[i], columns_.total,
                  std::min(block, rows - row0), ad.a.rows(), outputs);
    });
  }
  transpose_rank(u_.data(), columns_.total, rows, columns_.total, u_transposed_.data());
  return Status();
}

Status RankBackward::add_to_dx(const LoraSimd& simd, const ExecContext& ctx,
                               const LoraLinearBackwardArgs& args, bool plain_too) const {
  const TensorView& dx = args.grads.dx;
  // One part for all adapters without dropout, one for each that has it.
  struct Part {
    RankPanels panels;
    int64_t start = 0;
    const DropoutSpec* dropout = nullptr;
  };
  std::vector<Part> parts(args.adapters.size() + 1);
  size_t count = 0;
  if (plain_too && plain_depth_ > 0) {
    LORAACCEL_RETURN_IF_ERROR(
        parts[count++].panels.build(simd, ctx, args.adapters, RankFactor::kA, plain_));
  }
  for (size_t i = 0; i < args.adapters.size(); ++i) {
    if (plain_[i]) continue;
    std::vector<bool> only(args.adapters.size(), false);
    only[i] = true;
    Part& part = parts[count++];
    part.start = columns_.start[i];
    part.dropout = &args.adapters[i].dropout;
    LORAACCEL_RETURN_IF_ERROR(part.panels.build(simd, ctx, args.adapters, RankFactor::kA, only));
  }
  if (count == 0) return Status();
  if (count == 1 && parts[0].dropout == nullptr) {
    add_rank_product(simd, ctx, u_.data(), columns_.total, parts[0].panels, dx);
    return Status();
  }
  const int64_t rows = dx.rows();
  const int64_t cols = dx.cols();
  const int64_t block = row_block(ctx, rows);
  const auto element = static_cast<int64_t>(dtype_size_bytes(dx.dtype));
  std::atomic<bool> no_memory{false};
  parallel_for(ctx, ceil_div(rows, block), [&](int64_t task) {
    const int64_t row0 = task * block;
    const int64_t m = std::min(block, rows - row0);
    Scratch<float> sum;
    Scratch<float> update;
    if (!update.allocate(ctx, m * cols) || (count > 1 && !sum.allocate(ctx, m * cols))) {
      no_memory = true;
      return;
    }
    // With several parts their sum is made first, so that dx is rounded once for all of them.
    for (size_t i = 0; i < count; ++i) {
      const Part& part = parts[i];
      const bool plain = part.dropout == nullptr;
      const TensorView out =
          TensorView::matrix(plain ? sum.data() : update.data(), DType::kFloat32, m, cols);
      rank_rows(simd, u_.data() + row0 * columns_.total + part.start, columns_.total, part.panels,
                out,
                /*add=*/false);
      if (plain) continue;
      if (count > 1) {
        if (i == 0) std::fill(sum.data(), sum.data() + m * cols, 0.0F);
        simd.dropout_add(update.data(), cols, dropout_block(*part.dropout, row0, m, 0, cols),
                         DType::kFloat32, sum.data(), cols);
      }
    }
    const DropoutBlock last =
        dropout_block(count > 1 ? DropoutSpec{} : *parts[0].dropout, row0, m, 0, cols);
    simd.dropout_add(count > 1 ? sum.data() : update.data(), cols, last, dx.dtype,
                     static_cast<char*>(dx.data) + row0 * dx.stride[0] * element, dx.stride[0]);
  });
  return no_memory ? out_of_memory(kOp) : Status();
}

namespace {

// out[r][n] = sum over m of left[r][m] right[m][n], the columns split among threads.
// With dropout, D(right) takes the place of right, made in blocks of rows.
Status wide_outer(const LoraSimd& simd, const ExecContext& ctx, const float* left, int64_t rows,
                  int64_t rank, const AnyRows& right, int64_t cols, const DropoutSpec& dropout,
                  float* out) {
  constexpr int64_t kColumnBlock = 256;  // a multiple of kDropoutGroup and of every panel width
  constexpr int64_t kDropoutRows = 128;
  static_assert(kColumnBlock % kDropoutGroup == 0);
  std::atomic<bool> no_memory{false};
  const int64_t block =
      std::clamp<int64_t>(ceil_div(ceil_div(cols, ctx.num_threads), kDropoutGroup) * kDropoutGroup,
                          kDropoutGroup, kColumnBlock);
  parallel_for(ctx, ceil_div(cols, block), [&](int64_t task) {
    const int64_t col0 = task * block;
    const int64_t count = std::min(block, cols - col0);
    if (dropout.p <= 0 || rows == 0) {
      simd.outer(left, rows, right.dtype, right.at(0, col0), right.stride, out + col0, cols, rank,
                 rows, count, false);
      return;
    }
    Scratch<float> dropped;
    if (!dropped.allocate(ctx, kDropoutRows * block)) {
      no_memory = true;
      return;
    }
    for (int64_t row0 = 0; row0 < rows; row0 += kDropoutRows) {
      const int64_t m = std::min(kDropoutRows, rows - row0);
      simd.dropout(right.dtype, right.at(row0, col0), right.stride,
                   dropout_block(dropout, row0, m, col0, count), dropped.data(), block);
      simd.outer(left + row0, rows, DType::kFloat32, dropped.data(), block, out + col0, cols, rank,
                 m, count, row0 != 0);
    }
  });
  return no_memory ? out_of_memory(kOp) : Status();
}

}  // namespace

Status RankBackward::adapter_gradients(const LoraSimd& simd, const ExecContext& ctx,
                                       const LoraLinearBackwardArgs& args, const AnyRows& x,
                                       const AnyRows& dy) const {
  const int64_t rows = args.x.rows();
  const RankColumns hidden = rank_columns(args.adapters);  // h keeps the order of the adapters
  for (size_t i = 0; i < args.adapters.size(); ++i) {
    const LoraAdapter& ad = args.adapters[i];
    const int64_t rank = ad.a.rows();
    if (args.grads.da[i].defined()) {
      Scratch<float> out;
      if (!out.allocate(ctx, rank * args.x.cols())) return out_of_memory(kOp);
      LORAACCEL_RETURN_IF_ERROR(wide_outer(simd, ctx,
                                           u_transposed_.data() + columns_.start[i] * rows, rows,
                                           rank, x, args.x.cols(), ad.dropout, out.data()));
      store_view(ctx, out.data(), args.x.cols(), 1, 1.0F, args.grads.da[i]);
    }
    if (args.grads.db[i].defined()) {
      const int64_t outputs = args.w.rows();
      Scratch<float> out, h;
      if (!out.allocate(ctx, rank * outputs) || !h.allocate(ctx, rank * rows))
        return out_of_memory(kOp);
      transpose_rank(static_cast<const float*>(args.h.data) + hidden.start[i], args.h.stride[0],
                     rows, rank, h.data());
      LORAACCEL_RETURN_IF_ERROR(
          wide_outer(simd, ctx, h.data(), rows, rank, dy, outputs, {}, out.data()));
      store_view(ctx, out.data(), 1, outputs, static_cast<float>(ad.scale), args.grads.db[i]);
    }
  }
  return Status();
}

bool needs_input(const LoraLinearBackwardArgs& args) {
  const auto& da = args.grads.da;
  return args.grads.dw.defined() ||
         std::any_of(da.begin(), da.end(), [](const TensorView& v) { return v.defined(); });
}

void column_sums(const ExecContext& ctx, const AnyRows& dy, int64_t rows, const TensorView& out) {
  constexpr int64_t kColumnBlock = 64;
  visit_dtype(dy.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(ctx, ceil_div(out.rows(), kColumnBlock), [&](int64_t task) {
      const int64_t col0 = task * kColumnBlock;
      const int64_t count = std::min(kColumnBlock, out.rows() - col0);
      double sums[kColumnBlock] = {};
      for (int64_t m = 0; m < rows; ++m) {
        const T* row = static_cast<const T*>(dy.at(m, col0));
        for (int64_t j = 0; j < count; ++j) sums[j] += static_cast<double>(to_float(row[j]));
      }
      for (int64_t j = 0; j < count; ++j) {
        visit_dtype(out.dtype, [&](auto to) {
          from_float(sums[j], static_cast<typename decltype(to)::type*>(out.data) +
                                  (col0 + j) * out.stride[0]);
        });
      }
    });
  });
}

}  // namespace loraaccel
