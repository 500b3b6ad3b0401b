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

}  // namespace

int64_t total_rank(std::span<const LoraAdapter> adapters) {
  int64_t total = 0;
  for (const LoraAdapter& ad : adapters) total += ad.a.rows();
  return total;
}

void RankAdapters::add(std::span<const LoraAdapter> layer) {
  list.insert(list.end(), layer.begin(), layer.end());
  for (size_t i = 0; i < layer.size(); ++i) index.push_back(static_cast<int64_t>(i));
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

Status RankHidden::prepare(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                           const AnyRows& x, int64_t rows, int64_t inputs,
                           const RankAdapters& adapters, const TensorView& h) {
  simd_ = &simd;
  ctx_ = &ctx;
  op_ = op;
  x_ = x;
  rows_ = rows;
  inputs_ = inputs;
  adapters_ = &adapters;
  h_ = h;
  copies_ = std::vector<Scratch<float>>(adapters.list.size());
  factors_.resize(adapters.list.size());
  for (size_t i = 0; i < adapters.list.size(); ++i) {
    // The product with dropout is of floats: an A of the same type as x is then converted too.
    const LoraAdapter& ad = adapters.list[i];
    const DType wanted = ad.dropout.p > 0 ? DType::kFloat32 : x.dtype;
    LORAACCEL_RETURN_IF_ERROR(rank_factor(ctx, op, ad.a, wanted, &copies_[i], &factors_[i]));
  }
  return Status();
}

Tasks RankHidden::tasks() {
  if (adapters_->list.empty()) return {};
  return {ceil_div(rows_, row_block(*ctx_, rows_)), [this](int64_t block) { run(block); }};
}

void RankHidden::run(int64_t block) {
  const int64_t step = row_block(*ctx_, rows_);
  const int64_t row0 = block * step;
  const int64_t count = std::min(step, rows_ - row0);
  const LoraSamples& samples = adapters_->samples;
  float* out = static_cast<float*>(h_.data) + row0 * h_.stride[0];
  Scratch<float> dropped;
  for (size_t i = 0; i < adapters_->list.size(); ++i) {
    const int64_t rank = adapters_->list[i].a.rows();
    if (samples.adapter == nullptr) {
      run_adapter(i, row0, count, out, &dropped);
    } else {
      for_adapter_runs(samples, row0, row0 + count, [&](int64_t begin, int64_t end, int64_t has) {
        float* to = out + (begin - row0) * h_.stride[0];
        if (has == adapters_->index[i]) {
          run_adapter(i, begin, end - begin, to, &dropped);
        } else {
          for (int64_t m = begin; m < end; ++m, to += h_.stride[0]) std::fill_n(to, rank, 0.0F);
        }
      });
    }
    out += rank;
  }
}

// h of one adapter for some rows.
void RankHidden::run_adapter(size_t i, int64_t row0, int64_t count, float* out,
                             Scratch<float>* dropped) {
  const LoraAdapter& ad = adapters_->list[i];
  const AnyRows& a = factors_[i];
  const int64_t rank = ad.a.rows();
  if (ad.dropout.p <= 0) {
    simd_->dot(x_.dtype, x_.at(row0), x_.stride, a.dtype, a.data, a.stride, 1.0F, out, h_.stride[0],
               count, rank, inputs_);
  } else {
    if (dropped->data() == nullptr && !dropped->allocate(*ctx_, count * inputs_)) {
      no_memory_ = true;
      return;
    }
    simd_->dropout(x_.dtype, x_.at(row0), x_.stride,
                   dropout_block(ad.dropout, row0, count, 0, inputs_), dropped->data(), inputs_);
    simd_->dot(DType::kFloat32, dropped->data(), inputs_, a.dtype, a.data, a.stride, 1.0F, out,
               h_.stride[0], count, rank, inputs_);
  }
  if (has_rank_masks(ad))
    apply_rank_masks(*simd_, ad, adapters_->samples, row0, count, out, h_.stride[0]);
}

Status rank_hidden(const LoraSimd& simd, const ExecContext& ctx, const char* op, const AnyRows& x,
                   int64_t rows, int64_t inputs, const RankAdapters& adapters,
                   const TensorView& h) {
  RankHidden hidden;
  LORAACCEL_RETURN_IF_ERROR(hidden.prepare(simd, ctx, op, x, rows, inputs, adapters, h));
  const Tasks tasks = hidden.tasks();
  run_tasks(ctx, {&tasks, 1});
  return hidden.status();
}

Status RankPanels::prepare(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                           std::span<const LoraAdapter> adapters, RankFactor factor,
                           const std::vector<bool>& take) {
  simd_ = &simd;
  factor_ = factor;
  width_ = simd.width;
  const bool scaled = factor == RankFactor::kScaledB;
  for (size_t i = 0; i < adapters.size(); ++i) {
    const LoraAdapter& ad = adapters[i];
    columns_ = scaled ? ad.b.rows() : ad.a.cols();
    if (!take[i]) continue;
    Part& part = parts_.emplace_back();
    LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, scaled ? ad.b : ad.a, &part.copy, &part.source));
    part.rank = ad.a.rows();
    part.scale = scaled ? static_cast<float>(ad.scale) : 1.0F;
    depth_ += part.rank;
  }
  if (depth_ == 0) return Status();
  return panels_.allocate(ctx, ceil_div(columns_, width_) * depth_ * width_) ? Status()
                                                                             : out_of_memory(op);
}

Status RankPanels::allocate(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                            int64_t columns, int64_t depth) {
  width_ = simd.width;
  columns_ = columns;
  depth_ = depth;
  return panels_.allocate(ctx, ceil_div(columns_, width_) * depth_ * width_) ? Status()
                                                                             : out_of_memory(op);
}

Tasks RankPanels::tasks() {
  if (depth_ == 0) return {};
  // Each is small: several in one task.
  const int64_t panels = ceil_div(columns_, width_);
  constexpr int64_t kGroup = 8;
  return {ceil_div(panels, kGroup), [this, panels](int64_t group) {
            for (int64_t p = group * kGroup; p < std::min(panels, (group + 1) * kGroup); ++p)
              run(p);
          }};
}

void RankPanels::run(int64_t panel) {
  const int64_t col = panel * width_;
  float* out = panels_.data() + panel * depth_ * width_;
  for (const Part& part : parts_) {
    PanelSource source;
    source.transposed = factor_ == RankFactor::kScaledB;
    source.data = source.transposed ? part.source.at(col) : part.source.at(0, col);
    source.stride = part.source.stride;
    source.dtype = part.source.dtype;
    source.count = static_cast<int>(std::min(width_, columns_ - col));
    source.depth = part.rank;
    simd_->pack(source, /*pairs=*/false, out);
    if (part.scale != 1.0F) {
      for (int64_t j = 0; j < part.rank * width_; ++j) out[j] *= part.scale;
    }
    out += part.rank * width_;
  }
}

namespace {

// c = [c +] left2 panels for the rows of c, one pass over c, with the run's columns of the rank space; c has unit columns.
void rank_rows(const LoraSimd& simd, const float* left2, int64_t left2_stride,
               const RankPanels& panels, const RankRun& run, const TensorView& c, bool add) {
  PanelProduct p{};
  p.left2 = left2 + run.column;
  p.left2_stride = left2_stride;
  p.depth2 = run.depth;
  p.c_stride = c.stride[0];
  p.c_dtype = c.dtype;
  p.m = c.rows();
  p.add = add;
  const auto element = static_cast<int64_t>(dtype_size_bytes(c.dtype));
  for (int64_t col = 0; col < c.cols(); col += simd.width) {
    p.panel2 = panels.panel(col / simd.width) + run.panel * simd.width;
    p.c = static_cast<char*>(c.data) + col * element;
    p.n = static_cast<int>(std::min<int64_t>(simd.width, c.cols() - col));
    simd.product(p);
  }
}

TensorView rows_from(const TensorView& v, int64_t row, int64_t count) {
  TensorView part = v;
  part.data = static_cast<char*>(v.data) +
              row * v.stride[0] * static_cast<int64_t>(dtype_size_bytes(v.dtype));
  part.shape[0] = count;
  return part;
}

// c += left2 panels, on all threads. runs: which columns of left2 belong to which rows; empty: all to all.
void add_rank_product(const LoraSimd& simd, const ExecContext& ctx, const float* left2,
                      int64_t left2_stride, const RankPanels& panels, const TensorView& c,
                      const std::vector<RankRun>& runs) {
  const int64_t block = row_block(ctx, c.rows());
  parallel_for(ctx, ceil_div(c.rows(), block), [&](int64_t task) {
    const int64_t row0 = task * block;
    const int64_t end = std::min(row0 + block, c.rows());
    for_rank_runs(runs, {row0, end, 0, 0, panels.depth()}, [&](const RankRun& run) {
      rank_rows(simd, left2 + run.begin * left2_stride, left2_stride, panels, run,
                rows_from(c, run.begin, run.end - run.begin), /*add=*/true);
    });
  });
}

}  // namespace

Status rank_expand(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                   std::span<const LoraAdapter> adapters, const LoraSamples& samples,
                   const TensorView& h, const TensorView& y) {
  RankPanels panels;
  LORAACCEL_RETURN_IF_ERROR(panels.prepare(simd, ctx, op, adapters, RankFactor::kScaledB,
                                           used_adapters(samples, y.rows(), adapters.size())));
  const Tasks tasks = panels.tasks();
  run_tasks(ctx, {&tasks, 1});
  if (panels.depth() != 0) {
    add_rank_product(simd, ctx, static_cast<const float*>(h.data), h.stride[0], panels, y,
                     layer_runs(samples, y.rows(), adapters));
  }
  return Status();
}

Status RankBackward::prepare(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                             int64_t rows, std::span<const RankLayer> layers,
                             const LoraSamples& samples) {
  simd_ = &simd;
  adapters_ = RankAdapters(samples);
  op_ = op;
  rows_ = rows;
  block_ = row_block(ctx, rows);
  layers_ = layers;
  for (const RankLayer& layer : layers) adapters_.add(layer.adapters);
  const std::vector<LoraAdapter>& list = adapters_.list;
  start_.resize(list.size());
  for (const bool dropped : {false, true}) {
    for (size_t i = 0; i < list.size(); ++i) {
      if ((list[i].dropout.p > 0) != dropped) continue;
      start_[i] = columns_;
      columns_ += list[i].a.rows();
    }
    if (!dropped) plain_depth_ = columns_;
  }
  const std::vector<bool> used = used_adapters(samples, rows, list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    plain_.push_back(list[i].dropout.p <= 0);
    in_panels_.push_back(plain_[i] && (layers.size() > 1 || used[i]));
  }
  if (layers.size() == 1) runs_ = layer_runs(samples, rows, list);
  if (columns_ == 0) return Status();
  if (!u_.allocate(ctx, rows * columns_)) return out_of_memory(op);
  for (const RankLayer& layer : layers) {
    for (const LoraAdapter& ad : layer.adapters) {
      Source& source = sources_.emplace_back();
      source.layer = &layer;
      source.adapter = &ad;
      if (layer.dy.data == nullptr) continue;
      // B^T is in G's type where B is, else in floats.
      const TensorView bt = ad.b.transposed();
      const DType dtype = bt.dtype == layer.dy.dtype ? bt.dtype : DType::kFloat32;
      if (!source.copy.allocate(ctx, bt.numel() * static_cast<int64_t>(dtype_size_bytes(dtype))))
        return out_of_memory(op);
      source.bt = {source.copy.data(), layer.outputs, dtype};
      visit_dtype(bt.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        const auto* from = static_cast<const T*>(bt.data);
        if (dtype == bt.dtype) {
          move_rows(ctx, from, bt.stride[0], bt.stride[1], reinterpret_cast<T*>(source.copy.data()),
                    layer.outputs, bt.rows(), layer.outputs);
        } else {
          convert_rows(ctx, from, bt.stride[0], bt.stride[1],
                       reinterpret_cast<float*>(source.copy.data()), layer.outputs, 1, bt.rows(),
                       layer.outputs);
        }
      });
    }
  }
  return Status();
}

Tasks RankBackward::tasks() {
  if (columns_ == 0) return {};
  return {ceil_div(rows_, block_), [this](int64_t block) { run(block); }};
}

void RankBackward::run(int64_t block) {
  const int64_t row0 = block * block_;
  const int64_t count = std::min(block_, rows_ - row0);
  for (size_t i = 0; i < sources_.size(); ++i) {
    const Source& source = sources_[i];
    const AnyRows& dy = source.layer->dy;
    const int64_t rank = source.adapter->a.rows();
    const LoraSamples& samples = adapters_.samples;
    const auto rows_of_u = [&](int64_t begin, int64_t end, bool has) {
      float* u = u_.data() + begin * columns_ + start_[i];
      if (!has || dy.data == nullptr) {
        for (int64_t m = begin; m < end; ++m, u += columns_) std::fill_n(u, rank, 0.0F);
        return;
      }
      simd_->dot(dy.dtype, dy.at(begin), dy.stride, source.bt.dtype, source.bt.data,
                 source.bt.stride, static_cast<float>(source.adapter->scale), u, columns_,
                 end - begin, rank, source.layer->outputs);
      if (has_rank_masks(*source.adapter))
        apply_rank_masks(*simd_, *source.adapter, samples, begin, end - begin, u, columns_);
    };
    if (samples.adapter == nullptr) {
      rows_of_u(row0, row0 + count, true);
    } else {
      for_adapter_runs(samples, row0, row0 + count, [&](int64_t begin, int64_t end, int64_t has) {
        rows_of_u(begin, end, has == adapters_.index[i]);
      });
    }
  }
}

Status RankBackward::add_to_dx(const LoraSimd& simd, const ExecContext& ctx, const TensorView& dx,
                               bool plain_too) const {
  // One part for all adapters without dropout, one for each that has it.
  struct Part {
    RankPanels panels;
    int64_t start = 0;
    const DropoutSpec* dropout = nullptr;
  };
  const std::vector<LoraAdapter>& list = adapters_.list;
  std::vector<Part> parts(list.size() + 1);
  size_t count = 0;
  if (plain_too && plain_depth_ > 0) {
    LORAACCEL_RETURN_IF_ERROR(
        parts[count++].panels.prepare(simd, ctx, op_, list, RankFactor::kA, in_panels_));
  }
  for (size_t i = 0; i < list.size(); ++i) {
    if (plain_[i]) continue;
    std::vector<bool> only(list.size(), false);
    only[i] = true;
    Part& part = parts[count++];
    part.start = start_[i];
    part.dropout = &list[i].dropout;
    LORAACCEL_RETURN_IF_ERROR(part.panels.prepare(simd, ctx, op_, list, RankFactor::kA, only));
  }
  if (count == 0) return Status();
  std::vector<Tasks> tasks;
  tasks.reserve(count);
  for (size_t i = 0; i < count; ++i) tasks.push_back(parts[i].panels.tasks());
  run_tasks(ctx, tasks);
  if (count == 1 && parts[0].dropout == nullptr) {
    add_rank_product(simd, ctx, u_.data(), columns_, parts[0].panels, dx, runs_);
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
      rank_rows(simd, u_.data() + row0 * columns_ + part.start, columns_, part.panels,
                {0, m, 0, 0, part.panels.depth()}, out, /*add=*/false);
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

// out (+)= a gradient of a factor, [R, cols]: sum over m of left[m][r] right[m][n], times a scale; columns are split into
// tasks. With dropout, D(right) takes the place of right, made in blocks of rows.
struct FactorGradient {
  static constexpr int64_t kColumns = 256;  // a multiple of kDropoutGroup and of every panel width
  static_assert(kColumns % kDropoutGroup == 0);

  const float* left;
  int64_t left_stride;
  AnyRows right;
  int64_t rows, rank, cols;
  DropoutSpec dropout;
  float scale;
  TensorView out;  // [R, cols] of any type and strides
  // Where samples have different adapters: this one's index.
  LoraSamples samples;
  int64_t index = 0;

  // False where there is no memory.
  bool run(const LoraSimd& simd, const ExecContext& ctx, int64_t task) const {
    // As long as the blocks of a sum: the order of additions is that of one call, and the rows of a block are still in
    // the first caches when the next strip of columns reads them.
    constexpr int64_t kRows = 128;
    const int64_t col0 = task * kColumns;
    const int64_t count = std::min(kColumns, cols - col0);
    Scratch<float> sums, dropped;
    if (!sums.allocate(ctx, rank * kColumns)) return false;
    if (dropout.p > 0 && !dropped.allocate(ctx, kRows * kColumns)) return false;
    bool add = false;
    const auto add_rows = [&](int64_t begin, int64_t end) {
      for (int64_t row0 = begin; row0 < end; row0 += kRows, add = true) {
        const int64_t m = std::min(kRows, end - row0);
        AnyRows part = {right.at(row0, col0), right.stride, right.dtype};
        if (dropout.p > 0) {
          simd.dropout(part.dtype, part.data, part.stride,
                       dropout_block(dropout, row0, m, col0, count), dropped.data(), kColumns);
          part = {dropped.data(), kColumns, DType::kFloat32};
        }
        simd.outer(left + row0 * left_stride, left_stride, part.dtype, part.data, part.stride,
                   sums.data(), kColumns, rank, m, count, add);
      }
    };
    if (samples.adapter == nullptr) {
      add_rows(0, rows);
    } else {
      for_adapter_runs(samples, 0, rows, [&](int64_t begin, int64_t end, int64_t has) {
        if (has == index) add_rows(begin, end);
      });
    }
    if (!add) std::fill_n(sums.data(), rank * kColumns, 0.0F);
    visit_dtype(out.dtype, [&](auto tag) {
      auto* to = static_cast<typename decltype(tag)::type*>(out.data);
      for (int64_t n = 0; n < count; ++n) {
        for (int64_t r = 0; r < rank; ++r) {
          from_float(scale * sums.data()[r * kColumns + n],
                     to + r * out.stride[0] + (col0 + n) * out.stride[1]);
        }
      }
    });
    return true;
  }
};

}  // namespace

Status RankBackward::adapter_gradients(const LoraSimd& simd, const ExecContext& ctx,
                                       const AnyRows& x, int64_t inputs,
                                       const TensorView& h) const {
  std::vector<FactorGradient> gradients;
  size_t index = 0;
  int64_t hidden = 0;  // first column of h: it keeps the order of the adapters
  for (const RankLayer& layer : layers_) {
    const int64_t rows = layer.dy.data == nullptr ? 0 : rows_;
    for (size_t i = 0; i < layer.adapters.size(); ++i, ++index) {
      const LoraAdapter& ad = layer.adapters[i];
      const int64_t rank = ad.a.rows();
      if (layer.da[i].defined()) {
        gradients.push_back({u_.data() + start_[index], columns_, x, rows, rank, inputs, ad.dropout,
                             1.0F, layer.da[i], adapters_.samples, adapters_.index[index]});
      }
      if (layer.db[i].defined()) {
        gradients.push_back({static_cast<const float*>(h.data) + hidden, h.stride[0], layer.dy,
                             rows, rank, layer.outputs, DropoutSpec{}, static_cast<float>(ad.scale),
                             layer.db[i].transposed(), adapters_.samples, adapters_.index[index]});
      }
      hidden += rank;
    }
  }
  std::atomic<bool> no_memory{false};
  std::vector<Tasks> tasks;
  tasks.reserve(gradients.size());
  for (const FactorGradient& gradient : gradients) {
    tasks.push_back({ceil_div(gradient.cols, FactorGradient::kColumns), [&](int64_t task) {
                       if (!gradient.run(simd, ctx, task)) no_memory = true;
                     }});
  }
  run_tasks(ctx, tasks);
  return no_memory ? out_of_memory(op_) : Status();
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
