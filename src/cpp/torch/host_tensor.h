// The tensor of ops/, where torch's stable ABI is the host.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

namespace loraaccel::bridge {

using torch::stable::Tensor;

// The dispatcher has given the interpreter's lock back before it calls an operator.
struct Unlocked {
  Unlocked() {}  // (not an aggregate: it is a guard)
};

}  // namespace loraaccel::bridge
