// Losses and their gradients.
#include "loraaccel/losses.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/bridge.h"
#include "ops/operators.h"

namespace loraaccel::operators {
namespace {

// One dimension of the tensor that an operand is broadcast against: how long it is, and what a step along it is in the
// operand.
struct Dimension {
  int64_t size, step;
};

// The layout of `dims` as runs, then a dense block, then repeats of that; false where it is something else.
bool as_broadcast(const Dimension* dims, size_t count, BroadcastView* view) {
  view->inner = view->period = 1;
  size_t i = count;
  while (i > 0 && (dims[i - 1].step == 0 || dims[i - 1].size == 1)) view->inner *= dims[--i].size;
  for (; i > 0 && (dims[i - 1].size == 1 || dims[i - 1].step == view->period); --i)
    view->period *= dims[i - 1].size;
  for (; i > 0; --i) {
    if (dims[i - 1].step != 0 && dims[i - 1].size != 1) return false;
  }
  view->inner = std::max<int64_t>(view->inner, 1);
  view->period = std::max<int64_t>(view->period, 1);
  return true;
}

// An operand that is broadcast against x.
class BroadcastOperand {
 public:
  BroadcastOperand(const OptionalTensor& given, const Tensor& x, const char* op, const char* name) {
    if (!given.has_value()) return;
    tensor_ = *given;
    view_.dtype = bridge::dtype_of(tensor_, op, name);
    const int64_t missing = x.dim() - tensor_.dim();
    for (int64_t i = 0; i < x.dim(); ++i) {
      const int64_t size = i < missing ? 1 : tensor_.size(i - missing);
      if (size != x.size(i) && size != 1) mismatch(x, op, name);
      dims_.push_back({x.size(i), size == 1 ? 0 : tensor_.strides()[i - missing]});
    }
    if (missing < 0) mismatch(x, op, name);
    view_.data = x.numel() == 0 ? nullptr : tensor_.data_ptr();
  }

  // What it is against [1, N], all dimensions of x in one; false where that cannot be said.
  bool whole() {
    view_.sample_stride = 0;
    return !view_.defined() || as_broadcast(dims_.data(), dims_.size(), &view_);
  }

  // What it is against [B, N], B the first dimension of x: written out where nothing else will do.
  void by_samples() {
    if (!view_.defined()) return;
    view_.sample_stride = dims_[0].step;
    if (as_broadcast(dims_.data() + 1, dims_.size() - 1, &view_)) return;
    write_out();
  }

  const BroadcastView& view() const { return view_; }

 private:
  [[noreturn]] void mismatch(const Tensor& x, const char* op, const char* name) const {
    bridge::fail(StatusCode::kShapeMismatch,
                 std::string(op) + ": " + name + " has shape " + bridge::shape_text(tensor_) +
                     ", expected one that is broadcast to " + bridge::shape_text(x));
  }

  void write_out() {
    std::vector<int64_t> shape;
    shape.reserve(dims_.size());
    for (const Dimension& d : dims_) shape.push_back(d.size);
    Tensor full = bridge::empty(shape, view_.dtype);
    const size_t size = dtype_size_bytes(view_.dtype);
    const auto* from = static_cast<const char*>(view_.data);
    auto* to = static_cast<char*>(full.data_ptr());
    std::vector<int64_t> at(dims_.size(), 0);
    int64_t offset = 0;
    for (int64_t i = 0; i < full.numel(); ++i, to += size) {
      std::memcpy(to, from + offset * static_cast<int64_t>(size), size);
      for (size_t d = dims_.size(); d-- > 0;) {
        offset += dims_[d].step;
        if (++at[d] < dims_[d].size) break;
        offset -= at[d] * dims_[d].step;
        at[d] = 0;
      }
    }
    const int64_t sample = full.numel() / dims_[0].size;
    tensor_ = std::move(full);
    view_ = {tensor_.data_ptr(), view_.dtype, sample, sample, 1};
  }

  Tensor tensor_;
  std::vector<Dimension> dims_;
  BroadcastView view_;
};

// Elements one after the other; `tensor` owns them.
struct Dense {
  Dense(const Tensor& given, const char* op, const char* name)
      : tensor(given.is_contiguous() ? given : bridge::dense_copy(given)),
        dtype(bridge::dtype_of(given, op, name)) {}

  TensorView matrix(int64_t rows, int64_t cols) const {
    return TensorView::matrix(tensor.data_ptr(), dtype, rows, cols);
  }
  TensorView vector() const { return TensorView::vector(tensor.data_ptr(), dtype, tensor.numel()); }

  Tensor tensor;
  DType dtype;
};

bool same_shape(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim()) return false;
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != b.size(i)) return false;
  }
  return true;
}

void check_shapes(const Tensor& x, const char* x_name, const Tensor& other, const char* name,
                  const char* op) {
  if (same_shape(x, other)) return;
  bridge::fail(StatusCode::kShapeMismatch, std::string(op) + ": " + name + " has shape " +
                                               bridge::shape_text(other) + ", expected " +
                                               bridge::shape_text(x) + " as " + x_name);
}

void check_mask(const std::vector<bool>& mask, size_t count, const char* names, const char* op) {
  if (mask.size() == count) return;
  bridge::fail(StatusCode::kInvalidArgument,
               std::string(op) + ": output_mask has " + std::to_string(mask.size()) +
                   " entries, expected " + std::to_string(count) + " (" + names + ")");
}

int checked(int64_t value, int64_t count, const char* op, const char* name) {
  if (value >= 0 && value < count) return static_cast<int>(value);
  bridge::fail(StatusCode::kInvalidArgument, std::string(op) + ": " + name + " is " +
                                                 std::to_string(value) + ", expected 0 to " +
                                                 std::to_string(count - 1));
}

// The gradient from above, of the shape of the loss.
TensorView upstream_view(const Dense& up, LossReduction reduction, int64_t rows, int64_t cols) {
  return reduction == LossReduction::kNone ? up.matrix(rows, cols) : up.vector();
}

}  // namespace

std::vector<Tensor> bce_with_logits_op(const Tensor& input, const Tensor& target,
                                       const OptionalTensor& weight,
                                       const OptionalTensor& pos_weight,
                                       const OptionalTensor& upstream, double label_smoothing,
                                       double focal_gamma, double ignore_index, int64_t reduction,
                                       bool mean_of_kept, const std::vector<bool>& output_mask) {
  constexpr const char* kOp = "bce_with_logits";
  check_mask(output_mask, 2, "loss, gradient", kOp);
  check_shapes(input, "input", target, "target", kOp);
  const Dense x(input, kOp, "input");
  const Dense t(target, kOp, "target");
  BroadcastOperand w(weight, input, kOp, "weight");
  BroadcastOperand p(pos_weight, input, kOp, "pos_weight");
  BceWithLogitsArgs args;
  args.reduction = static_cast<LossReduction>(checked(reduction, 3, kOp, "reduction"));
  int64_t rows = 1;
  if (!w.whole() || !p.whole()) {
    w.by_samples();
    p.by_samples();
    rows = input.size(0);
  }
  const int64_t cols = rows == 0 ? 0 : input.numel() / rows;
  args.x = x.matrix(rows, cols);
  args.target = t.matrix(rows, cols);
  args.weight = w.view();
  args.pos_weight = p.view();
  args.label_smoothing = label_smoothing;
  args.focal_gamma = focal_gamma;
  args.ignore_index = ignore_index;
  args.mean_of_kept = mean_of_kept;
  const bool none = args.reduction == LossReduction::kNone;
  OptionalTensor kept;
  if (upstream.has_value()) {
    if (none) check_shapes(input, "input", *upstream, "upstream", kOp);
    const Dense up(*upstream, kOp, "upstream");
    args.upstream = upstream_view(up, args.reduction, rows, cols);
    kept = up.tensor;
  }
  const DType dtype = t.dtype;
  std::vector<Tensor> outputs;
  if (output_mask[0]) {
    outputs.push_back(none ? bridge::empty_same(input, dtype) : bridge::empty({}, dtype));
    void* data = outputs.back().data_ptr();
    args.loss =
        none ? TensorView::matrix(data, dtype, rows, cols) : TensorView::vector(data, dtype, 1);
  }
  if (output_mask[1]) {
    outputs.push_back(bridge::empty_same(input, x.dtype));
    args.grad = TensorView::matrix(outputs.back().data_ptr(), x.dtype, rows, cols);
  }
  bridge::run([&](const ExecContext& ctx) { return bce_with_logits(ctx, args); });
  return outputs;
}

std::vector<Tensor> diffusion_loss_op(const Tensor& pred, const Tensor& target,
                                      const OptionalTensor& huber_c, const OptionalTensor& factors,
                                      const OptionalTensor& mask, const OptionalTensor& upstream,
                                      int64_t loss_type, int64_t reduction, bool mean_of_kept,
                                      const std::vector<bool>& output_mask) {
  constexpr const char* kOp = "diffusion_loss";
  check_mask(output_mask, 3, "loss, losses of the samples, gradient", kOp);
  check_shapes(pred, "pred", target, "target", kOp);
  if (pred.dim() == 0) {
    bridge::fail(StatusCode::kShapeMismatch,
                 std::string(kOp) + ": pred has no dimensions, expected [B, ...]");
  }
  const Dense x(pred, kOp, "pred");
  const Dense t(target, kOp, "target");
  BroadcastOperand m(mask, pred, kOp, "mask");
  m.by_samples();
  const int64_t rows = pred.size(0);
  const int64_t cols = rows == 0 ? 0 : pred.numel() / rows;
  DiffusionLossArgs args;
  args.pred = x.matrix(rows, cols);
  args.target = t.matrix(rows, cols);
  args.mask = m.view();
  args.type = static_cast<DiffusionLossType>(checked(loss_type, 4, kOp, "loss_type"));
  args.reduction = static_cast<LossReduction>(checked(reduction, 4, kOp, "reduction"));
  args.mean_of_kept = mean_of_kept;
  std::vector<Tensor> kept;
  const auto vector = [&](const OptionalTensor& given, const char* name, TensorView* view) {
    if (!given.has_value()) return;
    const Dense dense(*given, kOp, name);
    *view = dense.vector();
    kept.push_back(dense.tensor);
  };
  vector(huber_c, "huber_c", &args.huber_c);
  vector(factors, "factors", &args.factors);
  const bool none = args.reduction == LossReduction::kNone;
  if (upstream.has_value()) {
    if (none) check_shapes(pred, "pred", *upstream, "upstream", kOp);
    const Dense up(*upstream, kOp, "upstream");
    args.upstream = upstream_view(up, args.reduction, rows, cols);
    kept.push_back(up.tensor);
  }
  const bool wide = x.dtype == DType::kFloat64 || t.dtype == DType::kFloat64;
  const DType dtype = wide ? DType::kFloat64 : DType::kFloat32;
  std::vector<Tensor> outputs;
  if (output_mask[0]) {
    const bool samples = args.reduction == LossReduction::kSamples;
    outputs.push_back(none      ? bridge::empty_same(pred, dtype)
                      : samples ? bridge::empty({rows}, dtype)
                                : bridge::empty({}, dtype));
    void* data = outputs.back().data_ptr();
    args.loss = none ? TensorView::matrix(data, dtype, rows, cols)
                     : TensorView::vector(data, dtype, samples ? rows : 1);
  }
  if (output_mask[1]) {
    outputs.push_back(bridge::empty({rows}, dtype));
    args.per_sample = TensorView::vector(outputs.back().data_ptr(), dtype, rows);
  }
  if (output_mask[2]) {
    outputs.push_back(bridge::empty_same(pred, x.dtype));
    args.grad = TensorView::matrix(outputs.back().data_ptr(), x.dtype, rows, cols);
  }
  bridge::run([&](const ExecContext& ctx) { return diffusion_loss(ctx, args); });
  return outputs;
}

namespace {

// int64 [B], one after the other.
Tensor dense_timesteps(const Tensor& timesteps, const char* op) {
  if (!bridge::is_int64(timesteps) || timesteps.dim() != 1) {
    bridge::fail(StatusCode::kInvalidArgument, std::string(op) + ": timesteps of shape " +
                                                   bridge::shape_text(timesteps) +
                                                   ", expected int64 of shape [B]");
  }
  return timesteps.is_contiguous() ? timesteps : bridge::dense_copy(timesteps);
}

}  // namespace

Tensor snr_scale_op(const Tensor& timesteps, const Tensor& table, double min_snr_gamma,
                    bool scale_v_pred_like_noise_pred, double v_pred_like_loss,
                    bool debiased_estimation, bool v_prediction) {
  constexpr const char* kOp = "snr_scale";
  const Tensor steps = dense_timesteps(timesteps, kOp);
  const Dense snr(table, kOp, "the SNR table");
  Tensor factors = bridge::empty({steps.numel()}, snr.dtype);
  SnrScaleArgs args;
  args.timesteps = static_cast<const int64_t*>(steps.data_ptr());
  args.count = steps.numel();
  args.table = snr.vector();
  args.min_snr_gamma = min_snr_gamma;
  args.scale_v_pred_like_noise_pred = scale_v_pred_like_noise_pred;
  args.v_pred_like_loss = v_pred_like_loss;
  args.debiased_estimation = debiased_estimation;
  args.v_prediction = v_prediction;
  args.factors = TensorView::vector(factors.data_ptr(), snr.dtype, args.count);
  bridge::run([&](const ExecContext& ctx) { return snr_scale(ctx, args); });
  return factors;
}

Tensor huber_threshold_op(const Tensor& timesteps, const Tensor& table, double huber_c) {
  constexpr const char* kOp = "huber_threshold";
  const Tensor steps = dense_timesteps(timesteps, kOp);
  const Dense cumulative(table, kOp, "the table");
  Tensor thresholds = bridge::empty({steps.numel()}, cumulative.dtype);
  HuberThresholdArgs args;
  args.timesteps = static_cast<const int64_t*>(steps.data_ptr());
  args.count = steps.numel();
  args.table = cumulative.vector();
  args.huber_c = huber_c;
  args.thresholds = TensorView::vector(thresholds.data_ptr(), cumulative.dtype, args.count);
  bridge::run([&](const ExecContext& ctx) { return huber_threshold(ctx, args); });
  return thresholds;
}

Tensor area_resize_op(const Tensor& image, int64_t height, int64_t width) {
  constexpr const char* kOp = "area_resize";
  const int64_t dims = image.dim();
  if (dims < 2 || height < 0 || width < 0) {
    bridge::fail(StatusCode::kShapeMismatch,
                 std::string(kOp) + ": image has shape " + bridge::shape_text(image) +
                     " and is to be " + std::to_string(height) + " x " + std::to_string(width) +
                     ", expected [..., H, W] and sizes of at least 0");
  }
  const Dense dense(image, kOp, "image");
  std::vector<int64_t> shape;
  int64_t planes = 1;
  for (int64_t i = 0; i < dims - 2; ++i) {
    shape.push_back(image.size(i));
    planes *= image.size(i);
  }
  shape.push_back(height);
  shape.push_back(width);
  const DType dtype = dense.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Tensor resized = bridge::empty(shape, dtype);
  if (planes == 0) return resized;
  AreaResizeArgs args;
  args.image = dense.matrix(planes * image.size(dims - 2), image.size(dims - 1));
  args.resized = TensorView::matrix(resized.data_ptr(), dtype, planes * height, width);
  args.planes = planes;
  bridge::run([&](const ExecContext& ctx) { return area_resize(ctx, args); });
  return resized;
}

}  // namespace loraaccel::operators
