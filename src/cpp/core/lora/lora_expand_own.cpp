// The second half of an adapter over the vector tables. Any type but float64; outputs by rows or by columns.
#include <algorithm>
#include <atomic>
#include <vector>

#include "lora/lora_own.h"
#include "lora/operands.h"

namespace loraaccel {
namespace {

// Rows that one task handles, and columns of a gradient.
constexpr int64_t kRows = 64;
constexpr int64_t kColumns = 256;

// The factor of floats [rows, cols] that one product has on the left, times a scale.
Status left_factor(const ExecContext& ctx, const char* op, const TensorView& v, float scale,
                   Scratch<float>* out) {
  if (!out->allocate(ctx, v.numel())) return out_of_memory(op);
  visit_dtype(v.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    convert_rows(ctx, static_cast<const T*>(v.data), v.stride[0], v.stride[1], out->data(),
                 v.cols(), 1, v.rows(), v.cols());
  });
  for (int64_t i = 0; i < v.numel(); ++i) out->data()[i] *= scale;
  return Status();
}

// Panels [depth][width] of a right factor: element (k, n) is right(k, n).
class Panels {
 public:
  Status make(const LoraSimd& simd, const ExecContext& ctx, const char* op,
              const TensorView& right) {
    depth_ = right.rows();
    width_ = simd.width;
    const int64_t panels = ceil_div(right.cols(), width_);
    const bool swapped = !has_unit_columns(right);
    LORAACCEL_RETURN_IF_ERROR(
        rows_of(ctx, op, swapped ? right.transposed() : right, &copy_, &rows_));
    if (!data_.allocate(ctx, panels * depth_ * width_)) return out_of_memory(op);
    parallel_for(ctx, panels, [&](int64_t p) {
      PanelSource source;
      const int64_t col = p * width_;
      source.transposed = swapped;
      source.data = swapped ? rows_.at(col) : rows_.at(0, col);
      source.stride = rows_.stride;
      source.dtype = rows_.dtype;
      source.count = static_cast<int>(std::min(width_, right.cols() - col));
      source.depth = depth_;
      simd.pack(source, /*pairs=*/false, data_.data() + p * depth_ * width_);
    });
    return Status();
  }
  int64_t depth() const { return depth_; }
  const float* panel(int64_t p) const { return data_.data() + p * depth_ * width_; }

 private:
  Scratch<char> copy_;
  Scratch<float> data_;
  AnyRows rows_;
  int64_t depth_ = 0;
  int64_t width_ = 0;
};

// out = base + left panels; out has unit columns, base any.
void add_product(const LoraSimd& simd, const ExecContext& ctx, const float* left,
                 const Panels& panels, const TensorView& base, const TensorView& out) {
  const auto element = static_cast<int64_t>(dtype_size_bytes(out.dtype));
  const int64_t block = std::clamp<int64_t>(ceil_div(out.rows(), ctx.num_threads), 1, kRows);
  ExecContext alone = ctx;
  alone.num_threads = 1;
  parallel_for(ctx, ceil_div(out.rows(), block), [&](int64_t task) {
    const int64_t row = task * block;
    const int64_t rows = std::min(block, out.rows() - row);
    char* data = static_cast<char*>(out.data) + row * out.stride[0] * element;
    if (base.data != out.data) {
      visit_dtype(out.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        move_rows(alone, static_cast<const T*>(base.data) + row * base.stride[0], base.stride[0],
                  base.stride[1], reinterpret_cast<T*>(data), out.stride[0], rows, out.cols());
      });
    }
    PanelProduct p{};
    p.left2 = left + row * panels.depth();
    p.left2_stride = panels.depth();
    p.depth2 = panels.depth();
    p.c_stride = out.stride[0];
    p.c_dtype = out.dtype;
    p.m = rows;
    p.add = true;
    for (int64_t col = 0; col < out.cols(); col += simd.width) {
      p.panel2 = panels.panel(col / simd.width);
      p.c = data + col * element;
      p.n = static_cast<int>(std::min<int64_t>(simd.width, out.cols() - col));
      simd.product(p);
    }
  });
}

// sums[r][n] += sum over m of left[m][r] right[m][n]
void add_outer(const LoraSimd& simd, const ExecContext& ctx, const float* left, int64_t rank,
               const AnyRows& right, int64_t rows, int64_t cols, float* sums, bool add) {
  constexpr int64_t kSum = 128;  // terms of a block of a sum, as everywhere
  parallel_for(ctx, ceil_div(cols, kColumns), [&](int64_t task) {
    const int64_t col = task * kColumns;
    const int64_t count = std::min(kColumns, cols - col);
    for (int64_t row = 0; row == 0 || row < rows; row += kSum) {
      simd.outer(left + row * rank, rank, right.dtype, right.at(row, col), right.stride, sums + col,
                 cols, rank, std::min(kSum, rows - row), count, add || row != 0);
    }
  });
}

// out[i][j] = scale * row i of x . row j of a, on all threads.
void all_dots(const LoraSimd& simd, const ExecContext& ctx, const AnyRows& x, int64_t rows,
              const AnyRows& a, int64_t columns, int64_t terms, float scale, float* out) {
  const int64_t block = std::clamp<int64_t>(ceil_div(rows, ctx.num_threads), 1, kRows);
  parallel_for(ctx, ceil_div(rows, block), [&](int64_t task) {
    const int64_t row = task * block;
    simd.dot(x.dtype, x.at(row), x.stride, a.dtype, a.data, a.stride, scale, out + row * columns,
             columns, std::min(block, rows - row), columns, terms);
  });
}

// The view as floats by rows.
Status float_rows(const ExecContext& ctx, const char* op, const TensorView& v,
                  Scratch<float>* scratch, AnyRows* out) {
  Rows<float> rows;
  LORAACCEL_RETURN_IF_ERROR(rows_as<float>(ctx, op, v, scratch, &rows));
  *out = {rows.data, rows.stride, DType::kFloat32};
  return Status();
}

// G of one pair stored by rows:  dh = s G B,  sums [R][N] += h^T G.
Status backward_by_rows(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                        const LoraExpandBackwardArgs& args, size_t i, float* sums, bool add) {
  const int64_t rank = args.b.cols();
  const TensorView& dy = args.dy[i];
  Scratch<char> dy_copy;
  AnyRows g;
  LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, dy, &dy_copy, &g));
  if (!args.dhidden.empty()) {
    Scratch<float> bt_copy, dh;
    AnyRows bt;
    LORAACCEL_RETURN_IF_ERROR(float_rows(ctx, op, args.b.transposed(), &bt_copy, &bt));
    if (!dh.allocate(ctx, dy.rows() * rank)) return out_of_memory(op);
    all_dots(simd, ctx, g, dy.rows(), bt, rank, dy.cols(), static_cast<float>(args.scale),
             dh.data());
    store_view(ctx, dh.data(), rank, 1, 1.0F, args.dhidden[i]);
  }
  if (sums == nullptr) return Status();
  Scratch<float> h;
  LORAACCEL_RETURN_IF_ERROR(left_factor(ctx, op, args.hidden[i], 1, &h));
  add_outer(simd, ctx, h.data(), rank, g, dy.rows(), dy.cols(), sums, add);
  return Status();
}

// Pairs stored by columns (G^T, y^T and h^T by rows), of any number and size: a task is a run of pieces, and a piece some
// columns of one pair.
struct ByColumns {
  const LoraSimd& simd;
  const ExecContext& ctx;
  const char* op;
  std::vector<int64_t> first{0};  // piece of each pair, and their number
  int64_t width;                  // columns of a piece

  ByColumns(const LoraSimd& s, const ExecContext& c, const char* o,
            const std::vector<const TensorView*>& pairs, int64_t w)
      : simd(s), ctx(c), op(o), width(w) {
    for (const TensorView* v : pairs) first.push_back(first.back() + ceil_div(v->rows(), width));
  }

  // f(pair, first column, columns, task's own scratch) for every piece; false where there is no memory.
  template <class F>
  bool for_pieces(int64_t scratch_floats, const F& f) const {
    constexpr int64_t kTasksPerThread = 8;
    const int64_t pieces = first.back();
    const int64_t tasks = std::min<int64_t>(pieces, kTasksPerThread * ctx.num_threads);
    std::atomic<bool> memory{true};
    parallel_for(ctx, tasks, [&](int64_t task) {
      Scratch<float> own;
      if (!own.allocate(ctx, scratch_floats)) {
        memory = false;
        return;
      }
      auto pair = static_cast<size_t>(
          std::upper_bound(first.begin(), first.end(), task * pieces / tasks) - first.begin() - 1);
      for (int64_t i = task * pieces / tasks; i < (task + 1) * pieces / tasks; ++i) {
        while (i >= first[pair + 1]) ++pair;
        f(pair, (i - first[pair]) * width, own.data());
      }
    });
    return memory;
  }
};

const void* element(const TensorView& v, int64_t row, int64_t col) {
  return static_cast<const char*>(v.data) +
         (row * v.stride[0] + col * v.stride[1]) * static_cast<int64_t>(dtype_size_bytes(v.dtype));
}

// Rows of a matrix, `n` columns of them from `col` on, for pack() to make floats of.
PanelSource panel_source(const AnyRows& rows, int64_t row, int64_t col, int64_t depth, int64_t n) {
  PanelSource source;
  source.data = rows.at(row, col);
  source.stride = rows.stride;
  source.dtype = rows.dtype;
  source.transposed = false;
  source.count = static_cast<int>(n);
  source.depth = depth;
  return source;
}

// y^T = base^T + (s B) h^T for the pairs whose y is stored by columns.
Status forward_by_columns(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                          const LoraExpandArgs& args, const float* b,
                          const std::vector<size_t>& which) {
  std::vector<const TensorView*> outputs;
  std::vector<Scratch<char>> copies(which.size());
  std::vector<Scratch<char>> base_copies(which.size());
  std::vector<AnyRows> hidden(which.size());
  std::vector<AnyRows> bases(which.size());
  for (size_t i = 0; i < which.size(); ++i) {
    outputs.push_back(&args.y[which[i]]);
    LORAACCEL_RETURN_IF_ERROR(
        rows_of(ctx, op, args.base[which[i]].transposed(), &base_copies[i], &bases[i]));
    LORAACCEL_RETURN_IF_ERROR(
        rows_of(ctx, op, args.hidden[which[i]].transposed(), &copies[i], &hidden[i]));
  }
  // Some panels side by side, then the next rows: y is written as it is read from base, a line or two of each row at a
  // time, and a power of two between rows does not throw lines out before they are full.
  constexpr int64_t kPanels = 4;
  constexpr int64_t kTileRows = 56;
  const int64_t rank = args.b.cols();
  const int64_t width = simd.width;
  const ByColumns pieces(simd, ctx, op, outputs, kPanels * width);
  const int64_t panel_floats = rank * width;
  const bool memory = pieces.for_pieces(
      kPanels * panel_floats + kTileRows * width, [&](size_t pair, int64_t col, float* own) {
        const TensorView& y = args.y[which[pair]];
        const AnyRows& base = bases[pair];
        float* tile = own + kPanels * panel_floats;
        const int64_t columns = std::min(kPanels * width, y.rows() - col);
        for (int64_t j = 0; j < columns; j += width) {
          const int64_t n = std::min(width, columns - j);
          simd.pack(panel_source(hidden[pair], 0, col + j, rank, n), /*pairs=*/false,
                    own + j * rank);
        }
        for (int64_t row = 0; row < y.cols(); row += kTileRows) {
          for (int64_t j = 0; j < columns; j += width) {
            PanelProduct p{};
            p.left2 = b + row * rank;
            p.left2_stride = rank;
            p.panel2 = own + j * rank;
            p.depth2 = rank;
            p.c = const_cast<void*>(element(y, col + j, row));
            p.c_stride = y.stride[1];
            p.c_dtype = y.dtype;
            p.m = std::min(kTileRows, y.cols() - row);
            p.n = static_cast<int>(std::min(width, columns - j));
            if (base.dtype == DType::kFloat32 && p.n == width) {
              p.partial = static_cast<const float*>(base.at(row, col + j));
              p.partial_stride = base.stride;
            } else {
              // As floats, and as the kernel reads it: whole panels.
              simd.pack(panel_source(base, row, col + j, p.m, p.n), /*pairs=*/false, tile);
              p.partial = tile;
              p.partial_stride = width;
            }
            simd.product(p);
          }
        }
      });
  return memory ? Status() : out_of_memory(op);
}

// dh^T = s B^T G^T, and sums [N][R] = sum of G^T h, for the pairs whose G is stored by columns.
Status backward_by_columns(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                           const LoraExpandBackwardArgs& args, const std::vector<size_t>& which,
                           float* sums) {
  const int64_t rank = args.b.cols();
  const int64_t outputs = args.b.rows();
  std::vector<const TensorView*> grads;
  std::vector<Scratch<char>> dy_copies(which.size());
  std::vector<AnyRows> dy(which.size());
  for (size_t i = 0; i < which.size(); ++i) {
    grads.push_back(&args.dy[which[i]]);
    LORAACCEL_RETURN_IF_ERROR(
        rows_of(ctx, op, args.dy[which[i]].transposed(), &dy_copies[i], &dy[i]));
  }
  if (!args.dhidden.empty()) {
    Scratch<float> b;
    LORAACCEL_RETURN_IF_ERROR(left_factor(ctx, op, args.b, static_cast<float>(args.scale), &b));
    constexpr int64_t kSum = 128;  // terms of a block of a sum, as everywhere
    const ByColumns pieces(simd, ctx, op, grads, kColumns);
    const bool memory =
        pieces.for_pieces(rank * kColumns, [&](size_t pair, int64_t col, float* part) {
          const TensorView& out = args.dhidden[which[pair]];
          const int64_t n = std::min(kColumns, out.rows() - col);
          for (int64_t row = 0; row < outputs; row += kSum) {
            simd.outer(b.data() + row * rank, rank, dy[pair].dtype, dy[pair].at(row, col),
                       dy[pair].stride, part, kColumns, rank, std::min(kSum, outputs - row), n,
                       row != 0);
          }
          visit_dtype(out.dtype, [&](auto tag) {
            using T = typename decltype(tag)::type;
            for (int64_t r = 0; r < rank; ++r) {
              for (int64_t j = 0; j < n; ++j) {
                from_float(part[r * kColumns + j],
                           static_cast<T*>(const_cast<void*>(element(out, col + j, r))));
              }
            }
          });
        });
    if (!memory) return out_of_memory(op);
  }
  if (sums == nullptr) return Status();
  // One sum over all pairs: they are split into groups of fixed size, so that it does not depend on the threads; within a
  // large pair the outputs are split.
  constexpr int64_t kPairs = 64;
  constexpr int64_t kOutputs = 64;
  const auto pairs = static_cast<int64_t>(which.size());
  const int64_t groups = ceil_div(pairs, kPairs);
  const int64_t blocks = ceil_div(outputs, kOutputs);
  Scratch<float> parts;
  std::vector<Scratch<float>> h_copies(which.size());
  std::vector<AnyRows> h(which.size());
  for (size_t i = 0; i < which.size(); ++i)
    LORAACCEL_RETURN_IF_ERROR(
        float_rows(ctx, op, args.hidden[which[i]].transposed(), &h_copies[i], &h[i]));
  if (!parts.allocate(ctx, groups * outputs * rank)) return out_of_memory(op);
  std::fill_n(parts.data(), groups * outputs * rank, 0.0F);
  std::atomic<bool> no_memory{false};
  parallel_for(ctx, groups * blocks, [&](int64_t task) {
    const int64_t group = task / blocks;
    const int64_t row = task % blocks * kOutputs;
    const int64_t rows = std::min(kOutputs, outputs - row);
    float* to = parts.data() + (group * outputs + row) * rank;
    Scratch<float> one;
    if (!one.allocate(ctx, rows * rank)) {
      no_memory = true;
      return;
    }
    for (int64_t i = group * kPairs; i < std::min(pairs, (group + 1) * kPairs); ++i) {
      const auto pair = static_cast<size_t>(i);
      simd.dot(dy[pair].dtype, dy[pair].at(row), dy[pair].stride, h[pair].dtype, h[pair].data,
               h[pair].stride, 1.0F, one.data(), rank, rows, rank, args.dy[which[pair]].rows());
      for (int64_t j = 0; j < rows * rank; ++j) to[j] += one.data()[j];
    }
  });
  if (no_memory) return out_of_memory(op);
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t j = 0; j < outputs * rank; ++j) {
      const float value = parts.data()[group * outputs * rank + j];
      sums[j] = group == 0 ? value : sums[j] + value;
    }
  }
  return Status();
}

}  // namespace

Status lora_expand_forward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                               const LoraExpandArgs& args) {
  const auto scale = static_cast<float>(args.scale);
  Scratch<float> b;
  LORAACCEL_RETURN_IF_ERROR(left_factor(ctx, op, args.b, scale, &b));
  const TensorView scaled =
      TensorView::matrix(b.data(), DType::kFloat32, args.b.rows(), args.b.cols());
  Panels b_panels;  // of B^T, for outputs by rows
  std::vector<size_t> by_columns;
  for (size_t i = 0; i < args.y.size(); ++i) {
    if (!has_unit_columns(args.y[i])) {
      by_columns.push_back(i);
      continue;
    }
    if (b_panels.depth() == 0)
      LORAACCEL_RETURN_IF_ERROR(b_panels.make(simd, ctx, op, scaled.transposed()));
    Scratch<float> h_copy;
    Rows<float> h;
    const TensorView& hidden = args.hidden[i];
    if (hidden.dtype == DType::kFloat32 && has_unit_columns(hidden) &&
        hidden.stride[0] == hidden.cols()) {
      h.data = static_cast<const float*>(hidden.data);
    } else {
      LORAACCEL_RETURN_IF_ERROR(left_factor(ctx, op, hidden, 1, &h_copy));
      h.data = h_copy.data();
    }
    add_product(simd, ctx, h.data, b_panels, args.base[i], args.y[i]);
  }
  if (by_columns.empty()) return Status();
  return forward_by_columns(simd, ctx, op, args, b.data(), by_columns);
}

Status lora_expand_backward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                                const LoraExpandBackwardArgs& args) {
  const int64_t rank = args.b.cols();
  const int64_t outputs = args.b.rows();
  // dB of pairs by rows as [R][N], of pairs by columns as [N][R].
  Scratch<float> by_rows, by_columns;
  const bool wanted = args.db.defined();
  if (wanted &&
      (!by_rows.allocate(ctx, rank * outputs) || !by_columns.allocate(ctx, rank * outputs))) {
    return out_of_memory(op);
  }
  bool some_rows = false;
  std::vector<size_t> columns;
  for (size_t i = 0; i < args.dy.size(); ++i) {
    if (!has_unit_columns(args.dy[i])) {
      columns.push_back(i);
      continue;
    }
    LORAACCEL_RETURN_IF_ERROR(
        backward_by_rows(simd, ctx, op, args, i, wanted ? by_rows.data() : nullptr, some_rows));
    some_rows = true;
  }
  if (!columns.empty()) {
    LORAACCEL_RETURN_IF_ERROR(
        backward_by_columns(simd, ctx, op, args, columns, wanted ? by_columns.data() : nullptr));
  }
  if (!wanted) return Status();
  float* sums = by_columns.data();
  if (columns.empty()) std::fill_n(sums, rank * outputs, 0.0F);
  for (int64_t n = 0; some_rows && n < outputs; ++n) {
    for (int64_t r = 0; r < rank; ++r) sums[n * rank + r] += by_rows.data()[r * outputs + n];
  }
  store_view(ctx, sums, rank, 1, static_cast<float>(args.scale), args.db);
  return Status();
}

}  // namespace loraaccel
