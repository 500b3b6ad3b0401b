#include "loraaccel/lora_expand.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "lora/checks.h"
#include "lora/lora_linear_kernels.h"
#include "lora/lora_own.h"
#include "lora/operands.h"
#include "lora/plain.h"

namespace loraaccel {
namespace {

bool in_double(const TensorView& v) { return v.dtype == DType::kFloat64; }

// A pair's shapes, and types that go together.
Status check_pair(const Checker& check, const char* name, const TensorView& out,
                  const TensorView& hidden, const TensorView& b) {
  if (hidden.ndim != 2 || hidden.cols() != b.cols()) {
    return check.fail(StatusCode::kShapeMismatch, "hidden has shape " + shape_text(hidden) +
                                                      ", expected [M, " + std::to_string(b.cols()) +
                                                      "] to go with lora_B " + shape_text(b));
  }
  LORAACCEL_RETURN_IF_ERROR(check.pointer("hidden", hidden));
  LORAACCEL_RETURN_IF_ERROR(check.matrix(name, out, hidden.rows(), b.rows(), "M, N"));
  for (const TensorView& v : {hidden, out}) {
    if (in_double(v) != in_double(b)) {
      return check.fail(StatusCode::kUnsupportedDtype,
                        std::string(name) + " is " + dtype_name(out.dtype) + ", hidden " +
                            dtype_name(hidden.dtype) + " and lora_B " + dtype_name(b.dtype) +
                            ", expected all float64 or none");
    }
  }
  return Status();
}

Status check_factor(const Checker& check, const ExecContext& ctx, const TensorView& b,
                    double scale) {
  LORAACCEL_RETURN_IF_ERROR(check.context(ctx));
  if (b.ndim != 2 || b.cols() < 1) {
    return check.fail(StatusCode::kShapeMismatch, "lora_B has shape " + shape_text(b) +
                                                      ", expected [N, R] with R of at least 1");
  }
  LORAACCEL_RETURN_IF_ERROR(check.pointer("lora_B", b));
  if (std::isfinite(scale)) return Status();
  return check.fail(StatusCode::kInvalidArgument,
                    "scaling is " + std::to_string(scale) + ", expected a finite number");
}

Status check_counts(const Checker& check, size_t a, size_t b) {
  if (a == b) return Status();
  return check.fail(StatusCode::kInvalidArgument, std::to_string(a) + " and " + std::to_string(b) +
                                                      " matrices, expected as many of each");
}

Status check_forward(const ExecContext& ctx, const LoraExpandArgs& args) {
  const Checker check("lora_expand", ctx.device);
  LORAACCEL_RETURN_IF_ERROR(check_factor(check, ctx, args.b, args.scale));
  LORAACCEL_RETURN_IF_ERROR(check_counts(check, args.base.size(), args.hidden.size()));
  LORAACCEL_RETURN_IF_ERROR(check_counts(check, args.base.size(), args.y.size()));
  for (size_t i = 0; i < args.base.size(); ++i) {
    const TensorView& base = args.base[i];
    const TensorView& y = args.y[i];
    LORAACCEL_RETURN_IF_ERROR(check_pair(check, "base", base, args.hidden[i], args.b));
    LORAACCEL_RETURN_IF_ERROR(check.matrix("y", y, base.rows(), base.cols(), "M, N"));
    LORAACCEL_RETURN_IF_ERROR(check.dtype("y", y, base.dtype, "base"));
    const bool in_place =
        y.data == base.data && y.stride[0] == base.stride[0] && y.stride[1] == base.stride[1];
    LORAACCEL_RETURN_IF_ERROR(
        check.apart("y", y, {args.hidden[i], args.b, in_place ? TensorView() : base}, {}));
  }
  return Status();
}

Status check_backward(const ExecContext& ctx, const LoraExpandBackwardArgs& args) {
  const Checker check("lora_expand_backward", ctx.device);
  LORAACCEL_RETURN_IF_ERROR(check_factor(check, ctx, args.b, args.scale));
  LORAACCEL_RETURN_IF_ERROR(check_counts(check, args.dy.size(), args.hidden.size()));
  if (!args.dhidden.empty())
    LORAACCEL_RETURN_IF_ERROR(check_counts(check, args.dy.size(), args.dhidden.size()));
  for (size_t i = 0; i < args.dy.size(); ++i) {
    LORAACCEL_RETURN_IF_ERROR(check_pair(check, "grad", args.dy[i], args.hidden[i], args.b));
    if (args.dhidden.empty()) continue;
    const TensorView& dh = args.dhidden[i];
    LORAACCEL_RETURN_IF_ERROR(
        check.matrix("grad_hidden", dh, args.hidden[i].rows(), args.b.cols(), "M, R"));
    LORAACCEL_RETURN_IF_ERROR(
        check.apart("grad_hidden", dh, {args.dy[i], args.hidden[i], args.b}, {}));
  }
  if (!args.db.defined()) return Status();
  LORAACCEL_RETURN_IF_ERROR(check.matrix("grad_B", args.db, args.b.rows(), args.b.cols(), "N, R"));
  LORAACCEL_RETURN_IF_ERROR(check.dtype("grad_B", args.db, args.b.dtype, "lora_B"));
  for (size_t i = 0; i < args.dy.size(); ++i)
    LORAACCEL_RETURN_IF_ERROR(check.apart("grad_B", args.db, {args.dy[i], args.hidden[i]}, {}));
  return Status();
}

// Every matrix is stored by rows or by columns.
bool all_unit(std::span<const TensorView> outputs) {
  return std::ranges::all_of(outputs, [](const TensorView& v) {
    return has_unit_columns(v) || has_unit_columns(v.transposed());
  });
}

}  // namespace

Status lora_expand_forward(const ExecContext& ctx, const LoraExpandArgs& args) {
  constexpr const char* kOp = "lora_expand";
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check_forward(ctx, args));
    const LoraSimd* table = nullptr;
    LORAACCEL_RETURN_IF_ERROR(choose_table(kOp, ctx, args.b.dtype, all_unit(args.y), &table));
    return table == nullptr ? lora_expand_forward_ref(ctx, args)
                            : lora_expand_forward_own(*table, ctx, kOp, args);
  });
}

Status lora_expand_backward(const ExecContext& ctx, const LoraExpandBackwardArgs& args) {
  constexpr const char* kOp = "lora_expand_backward";
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check_backward(ctx, args));
    const LoraSimd* table = nullptr;
    LORAACCEL_RETURN_IF_ERROR(choose_table(kOp, ctx, args.b.dtype, true, &table));
    return table == nullptr ? lora_expand_backward_ref(ctx, args)
                            : lora_expand_backward_own(*table, ctx, kOp, args);
  });
}

}  // namespace loraaccel
