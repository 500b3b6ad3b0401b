// Activations of the MLP block.
#pragma once

#include <stdint.h>

namespace loraaccel {

enum class Activation : int8_t {
  kSilu,      // v sigmoid(v)
  kGelu,      // v Phi(v), Phi the normal distribution function
  kGeluTanh,  // v sigmoid(2 c (v + 0.044715 v^3)), c = sqrt(2 / pi): the "tanh approximation"
  kRelu,      // max(v, 0)
};

}  // namespace loraaccel
