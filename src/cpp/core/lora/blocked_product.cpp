#include "lora/blocked_product.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "lora/packed_weight.h"
#include "lora/pixel_columns.h"

namespace loraaccel {
namespace {

// Words of a sum that one pass multiplies: a panel of so many is a quarter of the second cache (1 MiB).
constexpr int64_t kMaxDepth = 2048;
// Rows that pass over a panel together: as many of the left factor stay in the second cache beside the panel.
constexpr int64_t kTilesPerBlock = 4;
// Packed panels that all row blocks pass over before the next ones: they stay in the third cache.
constexpr int64_t kPackedBytes = 8 << 20;
// Rows whose sums are kept between passes where one pass does not do.
constexpr int64_t kPartialRows = 2048;
constexpr int64_t kWordBytes = 4;
// Packing a panel costs about as much as multiplying so many rows by it.
constexpr int64_t kPackingRows = 16;
// A left factor up to this size is read for every panel: it stays in the second or third cache.
constexpr int64_t kStreamedLeftBytes = 4 << 20;
// Rows this far apart fall into few sets of the first cache and throw each other out.
constexpr int64_t kBadStrideBytes = 2048;

// A part of one term's sum, done in one pass.
struct DepthBlock {
  size_t term;
  int64_t begin;  // first element
  int64_t depth;  // elements
  int64_t words;
  int64_t packed_at;  // first word of this block in a whole packed panel
};

class BlockedProduct {
 public:
  BlockedProduct(const LoraSimd& simd, const ExecContext& ctx, const char* op, int64_t rows,
                 std::span<const ProductTerm> terms, std::span<const ProductOutput> outputs)
      : simd_(simd), ctx_(ctx), op_(op), rows_(rows), terms_(terms), outputs_(outputs) {
    pairs_ = simd.pairs && !terms.empty() && terms[0].left.dtype == DType::kBFloat16;
    plan_depth();
    for (const ProductOutput& output : outputs) {
      first_panel_.push_back(panels_);
      panels_ += ceil_div(output.out->cols(), simd.width);
    }
  }

  Status run(std::span<const Tasks> before) {
    if (rows_ == 0 || panels_ == 0) {
      run_tasks(ctx_, before);
      return Status();
    }
    if (choose_split()) return stream(before);
    bool first = true;
    const int64_t pass_words = blocks_.empty() ? 1 : std::max<int64_t>(1, blocks_[0].words);
    const int64_t chunk =
        std::clamp<int64_t>(kPackedBytes / (pass_words * simd_.width * kWordBytes), 1, panels_);
    const int64_t row_step = blocks_.size() > 1 ? kPartialRows : rows_;
    Scratch<float> packed, partial;
    if (needs_packing() && !packed.allocate(ctx_, chunk * pass_words * simd_.width))
      return out_of_memory(op_);
    if (blocks_.size() > 1 &&
        !partial.allocate(ctx_, std::min(row_step, rows_) * partial_stride(chunk))) {
      return out_of_memory(op_);
    }
    packed_ = packed.data();
    partial_ = partial.data();
    for (int64_t row = 0; row < rows_; row += row_step) {
      const int64_t row_end = std::min(rows_, row + row_step);
      for (int64_t panel = 0; panel < panels_; panel += chunk) {
        const int64_t panel_end = std::min(panels_, panel + chunk);
        partial_stride_ = partial_stride(panel_end - panel);
        for (size_t b = 0; b < std::max<size_t>(1, blocks_.size()); ++b) {
          std::vector<Tasks> tasks;
          if (first) tasks.assign(before.begin(), before.end());
          if (needs_packing() && !blocks_.empty())
            tasks.push_back(
                {panel_end - panel, [&](int64_t i) { pack_in_chunk(blocks_[b], panel, i); }});
          if (!tasks.empty()) run_tasks(ctx_, tasks);
          first = false;
          multiply(b, row, row_end, panel, panel_end);
        }
      }
    }
    return no_memory_ ? out_of_memory(op_) : Status();
  }

 private:
  void plan_depth() {
    int64_t at = 0;
    for (size_t t = 0; t < terms_.size(); ++t) {
      const int64_t per_word = pairs_ ? 2 : 1;
      const int64_t words = ceil_div(terms_[t].depth, per_word);
      const int64_t parts = ceil_div(words, kMaxDepth);
      for (int64_t i = 0; i < parts; ++i) {
        const int64_t begin = i * words / parts;
        const int64_t end = (i + 1) * words / parts;
        blocks_.push_back({t, begin * per_word,
                           std::min(terms_[t].depth, end * per_word) - begin * per_word,
                           end - begin, at + begin});
      }
      at += words;
    }
    // The longest first: buffers are made for it.
    for (DepthBlock& block : blocks_) {
      if (block.words > blocks_[0].words) std::swap(block, blocks_[0]);
    }
  }

  int64_t partial_stride(int64_t panels) const { return panels * simd_.width + 16; }

  bool needs_packing() const {
    return std::ranges::any_of(outputs_,
                               [](const ProductOutput& o) { return o.packed == nullptr; });
  }

  size_t output_of(int64_t panel) const {
    const auto next = std::upper_bound(first_panel_.begin(), first_panel_.end(), panel);
    return static_cast<size_t>(next - first_panel_.begin()) - 1;
  }

  void pack_panel(const DepthBlock& block, const ProductOutput& output, int64_t index,
                  float* packed) const {
    const int64_t col = index * simd_.width;
    const ProductRight& right = output.rights[block.term];
    if (right.columns != nullptr) {
      const auto count = static_cast<int>(std::min<int64_t>(simd_.width, output.out->cols() - col));
      right.columns->pack(simd_, col, count, block.begin, block.depth, pairs_, packed);
      if (right.packed)
        right.packed(index, packed, block.begin, block.words, &block == &blocks_[0]);
      return;
    }
    PanelSource source;
    source.data =
        right.transposed ? right.rows.at(col, block.begin) : right.rows.at(block.begin, col);
    source.stride = right.rows.stride;
    source.dtype = right.rows.dtype;
    source.transposed = right.transposed;
    source.count = static_cast<int>(std::min<int64_t>(simd_.width, output.out->cols() - col));
    source.depth = block.depth;
    simd_.pack(source, pairs_, packed);
  }

  // Columns that somebody hears of are packed by one thread only.
  bool gathers() const {
    return std::ranges::any_of(outputs_, [](const ProductOutput& o) {
      return !o.rights.empty() && o.rights[0].columns != nullptr;
    });
  }

  // Panel `first + i`, the i-th of a chunk.
  void pack_in_chunk(const DepthBlock& block, int64_t first, int64_t i) const {
    const size_t j = output_of(first + i);
    if (outputs_[j].packed != nullptr) return;
    pack_panel(block, outputs_[j], first + i - first_panel_[j],
               packed_ + i * block.words * simd_.width);
  }

  const void* packed_panel(const DepthBlock& block, const ProductOutput& output, int64_t index,
                           int64_t in_chunk) const {
    if (output.packed == nullptr) return packed_ + in_chunk * block.words * simd_.width;
    return output.packed->panel(index) + block.packed_at * simd_.width;
  }

  // How rows and panels are split among the threads, and whether each of them packs the panels that it multiplies one
  // by one, in its own cache: parts of rows pack them once each, but nothing goes through memory and nobody waits.
  bool choose_split() {
    const int64_t threads = ctx_.num_threads;
    const int64_t tiles = ceil_div(rows_, simd_.rows);
    int64_t best = INT64_MAX;
    const int64_t most_parts = gathers() ? 1 : std::min(threads, tiles);
    for (int64_t parts = 1; parts <= most_parts; ++parts) {
      const int64_t per_thread = ceil_div(panels_, std::min(panels_, threads / parts));
      const int64_t cost = per_thread * (ceil_div(rows_, parts) + kPackingRows);
      if (cost < best) {
        best = cost;
        row_parts_ = parts;
      }
    }
    int64_t apart = INT64_MAX;
    for (int64_t parts = 1; parts <= std::min(threads, tiles); ++parts) {
      const int64_t per_thread = ceil_div(panels_, std::min(panels_, threads / parts));
      apart = std::min(apart, per_thread * ceil_div(rows_, parts));
    }
    apart += 2 * ceil_div(panels_, threads) * kPackingRows;
    return best <= apart && !blocks_.empty() && needs_packing() &&
           std::ranges::all_of(blocks_, [&](const DepthBlock& block) {
             const int64_t limit = must_copy(terms_[block.term].left, block)
                                       ? kStreamedLeftBytes / 2
                                       : kStreamedLeftBytes;
             return rows_ * block.words * kWordBytes <= limit;
           });
  }

  // A row of a left factor from a depth block's first element on.
  struct LeftRows {
    const char* data = nullptr;
    int64_t stride = 0;  // bytes
  };

  LeftRows left_in_place(const DepthBlock& block, int64_t row) const {
    const AnyRows& left = terms_[block.term].left;
    return {static_cast<const char*>(left.at(row, block.begin)),
            left.stride * static_cast<int64_t>(dtype_size_bytes(left.dtype))};
  }

  Status stream(std::span<const Tasks> before) {
    // Lefts that cannot be multiplied where they lie are copied first.
    std::vector<Scratch<float>> copies(blocks_.size());
    std::vector<LeftRows> lefts;
    std::vector<Tasks> tasks(before.begin(), before.end());
    const int64_t copy_parts = std::min<int64_t>(ctx_.num_threads, rows_);
    for (size_t b = 0; b < blocks_.size(); ++b) {
      const DepthBlock& block = blocks_[b];
      const AnyRows& left = terms_[block.term].left;
      if (!must_copy(left, block)) {
        lefts.push_back(left_in_place(block, 0));
        continue;
      }
      const int64_t stride = block.words + 16;
      if (!copies[b].allocate(ctx_, rows_ * stride)) return out_of_memory(op_);
      float* copy = copies[b].data();
      lefts.push_back({reinterpret_cast<const char*>(copy), stride * kWordBytes});
      tasks.push_back({copy_parts, [=, this, &block, &left](int64_t i) {
                         const int64_t row = i * rows_ / copy_parts;
                         copy_left(left, row, (i + 1) * rows_ / copy_parts - row, block,
                                   copy + row * stride, stride);
                       }});
    }
    if (!tasks.empty()) run_tasks(ctx_, tasks);
    const int64_t panel_parts = std::min<int64_t>(panels_, ctx_.num_threads / row_parts_);
    parallel_for(ctx_, row_parts_ * panel_parts, [&](int64_t task) {
      const int64_t i = task / panel_parts;
      const int64_t j = task % panel_parts;
      stream_part(lefts, i * rows_ / row_parts_, (i + 1) * rows_ / row_parts_,
                  j * panels_ / panel_parts, (j + 1) * panels_ / panel_parts);
    });
    return no_memory_ ? out_of_memory(op_) : Status();
  }

  void stream_part(std::span<const LeftRows> lefts, int64_t row_begin, int64_t row_end,
                   int64_t panel_begin, int64_t panel_end) {
    const int64_t rows = row_end - row_begin;
    const int64_t stride = simd_.width + 16;
    Scratch<float> packed, partial;
    if (!packed.allocate(ctx_, blocks_[0].words * simd_.width) ||
        (blocks_.size() > 1 && !partial.allocate(ctx_, rows * stride))) {
      no_memory_ = true;
      return;
    }
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      const size_t j = output_of(panel);
      const ProductOutput& output = outputs_[j];
      const int64_t index = panel - first_panel_[j];
      for (size_t b = 0; b < blocks_.size(); ++b) {
        const DepthBlock& block = blocks_[b];
        const void* data = packed.data();
        if (output.packed != nullptr)
          data = output.packed->panel(index) + block.packed_at * simd_.width;
        else
          pack_panel(block, output, index, packed.data());
        const LeftRows left{lefts[b].data + row_begin * lefts[b].stride, lefts[b].stride};
        multiply_panel(b, row_begin, rows, left, output, index, data, partial.data(), stride);
      }
    }
  }

  // Some rows of one panel: one pass of its sum.
  void multiply_panel(size_t b, int64_t row, int64_t rows, const LeftRows& left,
                      const ProductOutput& output, int64_t index, const void* panel, float* partial,
                      int64_t partial_stride) const {
    PanelProduct p{};
    p.pairs = pairs_;
    p.m = rows;
    p.left = left.data;
    p.left_stride = left.stride;
    p.panel = panel;
    p.depth = blocks_.empty() ? 0 : blocks_[b].words;
    p.partial = b == 0 ? nullptr : partial;
    p.partial_stride = partial_stride;
    if (b + 1 >= blocks_.size()) return output.finish(simd_, row, index, p);
    p.c = partial;
    p.c_stride = partial_stride;
    p.c_dtype = DType::kFloat32;
    p.n = simd_.width;
    simd_.product(p);
  }

  // Rows and panels split among the threads; a part of rows makes its own copy of the left factor.
  void multiply(size_t b, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                int64_t panel_end) {
    const int64_t tiles = ceil_div(row_end - row_begin, simd_.rows);
    const int64_t panels = panel_end - panel_begin;
    int64_t row_parts = 1;
    int64_t best = INT64_MAX;
    for (int64_t parts = 1; parts <= std::min<int64_t>(ctx_.num_threads, tiles); ++parts) {
      const int64_t cost = ceil_div(tiles, parts) * ceil_div(panels, ctx_.num_threads / parts);
      if (cost <= best) {
        best = cost;
        row_parts = parts;
      }
    }
    const int64_t panel_parts = std::min<int64_t>(panels, ctx_.num_threads / row_parts);
    parallel_for(ctx_, row_parts * panel_parts, [&](int64_t task) {
      const int64_t i = task / panel_parts;
      const int64_t j = task % panel_parts;
      const int64_t rows = row_end - row_begin;
      multiply_part(b, row_begin, row_begin + i * tiles / row_parts * rows / tiles,
                    row_begin + (i + 1) * tiles / row_parts * rows / tiles, panel_begin,
                    panel_begin + j * panels / panel_parts,
                    panel_begin + (j + 1) * panels / panel_parts);
    });
  }

  void multiply_part(size_t b, int64_t row0, int64_t row_begin, int64_t row_end, int64_t panel0,
                     int64_t panel_begin, int64_t panel_end) {
    const DepthBlock none{0, 0, 0, 0, 0};
    const DepthBlock& block = blocks_.empty() ? none : blocks_[b];
    const AnyRows left = terms_.empty() ? AnyRows{} : terms_[block.term].left;
    const bool copies = block.words > 0 && must_copy(left, block);
    const int64_t copy_stride = block.words + 16;  // words
    const int64_t rows = row_end - row_begin;
    const int64_t tiles = ceil_div(rows, simd_.rows);
    Scratch<float> copy;
    if (copies && !copy.allocate(ctx_, simd_.rows * kTilesPerBlock * copy_stride)) {
      no_memory_ = true;
      return;
    }
    for (int64_t tile = 0; tile < tiles; tile += kTilesPerBlock) {
      const int64_t row = row_begin + tile * rows / tiles;
      const int64_t count = row_begin + std::min(tiles, tile + kTilesPerBlock) * rows / tiles - row;
      LeftRows lefts;
      if (copies) {
        copy_left(left, row, count, block, copy.data(), copy_stride);
        lefts = {reinterpret_cast<const char*>(copy.data()), copy_stride * kWordBytes};
      } else if (block.words > 0) {
        lefts = left_in_place(block, row);
      }
      size_t j = output_of(panel_begin);
      for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        while (j + 1 < outputs_.size() && panel >= first_panel_[j + 1]) ++j;
        const ProductOutput& output = outputs_[j];
        const int64_t index = panel - first_panel_[j];
        const void* data =
            block.words > 0 ? packed_panel(block, output, index, panel - panel0) : nullptr;
        float* partial = partial_ == nullptr ? nullptr
                                             : partial_ + (row - row0) * partial_stride_ +
                                                   (panel - panel0) * simd_.width;
        multiply_panel(b, row, count, lefts, output, index, data, partial, partial_stride_);
      }
    }
  }

  bool must_copy(const AnyRows& left, const DepthBlock& block) const {
    if (!pairs_ && left.dtype != DType::kFloat32) return true;
    if (pairs_ && block.depth % 2 != 0) return true;  // its last word ends outside the row
    return left.stride * static_cast<int64_t>(dtype_size_bytes(left.dtype)) % kBadStrideBytes == 0;
  }

  void copy_left(const AnyRows& left, int64_t row, int64_t count, const DepthBlock& block,
                 float* copy, int64_t copy_stride) const {
    if (!pairs_) {
      simd_.widen(left.dtype, left.at(row, block.begin), left.stride, copy, copy_stride, count,
                  block.depth);
      return;
    }
    for (int64_t i = 0; i < count; ++i, copy += copy_stride) {
      copy[block.words - 1] = 0;
      memcpy(copy, left.at(row + i, block.begin),
             static_cast<size_t>(block.depth) * sizeof(BFloat16));
    }
  }

  const LoraSimd& simd_;
  const ExecContext& ctx_;
  const char* op_;
  int64_t rows_;
  std::span<const ProductTerm> terms_;
  std::span<const ProductOutput> outputs_;
  bool pairs_ = false;
  std::vector<DepthBlock> blocks_;
  std::vector<int64_t> first_panel_;  // of each output, in one numbering
  int64_t panels_ = 0;
  float* packed_ = nullptr;   // panels of one chunk and depth block
  float* partial_ = nullptr;  // sums of one chunk, where there are several depth blocks
  int64_t partial_stride_ = 0;
  int64_t row_parts_ = 1;  // where panels are packed by those who multiply them
  std::atomic<bool> no_memory_{false};
};

}  // namespace

void ProductOutput::place(const RankRun& run, int64_t panel, int width, PanelProduct* p) const {
  const int64_t col = panel * width;
  p->m = run.end - run.begin;
  p->depth2 = run.depth;
  p->left2 = run.depth == 0 ? nullptr : left2 + run.begin * left2_stride + run.column;
  p->left2_stride = left2_stride;
  p->panel2 = run.depth == 0 ? nullptr : right2->panel(panel) + run.panel * width;
  p->bias = bias == nullptr ? nullptr : bias + col;
  p->c = static_cast<char*>(out->data) +
         (run.begin * out->stride[0] + col) * static_cast<int64_t>(dtype_size_bytes(out->dtype));
  p->c_stride = out->stride[0];
  p->c_dtype = out->dtype;
  p->n = static_cast<int>(std::min<int64_t>(width, out->cols() - col));
}

void ProductOutput::finish(const LoraSimd& simd, int64_t row, int64_t panel, PanelProduct p) const {
  const int64_t end = row + p.m;
  if (runs == nullptr || runs->empty()) {
    place({row, end, 0, 0, right2 == nullptr ? 0 : right2->depth()}, panel, simd.width, &p);
    return simd.product(p);
  }
  const auto part = [&, first = row](int64_t begin, int64_t count) {
    PanelProduct some = p;
    some.left = static_cast<const char*>(p.left) + (begin - first) * p.left_stride;
    if (p.partial != nullptr) some.partial = p.partial + (begin - first) * p.partial_stride;
    some.m = count;
    return some;
  };
  auto run = std::ranges::upper_bound(*runs, row, {}, &RankRun::end);
  const auto length = [&](int64_t begin) { return std::min(run->end, end) - begin; };
  constexpr int64_t kTogether = 64;
  alignas(64) float sums[kTogether * kMaxPanelWidth];
  while (row < end) {
    RankRun now = *run;
    now.begin = row;
    if (length(row) >= simd.rows) {
      now.end = row + length(row);
      PanelProduct whole = part(row, length(row));
      place(now, panel, simd.width, &whole);
      simd.product(whole);
      row = now.end;
      ++run;
      continue;
    }
    // Short runs get the frozen product together: a tile of few rows would read the panel for each of them.
    const auto first_run = run;
    int64_t stop = row;
    for (; stop < end && length(stop) < simd.rows && stop + length(stop) - row <= kTogether; ++run)
      stop += length(stop);
    PanelProduct frozen = part(row, stop - row);
    frozen.c = sums;
    frozen.c_stride = simd.width;
    frozen.c_dtype = DType::kFloat32;
    frozen.n = simd.width;
    simd.product(frozen);
    for (auto each = first_run; each != run; ++each) {
      now = *each;
      now.begin = std::max(now.begin, row);
      now.end = std::min(now.end, stop);
      PanelProduct update{};
      update.partial = sums + (now.begin - row) * simd.width;
      update.partial_stride = simd.width;
      place(now, panel, simd.width, &update);
      simd.product(update);
    }
    row = stop;
  }
}

Status blocked_product(const LoraSimd& simd, const ExecContext& ctx, const char* op, int64_t rows,
                       std::span<const ProductTerm> terms, std::span<const ProductOutput> outputs,
                       std::span<const Tasks> before) {
  return BlockedProduct(simd, ctx, op, rows, terms, outputs).run(before);
}

}  // namespace loraaccel
