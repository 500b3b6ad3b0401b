#include <cmath>

#include "half.h"
#include "losses/loss_call.h"

namespace loraaccel {
namespace {

struct Term {
  double value, slope;
};

Term difference_term(LossKind kind, double d, double c) {
  if (kind == LossKind::kL2) return {d * d, 2 * d};
  if (kind == LossKind::kL1) return {std::abs(d), d > 0 ? 1.0 : d < 0 ? -1.0 : d};
  const double root = std::sqrt(d * d + c * c);
  const double outer = kind == LossKind::kHuber ? 2 * c : 2;
  return {outer * (std::abs(d) > c ? root - c : d * d / (root + c)), outer * d / root};
}

Term bce_term(const LossCall& call, double x, double given, double p) {
  if (given == call.ignore_index) return {0, 0};
  const double t = given * (1 - call.smoothing) + call.smoothing / 2;
  const double e = std::exp(-std::abs(x));
  const double near = 1 / (1 + e);
  const double s = x < 0 ? e * near : near;
  const double rest = x < 0 ? near : e * near;
  // (1 - t) x - (1 + (p - 1) t) min(x, 0) is one of two products: nothing cancels where the loss is small.
  const double linear = (x < 0 ? -p * t : 1 - t) * x;
  Term term = {linear + (1 + (p - 1) * t) * std::log1p(e), (1 - t) * s - p * t * rest};
  if (call.kind != LossKind::kFocalBce) return term;
  const double q = t * rest + (1 - t) * s;
  const double factor = std::pow(q, call.focal_gamma);
  if (factor == 0) return {0, 0};
  term.slope = factor * (term.slope + call.focal_gamma * (1 - 2 * t) * s * rest / q * term.value);
  term.value *= factor;
  return term;
}

}  // namespace

double read_number(DType dtype, const void* data, int64_t index) {
  return visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return static_cast<double>(to_float(static_cast<const T*>(data)[index]));
  });
}

void write_number(DType dtype, void* data, int64_t index, double value) {
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    from_float(value, static_cast<T*>(data) + index);
  });
}

double loss_piece_ref(const LossSimd*, const LossCall& call, const LossPiece& piece) {
  const int64_t first = piece.sample * call.x.cols();
  const double c =
      call.huber_c.defined() ? read_number(call.huber_c.dtype, call.huber_c.data, piece.sample) : 0;
  const bool each = call.reduction == LossReduction::kNone;
  double sum = 0;
  for (int64_t i = piece.begin; i < piece.begin + piece.count; ++i) {
    const double x = read_number(call.x.dtype, call.x.data, first + i);
    const double t = read_number(call.target.dtype, call.target.data, first + i);
    const Term term = call.is_bce()
                          ? bce_term(call, x, t, broadcast_at(call.pos_weight, piece.sample, i))
                          : difference_term(call.kind, x - t, c);
    const bool ignored = call.is_bce() && t == call.ignore_index;
    const double w = ignored ? 0 : broadcast_at(call.weight, piece.sample, i);
    sum += ignored ? 0 : term.value * w;
    if (each && call.loss.defined())
      write_number(call.loss.dtype, call.loss.data, first + i,
                   ignored ? 0 : term.value * w * piece.loss_scale);
    if (!call.grad.defined()) continue;
    const double up = each && call.upstream.defined()
                          ? read_number(call.upstream.dtype, call.upstream.data, first + i)
                          : 1;
    write_number(call.grad.dtype, call.grad.data, first + i,
                 ignored ? 0 : term.slope * w * piece.grad_scale * up);
  }
  return sum;
}

}  // namespace loraaccel
