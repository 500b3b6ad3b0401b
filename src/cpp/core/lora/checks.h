// The checks of operands that the operators of linear layers share: one error that names what was found and what was
// expected.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "lora/packed_weight.h"
#include "loraaccel/lora_linear.h"
#include "operand_checks.h"

namespace loraaccel {

inline DType sum_type_of(DType x) {
  return x == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

class Checker : public OperandChecker {
 public:
  using OperandChecker::OperandChecker;

  // That of the layer, or float32 beside 16-bit operands.
  Status bias_dtype(const char* name, const TensorView& v, DType layer, const char* of) const {
    if (v.dtype == DType::kFloat32 && layer != DType::kFloat64) return Status();
    return dtype(name, v, layer, of);
  }

  Status adapter(const LoraAdapter& ad, const TensorView& x, const TensorView& w) const {
    if (ad.a.ndim != 2 || ad.a.cols() != x.cols()) {
      return fail(StatusCode::kShapeMismatch, "lora_A has shape " + shape_text(ad.a) +
                                                  ", expected [R, " + std::to_string(x.cols()) +
                                                  "] to go with x " + shape_text(x));
    }
    LORAACCEL_RETURN_IF_ERROR(pointer("lora_A", ad.a));
    if (ad.a.rows() < 1)
      return fail(StatusCode::kShapeMismatch,
                  "lora_A has shape " + shape_text(ad.a) + ", expected a rank of at least 1");
    LORAACCEL_RETURN_IF_ERROR(matrix("lora_B", ad.b, w.rows(), ad.a.rows(), "N, R"));
    LORAACCEL_RETURN_IF_ERROR(dtype("lora_B", ad.b, ad.a.dtype, "lora_A"));
    if ((ad.a.dtype == DType::kFloat64) != (x.dtype == DType::kFloat64)) {
      return fail(StatusCode::kUnsupportedDtype,
                  std::string("lora_A is ") + dtype_name(ad.a.dtype) + " and x " +
                      dtype_name(x.dtype) + ", expected both float64 or neither");
    }
    if (!std::isfinite(ad.scale)) {
      return fail(StatusCode::kInvalidArgument,
                  "scaling is " + std::to_string(ad.scale) + ", expected a finite number");
    }
    if (ad.factors.defined()) {
      LORAACCEL_RETURN_IF_ERROR(matrix("rank_factors", ad.factors, x.rows(), ad.a.rows(), "M, R"));
      LORAACCEL_RETURN_IF_ERROR(
          dtype("rank_factors", ad.factors, sum_type_of(x.dtype), "the type of the sums"));
    }
    LORAACCEL_RETURN_IF_ERROR(probability("input_dropout", ad.dropout.p));
    LORAACCEL_RETURN_IF_ERROR(probability("hidden_dropout", ad.hidden.p));
    return probability("rank_dropout", ad.rank.p);
  }

  Status probability(const char* name, double p) const {
    if (p >= 0 && p <= 1) return Status();
    return fail(StatusCode::kInvalidArgument, std::string(name) + " is " + std::to_string(p) +
                                                  ", expected a probability from 0 to 1");
  }

  // `adapters`: the least number that a layer has.
  Status samples(const LoraSamples& s, const TensorView& x, size_t adapters, bool dropout) const {
    if (s.rows < 1 || x.rows() % s.rows != 0) {
      return fail(StatusCode::kInvalidArgument, "samples of " + std::to_string(s.rows) +
                                                    " rows, expected a divisor of the rows of x " +
                                                    shape_text(x));
    }
    if (s.adapter == nullptr) return Status();
    if (dropout)
      return fail(StatusCode::kInvalidArgument,
                  "an adapter for each sample and input_dropout, expected one of them");
    for (int64_t i = 0; i < x.rows() / s.rows; ++i) {
      if (s.adapter[i] < -1 || s.adapter[i] >= static_cast<int64_t>(adapters)) {
        return fail(StatusCode::kInvalidArgument,
                    "sample " + std::to_string(i) + " has adapter " + std::to_string(s.adapter[i]) +
                        ", expected -1 (none) to " +
                        std::to_string(static_cast<int64_t>(adapters) - 1));
      }
    }
    return Status();
  }

  Status input(const TensorView& x) const {
    if (x.ndim != 2)
      return fail(StatusCode::kShapeMismatch, "x has shape " + shape_text(x) + ", expected [M, K]");
    return pointer("x", x);
  }

  Status layer(const TensorView& x, const TensorView& w, std::span<const LoraAdapter> adapters,
               const void* packed_w, WeightUse use) const {
    if (w.ndim != 2 || w.cols() != x.cols()) {
      return fail(StatusCode::kShapeMismatch, "weight has shape " + shape_text(w) +
                                                  ", expected [N, " + std::to_string(x.cols()) +
                                                  "] to go with x " + shape_text(x));
    }
    LORAACCEL_RETURN_IF_ERROR(pointer("weight", w));
    LORAACCEL_RETURN_IF_ERROR(dtype("weight", w, x.dtype, "x"));
    if (packed_w != nullptr) {
      if (const char* why = PackedWeight::mismatch(packed_w, w, use))
        return fail(StatusCode::kInvalidArgument, std::string("packed_w ") + why);
    }
    for (const LoraAdapter& ad : adapters) LORAACCEL_RETURN_IF_ERROR(adapter(ad, x, w));
    return Status();
  }

  Status adapter_gradients(std::span<const LoraAdapter> adapters, std::span<const TensorView> da,
                           std::span<const TensorView> db, bool* needs_hidden) const {
    if (da.size() != adapters.size() || db.size() != adapters.size()) {
      return fail(StatusCode::kInvalidArgument, std::to_string(da.size()) + " grad_A and " +
                                                    std::to_string(db.size()) +
                                                    " grad_B, expected one of each for " +
                                                    std::to_string(adapters.size()) + " adapters");
    }
    for (size_t i = 0; i < adapters.size(); ++i) {
      const LoraAdapter& ad = adapters[i];
      if (da[i].defined()) {
        LORAACCEL_RETURN_IF_ERROR(matrix("grad_A", da[i], ad.a.rows(), ad.a.cols(), "R, K"));
        LORAACCEL_RETURN_IF_ERROR(dtype("grad_A", da[i], ad.a.dtype, "lora_A"));
      }
      if (db[i].defined()) {
        *needs_hidden = true;
        LORAACCEL_RETURN_IF_ERROR(matrix("grad_B", db[i], ad.b.rows(), ad.b.cols(), "N, R"));
        LORAACCEL_RETURN_IF_ERROR(dtype("grad_B", db[i], ad.b.dtype, "lora_B"));
      }
    }
    return Status();
  }

  // `rank`: the sum of all ranks.
  Status hidden(const TensorView& h, const TensorView& x, int64_t rank) const {
    LORAACCEL_RETURN_IF_ERROR(matrix("hidden", h, x.rows(), rank, "M, sum of R"));
    LORAACCEL_RETURN_IF_ERROR(dtype("hidden", h, sum_type_of(x.dtype), "the type of the sums"));
    if (h.numel() != 0 &&
        ((rank > 1 && h.stride[1] != 1) || (h.rows() > 1 && h.stride[0] != rank))) {
      return fail(StatusCode::kInvalidArgument, "hidden is not dense");
    }
    return Status();
  }

  Status apart(const char* name, const TensorView& out, std::initializer_list<TensorView> inputs,
               std::span<const LoraAdapter> adapters) const {
    LORAACCEL_RETURN_IF_ERROR(OperandChecker::apart(name, out, inputs));
    for (const LoraAdapter& ad : adapters)
      LORAACCEL_RETURN_IF_ERROR(OperandChecker::apart(name, out, {ad.a, ad.b}));
    return Status();
  }
};

}  // namespace loraaccel
