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

// G of one pair stored by columns, G^T by rows:  dh^T = s B^T G^T,  sums [N][R] += G^T h.
Status backward_by_columns(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                           const LoraExpandBackwardArgs& args, size_t i, float* sums, bool add) {
  const int64_t rank = args.b.cols();
  const int64_t rows = args.dy[i].rows();
  const int64_t outputs = args.b.rows();
  Scratch<char> dy_copy;
  AnyRows gt;
  LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, args.dy[i].transposed(), &dy_copy, &gt));
  if (!args.dhidden.empty()) {
    Scratch<float> b, dht;
    LORAACCEL_RETURN_IF_ERROR(left_factor(ctx, op, args.b, static_cast<float>(args.scale), &b));
    if (!dht.allocate(ctx, rank * rows)) return out_of_memory(op);
    add_outer(simd, ctx, b.data(), rank, gt, outputs, rows, dht.data(), false);
    store_view(ctx, dht.data(), 1, rows, 1.0F, args.dhidden[i]);
  }
  if (sums == nullptr) return Status();
  Scratch<float> ht_copy, part;
  AnyRows ht;
  LORAACCEL_RETURN_IF_ERROR(float_rows(ctx, op, args.hidden[i].transposed(), &ht_copy, &ht));
  if (!part.allocate(ctx, outputs * rank)) return out_of_memory(op);
  all_dots(simd, ctx, gt, outputs, ht, rank, rows, 1, part.data());
  for (int64_t j = 0; j < outputs * rank; ++j)
    sums[j] = add ? sums[j] + part.data()[j] : part.data()[j];
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
  for (size_t i = 0; i < args.y.size(); ++i) {
    if (has_unit_columns(args.y[i])) {
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
    } else {
      Panels h_panels;
      LORAACCEL_RETURN_IF_ERROR(h_panels.make(simd, ctx, op, args.hidden[i].transposed()));
      add_product(simd, ctx, b.data(), h_panels, args.base[i].transposed(), args.y[i].transposed());
    }
  }
  return Status();
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
  bool some_columns = false;
  for (size_t i = 0; i < args.dy.size(); ++i) {
    // (Few rows or none: either way.)
    if (has_unit_columns(args.dy[i])) {
      LORAACCEL_RETURN_IF_ERROR(
          backward_by_rows(simd, ctx, op, args, i, wanted ? by_rows.data() : nullptr, some_rows));
      some_rows = true;
    } else {
      LORAACCEL_RETURN_IF_ERROR(backward_by_columns(
          simd, ctx, op, args, i, wanted ? by_columns.data() : nullptr, some_columns));
      some_columns = true;
    }
  }
  if (!wanted) return Status();
  float* sums = by_columns.data();
  if (!some_columns) std::fill_n(sums, rank * outputs, 0.0F);
  for (int64_t n = 0; some_rows && n < outputs; ++n) {
    for (int64_t r = 0; r < rank; ++r) sums[n * rank + r] += by_rows.data()[r * outputs + n];
  }
  store_view(ctx, sums, rank, 1, static_cast<float>(args.scale), args.db);
  return Status();
}

}  // namespace loraaccel
