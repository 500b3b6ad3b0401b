// The checks of operands that all operators share: one error that names what was found and what was expected.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <new>
#include <string>
#include <utility>

#include "loraaccel/exec_context.h"
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

// Collects what the messages need: the operator, and the prefix of an adapter's operands.
class OperandChecker {
 public:
  OperandChecker(const char* op, DeviceType device) : op_(op), device_(device) {}

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

  Status context(const ExecContext& ctx) const {
    if (ctx.num_threads >= 1 && ctx.parallel != nullptr && ctx.allocate != nullptr &&
        ctx.deallocate != nullptr) {
      return Status();
    }
    return fail(StatusCode::kInvalidArgument,
                "the context lacks threads, parallel, allocate or deallocate, expected all of them "
                "as in default_context()");
  }

  // The memory between the lowest and the highest element counts as the operand's, gaps included.
  Status apart(const char* name, const TensorView& out,
               std::initializer_list<TensorView> inputs) const {
    for (const TensorView& in : inputs) {
      if (share_memory(out, in)) {
        return fail(StatusCode::kInvalidArgument,
                    std::string(name) + " overlaps an input, expected memory of its own");
      }
    }
    return Status();
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
