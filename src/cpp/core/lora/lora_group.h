// The operators of linear layers are one: a group of layers over one input.
#pragma once

#include <span>
#include <string>

#include "loraaccel/lora_qkv.h"

namespace loraaccel {

// How errors name what was wrong.
struct LayerNames {
  const char* op;
  bool single = false;                      // one layer that needs no name
  std::span<const char* const> names = {};  // of the layers; none: "projection 0", ...
  const char* all = "";                     // of what belongs to all of them

  std::string layer(size_t j) const;
};

// The checks of a call.
Status check_group_forward(const LayerNames& names, const ExecContext& ctx,
                           const LoraQkvArgs& args);
Status check_group_backward(const LayerNames& names, const ExecContext& ctx,
                            const LoraQkvBackwardArgs& args);

// After its checks: choose a kernel, run it.
Status run_group_forward(const char* op, const ExecContext& ctx, const LoraQkvArgs& args);
Status run_group_backward(const char* op, const ExecContext& ctx, const LoraQkvBackwardArgs& args);

// Both.
Status group_forward(const LayerNames& names, const ExecContext& ctx, const LoraQkvArgs& args);
Status group_backward(const LayerNames& names, const ExecContext& ctx,
                      const LoraQkvBackwardArgs& args);

}  // namespace loraaccel
