// Names of roles, kinds and rules.
#include <array>

#include "loraaccel/adapter.h"

namespace loraaccel {
namespace {

constexpr std::array<const char*, kNumAdapterRoles> kRoles = {
    "lora_down", "lora_up",    "lora_mid",       "alpha",        "dora_scale", "lora_bias",
    "diff",      "diff_b",     "w_norm",         "b_norm",       "hada_w1_a",  "hada_w1_b",
    "hada_w2_a", "hada_w2_b",  "hada_t1",        "hada_t2",      "lokr_w1",    "lokr_w1_a",
    "lokr_w1_b", "lokr_w2",    "lokr_w2_a",      "lokr_w2_b",    "lokr_t2",    "ia3_weight",
    "on_input",  "oft_blocks", "rescale",        "glora_a1",     "glora_a2",   "glora_b1",
    "glora_b2",  "glora_bm",   "embedding_down", "embedding_up", "weight",     "bias"};

constexpr std::array kKinds = {"lora", "loha", "lokr",  "full",      "norm",
                               "ia3",  "oft",  "glora", "embedding", "replace"};
constexpr std::array kRules = {"alpha_tensor", "config_alpha",  "alpha_pattern",
                               "no_alpha",     "whole_factors", "none"};

}  // namespace

const char* adapter_role_name(AdapterRole role) noexcept {
  return kRoles[static_cast<size_t>(role)];
}

bool parse_adapter_role(std::string_view name, AdapterRole* role) noexcept {
  for (size_t i = 0; i < kRoles.size(); ++i) {
    if (name == kRoles[i]) {
      *role = static_cast<AdapterRole>(i);
      return true;
    }
  }
  return false;
}

const char* adapter_kind_name(AdapterKind kind) noexcept {
  return kKinds[static_cast<size_t>(kind)];
}

const char* scale_rule_name(ScaleRule rule) noexcept { return kRules[static_cast<size_t>(rule)]; }

}  // namespace loraaccel
