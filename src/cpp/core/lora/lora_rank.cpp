#include "lora/lora_rank.h"

#include <algorithm>
#include <atomic>

#include "random/philox.h"

namespace loraaccel {
namespace {

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

int64_t total_rank(std::span<const LoraAdapter> adapters) {
  int64_t total = 0;
  for (const LoraAdapter& ad : adapters) total += ad.a.rows();
  return total;
}

namespace {

// Rows of a factor in x's type where they are that already, else as floats in scratch.
Status rank_factor(const ExecContext& ctx, const char* op, const TensorView& factor, DType x_dtype,
                   Scratch<float>* scratch, AnyRows* out) {
  if (factor.dtype == x_dtype && has_unit_columns(factor)) {
    *out = {factor.data, factor.stride[0], factor.dtype};
    return Status();
  }
  Rows<float> rows;
  LORAACCEL_RETURN_IF_ERROR(rows_as<float>(ctx, op, factor, scratch, &rows));
  *out = {rows.data, rows.stride, DType::kFloat32};
  return Status();
}

}  // namespace

Status rank_hidden(const LoraSimd& simd, const ExecContext& ctx, const char* op, const AnyRows& x,
                   int64_t rows, int64_t inputs, std::span<const LoraAdapter> adapters,
                   const TensorView& h) {
  std::vector<Scratch<float>> copies(adapters.size());
  std::vector<AnyRows> factors(adapters.size());
  for (size_t i = 0; i < adapters.size(); ++i) {
    // The product with dropout is of floats: an A of the same type as x is then converted too.
    const DType wanted = adapters[i].dropout.p > 0 ? DType::kFloat32 : x.dtype;
    LORAACCEL_RETURN_IF_ERROR(rank_factor(ctx, op, adapters[i].a, wanted, &copies[i], &factors[i]));
  }
  const int64_t block = row_block(ctx, rows);
  std::atomic<bool> no_memory{false};
  parallel_for(ctx, ceil_div(rows, block), [&](int64_t task) {
    const int64_t row0 = task * block;
    const int64_t count = std::min(block, rows - row0);
    float* out = static_cast<float*>(h.data) + row0 * h.stride[0];
    Scratch<float> dropped;
    for (size_t i = 0; i < adapters.size(); ++i) {
      const LoraAdapter& ad = adapters[i];
      const AnyRows& a = factors[i];
      const int64_t rank = ad.a.rows();
      if (ad.dropout.p <= 0) {
        simd.dot(x.dtype, x.at(row0), x.stride, a.dtype, a.data, a.stride, 1.0F, out, h.stride[0],
                 count, rank, inputs);
      } else {
        if (dropped.data() == nullptr && !dropped.allocate(ctx, count * inputs)) {
          no_memory = true;
          return;
        }
        simd.dropout(x.dtype, x.at(row0), x.stride,
                     dropout_block(ad.dropout, row0, count, 0, inputs), dropped.data(), inputs);
        simd.dot(DType::kFloat32, dropped.data(), inputs, a.dtype, a.data, a.stride, 1.0F, out,
                 h.stride[0], count, rank, inputs);
      }
      out += rank;
    }
  });
  return no_memory ? out_of_memory(op) : Status();
}

Status RankPanels::build(const LoraSimd& simd, const ExecContext& ctx, const char* op,
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
  if (!panels_.allocate(ctx, panels * depth_ * width_)) return out_of_memory(op);
  int64_t at = 0;
  for (size_t i = 0; i < adapters.size(); ++i) {
    if (!take[i]) continue;
    const LoraAdapter& ad = adapters[i];
    const bool scaled = factor == RankFactor::kScaledB;
    Scratch<char> copy;
    AnyRows source;
    LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, scaled ? ad.b : ad.a, &copy, &source));
    const int64_t rank = ad.a.rows();
    const auto scale = static_cast<float>(ad.scale);
    parallel_for(ctx, std::min<int64_t>(ctx.num_threads, panels), [&](int64_t part) {
      for (int64_t p = part; p < panels; p += ctx.num_threads) {
        PanelSource panel;
        panel.data = scaled ? source.at(p * width_) : source.at(0, p * width_);
        panel.stride = source.stride;
        panel.dtype = source.dtype;
        panel.transposed = scaled;
        panel.count = static_cast<int>(std::min(width_, columns - p * width_));
        panel.depth = rank;
        float* out = panels_.data() + (p * depth_ + at) * width_;
        simd.pack(panel, /*pairs=*/false, out);
        if (scaled) {
          for (int64_t j = 0; j < rank * width_; ++j) out[j] *= scale;
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

Status rank_expand(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                   std::span<const LoraAdapter> adapters, const TensorView& h,
                   const TensorView& y) {
  RankPanels panels;
  LORAACCEL_RETURN_IF_ERROR(panels.build(simd, ctx, op, adapters, RankFactor::kScaledB,
                                         std::vector<bool>(adapters.size(), true)));
  if (panels.depth() != 0) {
    add_rank_product(simd, ctx, static_cast<const float*>(h.data), h.stride[0], panels, y);
  }
  return Status();
}

namespace {

// u = s G B for one adapter; B^T is in G's type where B is, else in floats.
Status scaled_gradient(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                       const RankLayer& layer, const LoraAdapter& ad, int64_t rows, float* u,
                       int64_t u_stride) {
  const int64_t rank = ad.a.rows();
  const TensorView bt = ad.b.transposed();
  const DType dtype = bt.dtype == layer.dy.dtype ? bt.dtype : DType::kFloat32;
  Scratch<char> copy;  // [R, N]
  if (!copy.allocate(ctx, bt.numel() * static_cast<int64_t>(dtype_size_bytes(dtype))))
    return out_of_memory(op);
  visit_dtype(bt.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* source = static_cast<const T*>(bt.data);
    if (dtype == bt.dtype) {
      move_rows(ctx, source, bt.stride[0], bt.stride[1], reinterpret_cast<T*>(copy.data()),
                layer.outputs, rank, layer.outputs);
    } else {
      convert_rows(ctx, source, bt.stride[0], bt.stride[1], reinterpret_cast<float*>(copy.data()),
                   layer.outputs, 1, rank, layer.outputs);
    }
  });
  const int64_t block = row_block(ctx, rows);
  parallel_for(ctx, ceil_div(rows, block), [&](int64_t task) {
    const int64_t row0 = task * block;
    simd.dot(layer.dy.dtype, layer.dy.at(row0), layer.dy.stride, dtype, copy.data(), layer.outputs,
             static_cast<float>(ad.scale), u + row0 * u_stride, u_stride,
             std::min(block, rows - row0), rank, layer.outputs);
  });
  return Status();
}

}  // namespace

Status RankBackward::prepare(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                             int64_t rows, std::span<const RankLayer> layers) {
  op_ = op;
  rows_ = rows;
  layers_ = layers;
  for (const RankLayer& layer : layers)
    adapters_.insert(adapters_.end(), layer.adapters.begin(), layer.adapters.end());
  start_.resize(adapters_.size());
  for (const bool dropped : {false, true}) {
    for (size_t i = 0; i < adapters_.size(); ++i) {
      if ((adapters_[i].dropout.p > 0) != dropped) continue;
      start_[i] = columns_;
      columns_ += adapters_[i].a.rows();
    }
    if (!dropped) plain_depth_ = columns_;
  }
  for (const LoraAdapter& ad : adapters_) plain_.push_back(ad.dropout.p <= 0);
  if (columns_ == 0) return Status();
  if (!u_.allocate(ctx, rows * columns_) || !u_transposed_.allocate(ctx, rows * columns_))
    return out_of_memory(op);
  size_t index = 0;
  for (const RankLayer& layer : layers) {
    for (const LoraAdapter& ad : layer.adapters) {
      float* u = u_.data() + start_[index++];
      if (layer.dy.data == nullptr) {
        for (int64_t m = 0; m < rows; ++m) std::fill_n(u + m * columns_, ad.a.rows(), 0.0F);
      } else {
        LORAACCEL_RETURN_IF_ERROR(scaled_gradient(simd, ctx, op, layer, ad, rows, u, columns_));
      }
    }
  }
  transpose_rank(u_.data(), columns_, rows, columns_, u_transposed_.data());
  return Status();
}

Status RankBackward::add_to_dx(const LoraSimd& simd, const ExecContext& ctx, const TensorView& dx,
                               bool plain_too) const {
  // One part for all adapters without dropout, one for each that has it.
  struct Part {
    RankPanels panels;
    int64_t start = 0;
    const DropoutSpec* dropout = nullptr;
  };
  std::vector<Part> parts(adapters_.size() + 1);
  size_t count = 0;
  if (plain_too && plain_depth_ > 0) {
    LORAACCEL_RETURN_IF_ERROR(
        parts[count++].panels.build(simd, ctx, op_, adapters_, RankFactor::kA, plain_));
  }
  for (size_t i = 0; i < adapters_.size(); ++i) {
    if (plain_[i]) continue;
    std::vector<bool> only(adapters_.size(), false);
    only[i] = true;
    Part& part = parts[count++];
    part.start = start_[i];
    part.dropout = &adapters_[i].dropout;
    LORAACCEL_RETURN_IF_ERROR(part.panels.build(simd, ctx, op_, adapters_, RankFactor::kA, only));
  }
  if (count == 0) return Status();
  if (count == 1 && parts[0].dropout == nullptr) {
    add_rank_product(simd, ctx, u_.data(), columns_, parts[0].panels, dx);
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
      rank_rows(simd, u_.data() + row0 * columns_ + part.start, columns_, part.panels, out,
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
  return no_memory ? out_of_memory(op_) : Status();
}

namespace {

// out[r][n] = sum over m of left[r][m] right[m][n], the columns split among threads.
// With dropout, D(right) takes the place of right, made in blocks of rows.
Status wide_outer(const LoraSimd& simd, const ExecContext& ctx, const char* op, const float* left,
                  int64_t rows, int64_t rank, const AnyRows& right, int64_t cols,
                  const DropoutSpec& dropout, float* out) {
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
  return no_memory ? out_of_memory(op) : Status();
}

}  // namespace

Status RankBackward::adapter_gradients(const LoraSimd& simd, const ExecContext& ctx,
                                       const AnyRows& x, int64_t inputs,
                                       const TensorView& h) const {
  size_t index = 0;
  int64_t hidden = 0;  // first column of h: it keeps the order of the adapters
  for (const RankLayer& layer : layers_) {
    for (size_t i = 0; i < layer.adapters.size(); ++i, ++index) {
      const LoraAdapter& ad = layer.adapters[i];
      const int64_t rank = ad.a.rows();
      const int64_t rows = layer.dy.data == nullptr ? 0 : rows_;
      if (layer.da[i].defined()) {
        Scratch<float> out;
        if (!out.allocate(ctx, rank * inputs)) return out_of_memory(op_);
        LORAACCEL_RETURN_IF_ERROR(wide_outer(simd, ctx, op_,
                                             u_transposed_.data() + start_[index] * rows_, rows,
                                             rank, x, inputs, ad.dropout, out.data()));
        store_view(ctx, out.data(), inputs, 1, 1.0F, layer.da[i]);
      }
      if (layer.db[i].defined()) {
        Scratch<float> out, ht;
        if (!out.allocate(ctx, rank * layer.outputs) || !ht.allocate(ctx, rank * rows_))
          return out_of_memory(op_);
        transpose_rank(static_cast<const float*>(h.data) + hidden, h.stride[0], rows, rank,
                       ht.data());
        LORAACCEL_RETURN_IF_ERROR(wide_outer(simd, ctx, op_, ht.data(), rows, rank, layer.dy,
                                             layer.outputs, {}, out.data()));
        store_view(ctx, out.data(), 1, layer.outputs, static_cast<float>(ad.scale), layer.db[i]);
      }
      hidden += rank;
    }
  }
  return Status();
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
