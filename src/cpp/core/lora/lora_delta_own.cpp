// The adapters alone, over the vector tables. Any type but float64; y and dx have unit columns.
#include <atomic>

#include "lora/lora_own.h"
#include "lora/lora_rank.h"

namespace loraaccel {
namespace {

DropoutBlock block_of(const DropoutSpec& d, int64_t row0, int64_t rows, int64_t cols) {
  return {row0, rows, 0, cols, d.seed, d.offset, d.p};
}

// y = base, where they are not the same already.
void copy_base(const ExecContext& ctx, const TensorView& base, const TensorView& y) {
  if (base.data == y.data) return;
  visit_dtype(y.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    move_rows(ctx, static_cast<const T*>(base.data), base.stride[0], base.stride[1],
              static_cast<T*>(y.data), y.stride[0], y.rows(), y.cols());
  });
}

}  // namespace

Status lora_delta_forward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                              const LoraDeltaArgs& args) {
  const int64_t rows = args.x.rows();
  const int64_t outputs = args.y.cols();
  Scratch<char> x_copy;
  AnyRows x;
  LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, args.x, &x_copy, &x));
  RankAdapters adapters(args.samples);
  adapters.add(args.adapters);
  LORAACCEL_RETURN_IF_ERROR(rank_hidden(simd, ctx, op, x, rows, args.x.cols(), adapters, args.h));
  copy_base(ctx, args.base, args.y);
  if (args.output.p <= 0)
    return rank_expand(simd, ctx, op, args.adapters, args.samples, args.h, args.y);
  // The masked update in floats, block by block.
  Scratch<float> update;
  if (!update.allocate(ctx, rows * outputs)) return out_of_memory(op);
  std::fill_n(update.data(), rows * outputs, 0.0F);
  LORAACCEL_RETURN_IF_ERROR(
      rank_expand(simd, ctx, op, args.adapters, args.samples, args.h,
                  TensorView::matrix(update.data(), DType::kFloat32, rows, outputs)));
  const auto element = static_cast<int64_t>(dtype_size_bytes(args.y.dtype));
  parallel_for(ctx, rows, [&](int64_t m) {
    simd.dropout_add(update.data() + m * outputs, outputs, block_of(args.output, m, 1, outputs),
                     args.y.dtype, static_cast<char*>(args.y.data) + m * args.y.stride[0] * element,
                     args.y.stride[0]);
  });
  return Status();
}

Status lora_delta_backward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                               const LoraDeltaBackwardArgs& args) {
  const int64_t rows = args.x.rows();
  const int64_t outputs = args.dy.cols();
  Scratch<char> dy_copy, x_copy;
  Scratch<float> masked;
  AnyRows dy, x;
  LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, args.dy, &dy_copy, &dy));
  if (args.output.p > 0) {
    if (!masked.allocate(ctx, rows * outputs)) return out_of_memory(op);
    parallel_for(ctx, rows, [&](int64_t m) {
      simd.dropout(dy.dtype, dy.at(m), dy.stride, block_of(args.output, m, 1, outputs),
                   masked.data() + m * outputs, outputs);
    });
    dy = {masked.data(), outputs, DType::kFloat32};
  }
  if (std::ranges::any_of(args.da, [](const TensorView& v) { return v.defined(); }))
    LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, args.x, &x_copy, &x));
  const RankLayer layer = {dy, outputs, args.adapters, args.da, args.db};
  RankBackward rank;
  LORAACCEL_RETURN_IF_ERROR(rank.prepare(simd, ctx, op, rows, {&layer, 1}, args.samples));
  const Tasks tasks = rank.tasks();
  run_tasks(ctx, {&tasks, 1});
  if (args.dx.defined()) {
    const double zero = 0;
    store_view(ctx, &zero, 0, 0, 1.0, args.dx);
    LORAACCEL_RETURN_IF_ERROR(rank.add_to_dx(simd, ctx, args.dx, /*plain_too=*/true));
  }
  return rank.adapter_gradients(simd, ctx, x, args.x.cols(), args.h);
}

}  // namespace loraaccel
