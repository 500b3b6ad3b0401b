// The checks that the losses share.
#pragma once

#include "loraaccel/losses.h"
#include "operand_checks.h"

namespace loraaccel {

class LossChecker : public OperandChecker {
 public:
  using OperandChecker::OperandChecker;

  Status dense(const char* name, const TensorView& v) const {
    const bool columns = v.ndim < 2 || v.cols() <= 1 || v.stride[1] == 1;
    const int64_t step = v.ndim < 2 ? 1 : v.cols();
    const bool rows = v.rows() <= 1 || v.cols() == 0 || v.stride[0] == step;
    if (columns && rows) return Status();
    return fail(StatusCode::kInvalidArgument, std::string(name) + " is not dense");
  }

  Status dense_matrix(const char* name, const TensorView& v, const TensorView& like) const {
    LORAACCEL_RETURN_IF_ERROR(matrix(name, v, like.rows(), like.cols(), "B, N"));
    return dense(name, v);
  }

  Status dense_vector(const char* name, const TensorView& v, int64_t size,
                      const char* letter) const {
    LORAACCEL_RETURN_IF_ERROR(vector(name, v, size, letter));
    return dense(name, v);
  }

  Status inputs(const char* x_name, const TensorView& x, const TensorView& target) const {
    if (x.ndim != 2) {
      return fail(StatusCode::kShapeMismatch,
                  std::string(x_name) + " has shape " + shape_text(x) + ", expected [B, N]");
    }
    LORAACCEL_RETURN_IF_ERROR(dense_matrix(x_name, x, x));
    return dense_matrix("target", target, x);
  }

  Status broadcast(const char* name, const BroadcastView& v) const {
    if (!v.defined() || (v.period >= 1 && v.inner >= 1)) return Status();
    return fail(StatusCode::kInvalidArgument,
                std::string(name) + " has a period of " + std::to_string(v.period) +
                    " and runs of " + std::to_string(v.inner) + ", expected at least 1");
  }

  // What has the shape of the loss: it, and the gradient from above.
  Status shaped(const char* name, const TensorView& v, LossReduction reduction,
                const TensorView& x) const {
    if (!v.defined()) return Status();
    if (reduction == LossReduction::kNone) return dense_matrix(name, v, x);
    if (reduction == LossReduction::kSamples) return dense_vector(name, v, x.rows(), "B");
    return dense_vector(name, v, 1, "1");
  }

  Status outputs(const TensorView& x, const TensorView& target, LossReduction reduction,
                 const TensorView& upstream, const TensorView& loss, const TensorView& grad) const {
    LORAACCEL_RETURN_IF_ERROR(shaped("the gradient of the loss", upstream, reduction, x));
    LORAACCEL_RETURN_IF_ERROR(shaped("loss", loss, reduction, x));
    LORAACCEL_RETURN_IF_ERROR(apart("loss", loss, {x, target, upstream}));
    if (!grad.defined()) return Status();
    LORAACCEL_RETURN_IF_ERROR(dense_matrix("grad", grad, x));
    return apart("grad", grad, {x, target, upstream, loss});
  }
};

}  // namespace loraaccel
