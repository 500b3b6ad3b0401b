#include "lora/blocked_product.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "lora/packed_weight.h"

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
            tasks.push_back({panel_end - panel, [&](int64_t i) { pack_panel(b, panel, i); }});
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

  // Panel `first + i`, the i-th of a chunk.
  void pack_panel(size_t b, int64_t first, int64_t i) {
    const DepthBlock& block = blocks_[b];
    const size_t j = output_of(first + i);
    const ProductOutput& output = outputs_[j];
    if (output.packed != nullptr) return;
    const int64_t col = (first + i - first_panel_[j]) * simd_.width;
    const ProductRight& right = output.rights[block.term];
    PanelSource source;
    source.data =
        right.transposed ? right.rows.at(col, block.begin) : right.rows.at(block.begin, col);
    source.stride = right.rows.stride;
    source.dtype = right.rows.dtype;
    source.transposed = right.transposed;
    source.count = static_cast<int>(std::min<int64_t>(simd_.width, output.out->cols() - col));
    source.depth = block.depth;
    simd_.pack(source, pairs_, packed_ + i * block.words * simd_.width);
  }

  const void* packed_panel(const DepthBlock& block, const ProductOutput& output, int64_t index,
                           int64_t in_chunk) const {
    if (output.packed == nullptr) return packed_ + in_chunk * block.words * simd_.width;
    return output.packed->panel(index) + block.packed_at * simd_.width;
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
    const bool first = b == 0;
    const bool last = b + 1 >= blocks_.size();
    const AnyRows left = terms_.empty() ? AnyRows{} : terms_[block.term].left;
    const int64_t element = static_cast<int64_t>(dtype_size_bytes(left.dtype));
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
      PanelProduct p{};
      p.depth = block.words;
      p.pairs = pairs_;
      p.m = count;
      if (copies) {
        copy_left(left, row, count, block, copy.data(), copy_stride);
        p.left = copy.data();
        p.left_stride = copy_stride * kWordBytes;
      } else if (block.words > 0) {
        p.left = left.at(row, block.begin);
        p.left_stride = left.stride * element;
      }
      size_t j = output_of(panel_begin);
      for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        while (j + 1 < outputs_.size() && panel >= first_panel_[j + 1]) ++j;
        const ProductOutput& output = outputs_[j];
        const int64_t index = panel - first_panel_[j];
        if (block.words > 0) p.panel = packed_panel(block, output, index, panel - panel0);
        float* partial = partial_ == nullptr ? nullptr
                                             : partial_ + (row - row0) * partial_stride_ +
                                                   (panel - panel0) * simd_.width;
        p.partial = first ? nullptr : partial;
        p.partial_stride = partial_stride_;
        if (last) {
          output.place(row, index, simd_.width, &p);
        } else {
          p.depth2 = 0;
          p.bias = nullptr;
          p.c = partial;
          p.c_stride = partial_stride_;
          p.c_dtype = DType::kFloat32;
          p.n = simd_.width;
        }
        simd_.product(p);
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
  std::atomic<bool> no_memory_{false};
};

}  // namespace

void ProductOutput::place(int64_t row, int64_t panel, int width, PanelProduct* p) const {
  const int64_t col = panel * width;
  p->depth2 = right2 == nullptr ? 0 : right2->depth();
  p->left2 = p->depth2 == 0 ? nullptr : left2 + row * left2_stride;
  p->left2_stride = left2_stride;
  p->panel2 = p->depth2 == 0 ? nullptr : right2->panel(panel);
  p->bias = bias == nullptr ? nullptr : bias + col;
  p->c = static_cast<char*>(out->data) +
         (row * out->stride[0] + col) * static_cast<int64_t>(dtype_size_bytes(out->dtype));
  p->c_stride = out->stride[0];
  p->c_dtype = out->dtype;
  p->n = static_cast<int>(std::min<int64_t>(width, out->cols() - col));
}

Status blocked_product(const LoraSimd& simd, const ExecContext& ctx, const char* op, int64_t rows,
                       std::span<const ProductTerm> terms, std::span<const ProductOutput> outputs,
                       std::span<const Tasks> before) {
  return BlockedProduct(simd, ctx, op, rows, terms, outputs).run(before);
}

}  // namespace loraaccel
