#include "loraaccel/lora_mlp.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "lora/checks.h"
#include "lora/lora_group.h"
#include "lora/operands.h"
#include "lora/simd/simd.h"

namespace loraaccel {
namespace {

constexpr const char* kGated[] = {"gate", "up"};
constexpr const char* kPlain[] = {"up"};
constexpr const char* kDown[] = {"down"};

LayerNames inner_names(const char* op, size_t count) {
  if (count == 1) return {.op = op, .names = kPlain, .all = "up"};
  return {.op = op, .names = kGated, .all = "gate and up"};
}

LayerNames down_names(const char* op) { return {.op = op, .names = kDown, .all = "down"}; }

// Inner layers, their outputs and the down layer fit together. `y` is output j of the inner layers.
template <class Layers, class Outputs>
Status check_block(const Checker& check, const TensorView& x, const Layers& inner,
                   const TensorView& down_w, const Outputs& y) {
  LORAACCEL_RETURN_IF_ERROR(check.input(x));
  if (inner.empty() || inner.size() > 2) {
    return check.fail(
        StatusCode::kInvalidArgument,
        std::to_string(inner.size()) + " inner layers, expected gate and up, or up alone");
  }
  if (down_w.ndim != 2) {
    return check.fail(StatusCode::kShapeMismatch,
                      "down: weight has shape " + shape_text(down_w) + ", expected [N, I]");
  }
  for (size_t j = 0; j < inner.size(); ++j) {
    const std::string name = inner_names("", inner.size()).layer(j);
    if (inner[j].w.ndim != 2 || inner[j].w.rows() != down_w.cols()) {
      return check.fail(StatusCode::kShapeMismatch,
                        name + ": weight has shape " + shape_text(inner[j].w) + ", expected [" +
                            std::to_string(down_w.cols()) + ", K] to go with that of down " +
                            shape_text(down_w));
    }
    LORAACCEL_RETURN_IF_ERROR(
        check.matrix((name + " output").c_str(), y(j), x.rows(), down_w.cols(), "M, I"));
    LORAACCEL_RETURN_IF_ERROR(check.dtype((name + " output").c_str(), y(j), x.dtype, "x"));
    if (!has_unit_columns(y(j))) {
      return check.fail(StatusCode::kInvalidArgument,
                        name + " output: its columns are not neighbours");
    }
  }
  return Status();
}

// An output of one layer shares no memory with what another one reads: each group checks its own operands only.
class Operands {
 public:
  void reads(const TensorView& v) { reads_.push_back(v); }
  template <class Layer>
  void reads_layer(const Layer& layer) {
    reads(layer.w);
    for (const LoraAdapter& ad : layer.adapters) {
      reads(ad.a);
      reads(ad.b);
    }
  }
  void writes(const std::string& name, const TensorView& v) {
    if (v.defined()) writes_.emplace_back(name, v);
  }
  void writes_gradients(const std::string& layer, const LoraProjectionBackward& p) {
    writes(layer + ": grad_weight", p.dw);
    writes(layer + ": grad_bias", p.dbias);
    for (const TensorView& v : p.da) writes(layer + ": grad_A", v);
    for (const TensorView& v : p.db) writes(layer + ": grad_B", v);
  }
  Status check(const Checker& check) const {
    for (const auto& [name, out] : writes_) {
      for (const TensorView& in : reads_)
        LORAACCEL_RETURN_IF_ERROR(check.apart(name.c_str(), out, {in}, {}));
    }
    return Status();
  }

 private:
  std::vector<TensorView> reads_;
  std::vector<std::pair<std::string, TensorView>> writes_;
};

double value_of(Activation kind, double v, double* slope) {
  switch (kind) {
    case Activation::kSilu: {
      const double s = 1 / (1 + std::exp(-v));
      *slope = s * (1 + v * (1 - s));
      return v * s;
    }
    case Activation::kGelu: {
      const double cdf = 0.5 * std::erfc(-v * M_SQRT1_2);
      *slope = cdf + v * std::exp(-0.5 * v * v) * 0.5 * M_SQRT1_2 * M_2_SQRTPI;
      return v * cdf;
    }
    case Activation::kGeluTanh: {
      const double c = 2 * M_SQRT1_2 * M_2_SQRTPI;
      const double s = 1 / (1 + std::exp(-c * (v + 0.044715 * v * v * v)));
      *slope = s + v * s * (1 - s) * c * (1 + 3 * 0.044715 * v * v);
      return v * s;
    }
    case Activation::kRelu:
      *slope = v > 0 ? 1 : 0;
      return v < 0 ? 0 : v;
  }
  return v;
}

void activate_double(Activation kind, const ActivationRow& a) {
  const auto* gate = static_cast<const double*>(a.gate);
  const auto* up = static_cast<const double*>(a.up);
  const auto* dt = static_cast<const double*>(a.dt);
  for (int64_t j = 0; j < a.count; ++j) {
    double slope = 0;
    const double value = value_of(kind, gate[j], &slope);
    const double factor = up == nullptr ? 1 : up[j];
    if (dt == nullptr) {
      static_cast<double*>(a.t)[j] = value * factor;
      continue;
    }
    const double g = dt[j];
    static_cast<double*>(a.dgate)[j] = g * factor * slope;
    if (up != nullptr) static_cast<double*>(a.dup)[j] = g * value;
  }
}

// The activation of all rows, forward (dt undefined: into t) or backward (into dgate and dup).
struct Activations {
  Activation kind;
  TensorView gate, up, dt, t, dgate, dup;

  void run(const ExecContext& ctx) const {
    constexpr int64_t kRows = 4;
    const auto element = static_cast<int64_t>(dtype_size_bytes(gate.dtype));
    const auto at = [&](const TensorView& v, int64_t m) -> char* {
      return v.defined() ? static_cast<char*>(v.data) + m * v.stride[0] * element : nullptr;
    };
    const LoraSimd& simd = lora_simd_best();
    parallel_for(ctx, ceil_div(gate.rows(), kRows), [&](int64_t block) {
      const int64_t end = std::min(gate.rows(), (block + 1) * kRows);
      for (int64_t m = block * kRows; m < end; ++m) {
        const ActivationRow row = {gate.dtype, gate.cols(), at(gate, m),  at(up, m),
                                   at(dt, m),  at(t, m),    at(dgate, m), at(dup, m)};
        if (gate.dtype == DType::kFloat64) {
          activate_double(kind, row);
        } else {
          simd.activate(kind, row);
        }
      }
    });
  }
};

Status check_apart(const Checker& check, const LoraMlpArgs& args) {
  Operands operands;
  const LayerNames names = inner_names("", args.inner.size());
  operands.reads(args.x);
  operands.reads_layer(args.down);
  operands.reads(args.down.bias);
  for (size_t j = 0; j < args.inner.size(); ++j) {
    operands.reads_layer(args.inner[j]);
    operands.reads(args.inner[j].bias);
    operands.writes(names.layer(j) + ": y", args.inner[j].y);
  }
  operands.writes("hidden of the inner layers", args.h_inner);
  operands.writes("hidden of down", args.h_down);
  operands.writes("down: y", args.down.y);
  LORAACCEL_RETURN_IF_ERROR(operands.check(check));
  // What the inner layers wrote is read by down's backward pass.
  for (const LoraProjection& p : args.inner)
    LORAACCEL_RETURN_IF_ERROR(check.apart("down: y", args.down.y, {p.y, args.h_inner}, {}));
  return check.apart("hidden of down", args.h_down, {args.down.y, args.h_inner}, {});
}

Status check_apart(const Checker& check, const LoraMlpBackwardArgs& args) {
  Operands operands;
  const LayerNames names = inner_names("", args.inner.size());
  for (const TensorView& v : {args.x, args.dy, args.h_inner, args.h_down}) operands.reads(v);
  for (const TensorView& v : args.outputs) operands.reads(v);
  operands.reads_layer(args.down);
  operands.writes_gradients("down", args.down);
  for (size_t j = 0; j < args.inner.size(); ++j) {
    operands.reads_layer(args.inner[j]);
    operands.writes_gradients(names.layer(j), args.inner[j]);
  }
  operands.writes("grad_x", args.dx);
  return operands.check(check);
}

// [M, I] of x's type in scratch.
Status inner_matrix(const ExecContext& ctx, const char* op, const TensorView& x, int64_t width,
                    Scratch<char>* scratch, TensorView* out) {
  if (!scratch->allocate(ctx, x.rows() * width * static_cast<int64_t>(dtype_size_bytes(x.dtype)))) {
    return out_of_memory(op);
  }
  *out = TensorView::matrix(scratch->data(), x.dtype, x.rows(), width);
  return Status();
}

}  // namespace

Status lora_mlp_forward(const ExecContext& ctx, const LoraMlpArgs& args) {
  constexpr const char* kOp = "lora_mlp";
  return without_exceptions(kOp, [&]() -> Status {
    const Checker check(kOp, ctx.device);
    LORAACCEL_RETURN_IF_ERROR(check.context(ctx));
    LORAACCEL_RETURN_IF_ERROR(check_block(check, args.x, args.inner, args.down.w,
                                          [&](size_t j) { return args.inner[j].y; }));
    const size_t count = args.inner.size();
    Scratch<char> scratch;
    Activations act{args.activation, args.inner[0].y, {}, {}, {}, {}, {}};
    if (count == 2) act.up = args.inner[1].y;
    LORAACCEL_RETURN_IF_ERROR(inner_matrix(ctx, kOp, args.x, args.down.w.cols(), &scratch, &act.t));
    const LayerNames names = inner_names(kOp, count);
    const LoraQkvArgs inner = {args.x, args.inner, args.h_inner};
    const LoraQkvArgs down = {act.t, {&args.down, 1}, args.h_down};
    // All errors come before anything is written.
    LORAACCEL_RETURN_IF_ERROR(check_group_forward(names, ctx, inner));
    LORAACCEL_RETURN_IF_ERROR(check_group_forward(down_names(kOp), ctx, down));
    LORAACCEL_RETURN_IF_ERROR(check_apart(check, args));
    LORAACCEL_RETURN_IF_ERROR(run_group_forward(kOp, ctx, inner));
    act.run(ctx);
    return run_group_forward(kOp, ctx, down);
  });
}

Status lora_mlp_backward(const ExecContext& ctx, const LoraMlpBackwardArgs& args) {
  constexpr const char* kOp = "lora_mlp_backward";
  return without_exceptions(kOp, [&]() -> Status {
    const Checker check(kOp, ctx.device);
    LORAACCEL_RETURN_IF_ERROR(check.context(ctx));
    const size_t count = args.inner.size();
    if (!args.dy.defined()) {
      return check.fail(StatusCode::kShapeMismatch,
                        "down: grad has shape (undefined), expected [M, N]");
    }
    if (args.outputs.size() != count) {
      return check.fail(StatusCode::kInvalidArgument,
                        std::to_string(args.outputs.size()) + " outputs, expected " +
                            std::to_string(count) + ", one of each inner layer");
    }
    LORAACCEL_RETURN_IF_ERROR(check_block(check, args.x, args.inner, args.down.w,
                                          [&](size_t j) { return args.outputs[j]; }));
    Scratch<char> t_scratch, dt_scratch;
    Activations act{args.activation, args.outputs[0], {}, {}, {}, {}, {}};
    if (count == 2) act.up = args.outputs[1];
    TensorView dt;
    LORAACCEL_RETURN_IF_ERROR(
        inner_matrix(ctx, kOp, args.x, args.down.w.cols(), &t_scratch, &act.t));
    LORAACCEL_RETURN_IF_ERROR(inner_matrix(ctx, kOp, args.x, args.down.w.cols(), &dt_scratch, &dt));
    LoraProjectionBackward down = args.down;
    down.dy = args.dy;
    std::vector<LoraProjectionBackward> inner(args.inner.begin(), args.inner.end());
    inner[0].dy = act.t;  // where the gradients of the gate and of up will lie
    if (count == 2) inner[1].dy = dt;
    const LayerNames names = inner_names(kOp, count);
    const LoraQkvBackwardArgs down_args = {act.t, {&down, 1}, args.h_down, dt};
    const LoraQkvBackwardArgs inner_args = {args.x, inner, args.h_inner, args.dx};
    // All errors come before anything is written.
    LORAACCEL_RETURN_IF_ERROR(check_group_backward(down_names(kOp), ctx, down_args));
    LORAACCEL_RETURN_IF_ERROR(check_group_backward(names, ctx, inner_args));
    LORAACCEL_RETURN_IF_ERROR(check_apart(check, args));
    act.run(ctx);
    LORAACCEL_RETURN_IF_ERROR(run_group_backward(kOp, ctx, down_args));
    // t is not read any more: its memory takes the gradient of the gate, that of dt the gradient of up.
    act.dt = dt;
    act.dgate = act.t;
    if (count == 2) act.dup = dt;
    act.t = {};
    act.run(ctx);
    return run_group_backward(kOp, ctx, inner_args);
  });
}

}  // namespace loraaccel
