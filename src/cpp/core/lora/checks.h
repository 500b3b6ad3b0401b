// The checks of operands that the operators of linear layers share: one error that names what was found and what was
// expected.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "lora/packed_weight.h"
#include "loraaccel/lora_linear.h"
#include "scratch.h"

namespace loraaccel {

inline std::string shape_text(const TensorView& v) {
  if (v.ndim == 0) return "(undefined)";
  if (v.ndim == 1) return "[" + std::to_string(v.shape[0]) + "]";
  return "[" + std::to_string(v.shape[0]) + ", " + std::to_string(v.shape[1]) + "]";
}

inline const char* device_name(DeviceType device) {
  return device == DeviceType::kCUDA ? "a CUDA device" : "the CPU";
}

inline DType sum_type_of(DType x) {
  return x == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Collects what the messages need: the operator, and the prefix of an adapter's operands.
class Checker {
 public:
  Checker(const char* op, DeviceType device) : op_(op), device_(device) {}

  // What messages name before the operand from now on: one of several layers. Empty: there is only one.
  void set_layer(std::string name) { layer_ = std::move(name); }

  Status fail(StatusCode code, const std::string& text) const;

  Status matrix(const char* name, const TensorView& v, int64_t rows, int64_t cols,
                const char* letters) const {
    if (v.ndim != 2 || v.shape[0] != rows || v.shape[1] != cols) {
      return fail(StatusCode::kShapeMismatch, std::string(name) + " has shape " + shape_text(v) +
                                                  ", expected [" + std::to_string(rows) + ", " +
                                                  std::to_string(cols) + "] (" + letters + ")");
    }
    return pointer(name, v);
  }

  Status vector(const char* name, const TensorView& v, int64_t size, const char* letter) const {
    if (v.ndim != 1 || v.shape[0] != size) {
      return fail(StatusCode::kShapeMismatch, std::string(name) + " has shape " + shape_text(v) +
                                                  ", expected [" + std::to_string(size) + "] (" +
                                                  letter + ")");
    }
    return pointer(name, v);
  }

  Status dtype(const char* name, const TensorView& v, DType wanted, const char* of) const {
    if (v.dtype == wanted) return Status();
    return fail(StatusCode::kUnsupportedDtype, std::string(name) + " is " + dtype_name(v.dtype) +
                                                   ", expected " + dtype_name(wanted) + " as " +
                                                   of);
  }

  // That of the layer, or float32 beside 16-bit operands.
  Status bias_dtype(const char* name, const TensorView& v, DType layer, const char* of) const {
    if (v.dtype == DType::kFloat32 && layer != DType::kFloat64) return Status();
    return dtype(name, v, layer, of);
  }

  Status pointer(const char* name, const TensorView& v) const {
    if (v.numel() != 0 && v.data == nullptr)
      return fail(StatusCode::kInvalidArgument, std::string(name) + " is null");
    if (v.device != device_) {
      return fail(StatusCode::kUnsupportedDevice, std::string(name) + " is on " +
                                                      device_name(v.device) + ", expected " +
                                                      device_name(device_) + " as the context");
    }
    return Status();
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

  Status context(const ExecContext& ctx) const {
    if (ctx.num_threads >= 1 && ctx.parallel != nullptr && ctx.allocate != nullptr &&
        ctx.deallocate != nullptr) {
      return Status();
    }
    return fail(StatusCode::kInvalidArgument,
                "the context lacks threads, parallel, allocate or deallocate, expected all of them "
                "as in default_context()");
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

  // The memory between the lowest and the highest element counts as the operand's, gaps included.
  Status apart(const char* name, const TensorView& out, std::initializer_list<TensorView> inputs,
               std::span<const LoraAdapter> adapters) const {
    bool overlaps = false;
    for (const TensorView& in : inputs) overlaps = overlaps || share_memory(out, in);
    for (const LoraAdapter& ad : adapters) {
      overlaps = overlaps || share_memory(out, ad.a) || share_memory(out, ad.b);
    }
    if (!overlaps) return Status();
    return fail(StatusCode::kInvalidArgument,
                std::string(name) + " overlaps an input, expected memory of its own");
  }

 private:
  static bool share_memory(const TensorView& a, const TensorView& b) {
    if (a.numel() == 0 || b.numel() == 0) return false;
    const auto [a_low, a_high] = extent(a);
    const auto [b_low, b_high] = extent(b);
    return a_low < b_high && b_low < a_high;
  }
  static std::pair<uintptr_t, uintptr_t> extent(const TensorView& v) {
    int64_t low = 0;
    int64_t high = 1;
    for (int d = 0; d < v.ndim; ++d) {
      const int64_t reach = (v.shape[d] - 1) * v.stride[d];
      (reach < 0 ? low : high) += reach;
    }
    const auto size = static_cast<int64_t>(dtype_size_bytes(v.dtype));
    const auto base = reinterpret_cast<uintptr_t>(v.data);
    return {base + static_cast<uintptr_t>(low * size), base + static_cast<uintptr_t>(high * size)};
  }

  const char* op_;
  DeviceType device_;
  std::string layer_;
};

// The standard library may throw bad_alloc; no exception leaves the core.
template <class F>
Status without_exceptions(const char* op, const F& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return out_of_memory(op);
  } catch (...) {
    return Status(StatusCode::kInternal, std::string(op) + ": an exception of an unknown type");
  }
}

}  // namespace loraaccel
