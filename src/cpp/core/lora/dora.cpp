#include "loraaccel/dora.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "lora/checks.h"
#include "lora/lora_linear_kernels.h"
#include "lora/lora_rank.h"
#include "lora/plain.h"

namespace loraaccel {
namespace {

Status check_weight_norms(const ExecContext& ctx, const WeightNormsArgs& args) {
  const Checker check("weight_norms", ctx.device);
  LORAACCEL_RETURN_IF_ERROR(check.context(ctx));
  if (args.adapters.empty())
    return check.fail(StatusCode::kInvalidArgument, "no adapters, expected at least one");
  const LoraAdapter& first = args.adapters[0];
  if (first.a.ndim != 2 || first.b.ndim != 2) {
    return check.fail(StatusCode::kShapeMismatch, "lora_A has shape " + shape_text(first.a) +
                                                      " and lora_B " + shape_text(first.b) +
                                                      ", expected [R, K] and [N, R]");
  }
  const TensorView like =
      args.w.defined()
          ? args.w
          : TensorView::strided(nullptr, first.a.dtype, first.b.rows(), first.a.cols(), 0, 0);
  if (args.w.defined()) {
    LORAACCEL_RETURN_IF_ERROR(
        check.matrix("weight", args.w, first.b.rows(), first.a.cols(), "N, K"));
  }
  for (const LoraAdapter& ad : args.adapters)
    LORAACCEL_RETURN_IF_ERROR(check.adapter(ad, like, like));
  LORAACCEL_RETURN_IF_ERROR(check.vector("norms", args.norms, like.rows(), "N"));
  const DType wanted = first.a.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  LORAACCEL_RETURN_IF_ERROR(check.dtype("norms", args.norms, wanted, "the type of the sums"));
  return check.apart("norms", args.norms, {args.w}, args.adapters);
}

Status weight_norms_ref(const ExecContext& ctx, const WeightNormsArgs& args) {
  parallel_for(ctx, args.norms.rows(), [&](int64_t n) {
    double sum = 0;
    for (int64_t k = 0; k < args.adapters[0].a.cols(); ++k) {
      double value = args.w.defined() ? plain_read(args.w, n, k) : 0;
      for (const LoraAdapter& ad : args.adapters) {
        double update = 0;
        for (int64_t r = 0; r < ad.a.rows(); ++r)
          update += plain_read(ad.b, n, r) * plain_read(ad.a, r, k);
        value += ad.scale * update;
      }
      sum += value * value;
    }
    plain_write(args.norms, n, 0, std::sqrt(sum));
  });
  return Status();
}

// Blocks of rows of the adapted weight, made in the caches by the kernels of a layer.
Status weight_norms_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                        const WeightNormsArgs& args) {
  const int64_t outputs = args.norms.rows();
  const int64_t inputs = args.adapters[0].a.cols();
  Scratch<char> w_copy;
  AnyRows w;
  if (args.w.defined()) LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, args.w, &w_copy, &w));
  RankPanels panels;
  LORAACCEL_RETURN_IF_ERROR(panels.prepare(simd, ctx, op, args.adapters, RankFactor::kA,
                                           std::vector<bool>(args.adapters.size(), true)));
  const Tasks tasks = panels.tasks();
  run_tasks(ctx, {&tasks, 1});
  // s B of all adapters, side by side.
  const int64_t rank = panels.depth();
  Scratch<float> left;
  if (!left.allocate(ctx, outputs * rank)) return out_of_memory(op);
  int64_t column = 0;
  for (const LoraAdapter& ad : args.adapters) {
    const TensorView part =
        TensorView::strided(left.data() + column, DType::kFloat32, outputs, ad.a.rows(), rank, 1);
    visit_dtype(ad.b.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const auto* b = static_cast<const T*>(ad.b.data);
      for (int64_t n = 0; n < outputs; ++n) {
        for (int64_t r = 0; r < ad.a.rows(); ++r) {
          static_cast<float*>(part.data)[n * rank + r] =
              static_cast<float>(ad.scale) *
              static_cast<float>(to_float(b[n * ad.b.stride[0] + r * ad.b.stride[1]]));
        }
      }
    });
    column += ad.a.rows();
  }
  constexpr int64_t kRows = 28;
  const int64_t block = std::clamp<int64_t>(ceil_div(outputs, ctx.num_threads), 1, kRows);
  std::atomic<bool> no_memory{false};
  parallel_for(ctx, ceil_div(outputs, block), [&](int64_t task) {
    const int64_t row = task * block;
    const int64_t rows = std::min(block, outputs - row);
    const int64_t stride = inputs + 16;
    Scratch<float> adapted;
    if (!adapted.allocate(ctx, rows * stride)) {
      no_memory = true;
      return;
    }
    if (args.w.defined())
      simd.widen(w.dtype, w.at(row), w.stride, adapted.data(), stride, rows, inputs);
    PanelProduct p{};
    p.left2 = left.data() + row * rank;
    p.left2_stride = rank;
    p.depth2 = rank;
    p.c_stride = stride;
    p.c_dtype = DType::kFloat32;
    p.m = rows;
    p.add = args.w.defined();
    for (int64_t col = 0; col < inputs; col += simd.width) {
      p.panel2 = panels.panel(col / simd.width);
      p.c = adapted.data() + col;
      p.n = static_cast<int>(std::min<int64_t>(simd.width, inputs - col));
      simd.product(p);
    }
    for (int64_t i = 0; i < rows; ++i) {
      const float* values = adapted.data() + i * stride;
      float square = 0;
      simd.dot(DType::kFloat32, values, stride, DType::kFloat32, values, stride, 1.0F, &square, 1,
               1, 1, inputs);
      plain_write(args.norms, row + i, 0, std::sqrt(square));
    }
  });
  return no_memory ? out_of_memory(op) : Status();
}

Status check_gain(const Checker& check, const ExecContext& ctx, const TensorView& z,
                  const TensorView& gain) {
  LORAACCEL_RETURN_IF_ERROR(check.context(ctx));
  if (z.ndim != 2) {
    return check.fail(StatusCode::kShapeMismatch,
                      "z has shape " + shape_text(z) + ", expected [M, N]");
  }
  LORAACCEL_RETURN_IF_ERROR(check.pointer("z", z));
  LORAACCEL_RETURN_IF_ERROR(check.vector("gain", gain, z.cols(), "N"));
  if ((z.dtype == DType::kFloat64) == (gain.dtype == DType::kFloat64)) return Status();
  return check.fail(StatusCode::kUnsupportedDtype,
                    std::string("gain is ") + dtype_name(gain.dtype) + " and z " +
                        dtype_name(z.dtype) + ", expected both float64 or neither");
}

Status check_gain_forward(const ExecContext& ctx, const ColumnGainArgs& args) {
  const Checker check("column_gain", ctx.device);
  LORAACCEL_RETURN_IF_ERROR(check_gain(check, ctx, args.z, args.gain));
  if (args.bias.defined()) {
    LORAACCEL_RETURN_IF_ERROR(check.vector("bias", args.bias, args.z.cols(), "N"));
    LORAACCEL_RETURN_IF_ERROR(check.dtype("bias", args.bias, args.z.dtype, "z"));
  }
  LORAACCEL_RETURN_IF_ERROR(check.matrix("y", args.y, args.z.rows(), args.z.cols(), "M, N"));
  LORAACCEL_RETURN_IF_ERROR(check.dtype("y", args.y, args.z.dtype, "z"));
  const bool in_place = args.y.data == args.z.data && args.y.stride[0] == args.z.stride[0] &&
                        args.y.stride[1] == args.z.stride[1];
  return check.apart("y", args.y, {args.gain, args.bias, in_place ? TensorView() : args.z}, {});
}

Status check_gain_backward(const ExecContext& ctx, const ColumnGainBackwardArgs& args) {
  const Checker check("column_gain_backward", ctx.device);
  LORAACCEL_RETURN_IF_ERROR(check_gain(check, ctx, args.z, args.gain));
  const int64_t rows = args.z.rows();
  const int64_t cols = args.z.cols();
  LORAACCEL_RETURN_IF_ERROR(check.matrix("grad", args.dy, rows, cols, "M, N"));
  LORAACCEL_RETURN_IF_ERROR(check.dtype("grad", args.dy, args.z.dtype, "z"));
  if (args.bias.defined()) LORAACCEL_RETURN_IF_ERROR(check.vector("bias", args.bias, cols, "N"));
  if (args.dz.defined()) {
    LORAACCEL_RETURN_IF_ERROR(check.matrix("grad_z", args.dz, rows, cols, "M, N"));
    LORAACCEL_RETURN_IF_ERROR(check.dtype("grad_z", args.dz, args.z.dtype, "z"));
  }
  if (args.dgain.defined()) {
    LORAACCEL_RETURN_IF_ERROR(check.vector("grad_gain", args.dgain, cols, "N"));
    LORAACCEL_RETURN_IF_ERROR(check.dtype("grad_gain", args.dgain, args.gain.dtype, "gain"));
  }
  if (args.dbias.defined()) {
    LORAACCEL_RETURN_IF_ERROR(check.vector("grad_bias", args.dbias, cols, "N"));
    LORAACCEL_RETURN_IF_ERROR(check.dtype("grad_bias", args.dbias, args.z.dtype, "z"));
  }
  for (const TensorView& out : {args.dz, args.dgain, args.dbias})
    LORAACCEL_RETURN_IF_ERROR(check.apart("a gradient", out, {args.dy, args.z, args.gain}, {}));
  return Status();
}

double read_vector(const TensorView& v, int64_t i) {
  TensorView column = v;
  column.stride[1] = 0;
  return plain_read(column, i, 0);
}

void write_vector(const TensorView& v, int64_t i, double value) {
  TensorView column = v;
  column.stride[1] = 0;
  plain_write(column, i, 0, value);
}

Status gain_forward_ref(const ExecContext& ctx, const ColumnGainArgs& args) {
  parallel_for(ctx, args.z.rows(), [&](int64_t m) {
    for (int64_t n = 0; n < args.z.cols(); ++n) {
      const double bias = args.bias.defined() ? read_vector(args.bias, n) : 0;
      const double z = plain_read(args.z, m, n);
      const double gain = read_vector(args.gain, n);
      plain_write(args.y, m, n, args.centred ? z + (gain - 1) * (z - bias) : gain * z + bias);
    }
  });
  return Status();
}

Status gain_backward_ref(const ExecContext& ctx, const ColumnGainBackwardArgs& args) {
  parallel_for(ctx, args.z.cols(), [&](int64_t n) {
    const double gain = read_vector(args.gain, n);
    const double bias = args.centred && args.bias.defined() ? read_vector(args.bias, n) : 0;
    double dgain = 0;
    double dbias = 0;
    for (int64_t m = 0; m < args.z.rows(); ++m) {
      const double dy = plain_read(args.dy, m, n);
      if (args.dgain.defined()) dgain += dy * (plain_read(args.z, m, n) - bias);
      dbias += dy;
      if (args.dz.defined()) plain_write(args.dz, m, n, gain * dy);
    }
    if (args.dgain.defined()) write_vector(args.dgain, n, dgain);
    if (args.dbias.defined()) write_vector(args.dbias, n, (args.centred ? 1 - gain : 1) * dbias);
  });
  return Status();
}

// offset + scale v, as floats; nothing where v is undefined.
Status float_vector(const ExecContext& ctx, const char* op, const TensorView& v, double scale,
                    double offset, Scratch<float>* out) {
  if (!v.defined()) return Status();
  if (!out->allocate(ctx, v.rows())) return out_of_memory(op);
  for (int64_t n = 0; n < v.rows(); ++n)
    out->data()[n] = static_cast<float>(offset + scale * read_vector(v, n));
  return Status();
}

void* at(const TensorView& v, int64_t row, int64_t col) {
  return static_cast<char*>(v.data) +
         (row * v.stride[0] + col) * static_cast<int64_t>(dtype_size_bytes(v.dtype));
}

Status gain_forward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                        const ColumnGainArgs& args) {
  Scratch<float> gain, bias;
  Scratch<char> z_copy;
  AnyRows z;
  const bool centred = args.centred;
  LORAACCEL_RETURN_IF_ERROR(float_vector(ctx, op, args.gain, 1, centred ? -1 : 0, &gain));
  LORAACCEL_RETURN_IF_ERROR(float_vector(ctx, op, args.bias, centred ? -1 : 1, 0, &bias));
  LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, args.z, &z_copy, &z));
  parallel_for(ctx, args.z.rows(), [&](int64_t m) {
    simd.gain({z.dtype, args.z.cols(), z.at(m), gain.data(), centred ? bias.data() : nullptr,
               centred ? nullptr : bias.data(), centred, at(args.y, m, 0)});
  });
  return Status();
}

Status gain_backward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                         const ColumnGainBackwardArgs& args) {
  constexpr int64_t kColumns = 256;
  constexpr int64_t kBlock = 128;  // rows of a block of a sum
  const int64_t rows = args.z.rows();
  const int64_t cols = args.z.cols();
  Scratch<float> gain, bias;
  Scratch<char> z_copy, dy_copy;
  AnyRows z, dy;
  LORAACCEL_RETURN_IF_ERROR(float_vector(ctx, op, args.gain, 1, 0, &gain));
  if (args.centred) LORAACCEL_RETURN_IF_ERROR(float_vector(ctx, op, args.bias, 1, 0, &bias));
  const bool sums_grad = args.dbias.defined() || bias.data() != nullptr;
  LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, args.dy, &dy_copy, &dy));
  if (args.dgain.defined()) LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, args.z, &z_copy, &z));
  parallel_for(ctx, ceil_div(cols, kColumns), [&](int64_t task) {
    const int64_t col = task * kColumns;
    const int64_t count = std::min(kColumns, cols - col);
    double dgain[kColumns] = {};
    double dbias[kColumns] = {};
    for (int64_t row = 0; row < rows; row += kBlock) {
      float gains[kColumns] = {};
      float biases[kColumns] = {};
      for (int64_t m = row; m < std::min(rows, row + kBlock); ++m) {
        if (args.dz.defined())
          simd.gain({dy.dtype, count, dy.at(m, col), gain.data() + col, nullptr, nullptr, false,
                     at(args.dz, m, col)});
        if (args.dgain.defined())
          simd.multiply_sums(dy.dtype, dy.at(m, col), z.at(m, col), gains, count);
        if (sums_grad) simd.multiply_sums(dy.dtype, dy.at(m, col), nullptr, biases, count);
      }
      for (int64_t n = 0; n < count; ++n) {
        dgain[n] += static_cast<double>(gains[n]);
        dbias[n] += static_cast<double>(biases[n]);
      }
    }
    for (int64_t n = 0; n < count; ++n) {
      const double b = bias.data() == nullptr ? 0 : static_cast<double>(bias.data()[col + n]);
      if (args.dgain.defined()) write_vector(args.dgain, col + n, dgain[n] - b * dbias[n]);
      const double factor = args.centred ? 1 - static_cast<double>(gain.data()[col + n]) : 1;
      if (args.dbias.defined()) write_vector(args.dbias, col + n, factor * dbias[n]);
    }
  });
  return Status();
}

}  // namespace

Status weight_norms(const ExecContext& ctx, const WeightNormsArgs& args) {
  constexpr const char* kOp = "weight_norms";
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check_weight_norms(ctx, args));
    const LoraSimd* table = nullptr;
    LORAACCEL_RETURN_IF_ERROR(choose_table(kOp, ctx, args.norms.dtype, true, &table));
    return table == nullptr ? weight_norms_ref(ctx, args)
                            : weight_norms_own(*table, ctx, kOp, args);
  });
}

Status column_gain_forward(const ExecContext& ctx, const ColumnGainArgs& args) {
  constexpr const char* kOp = "column_gain";
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check_gain_forward(ctx, args));
    const LoraSimd* table = nullptr;
    LORAACCEL_RETURN_IF_ERROR(
        choose_table(kOp, ctx, args.z.dtype, has_unit_columns(args.y), &table));
    return table == nullptr ? gain_forward_ref(ctx, args)
                            : gain_forward_own(*table, ctx, kOp, args);
  });
}

Status column_gain_backward(const ExecContext& ctx, const ColumnGainBackwardArgs& args) {
  constexpr const char* kOp = "column_gain_backward";
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check_gain_backward(ctx, args));
    const LoraSimd* table = nullptr;
    const bool unit_columns = !args.dz.defined() || has_unit_columns(args.dz);
    LORAACCEL_RETURN_IF_ERROR(choose_table(kOp, ctx, args.z.dtype, unit_columns, &table));
    return table == nullptr ? gain_backward_ref(ctx, args)
                            : gain_backward_own(*table, ctx, kOp, args);
  });
}

}  // namespace loraaccel
