// adapter_config.json, and the like in the metadata of diffusers' files.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "loraaccel/adapter.h"

namespace loraaccel {

struct PeftConfig {
  std::string type;  // "LORA" ...; "" where it does not say
  std::optional<double> alpha;
  std::optional<int64_t> rank;
  bool rank_stabilised = false;
  bool fan_in_fan_out = false;
  std::vector<std::pair<std::string, double>> alpha_pattern;  // in their order
};

// Text of adapter_config.json. kMalformedFile names `what`.
Status parse_peft_config(const std::string& what, const std::string& text, PeftConfig* config);
// Text of lora_adapter_metadata: the same for several components, keys "<component>.<key>".
Status parse_diffusers_config(const std::string& what, const std::string& text,
                              std::vector<std::pair<std::string, PeftConfig>>* configs);

// Fills in alpha, its pattern and the rank of a layer, `path` as PEFT spells it.
Status config_scale(const PeftConfig& config, const std::string& path, ScaleSource* source);

// What a configuration is made of: every layer's path, rank and alpha.
struct ConfigLayer {
  std::string path;
  int64_t rank = 0;
  double alpha = 0;
};
struct ConfigToWrite {
  std::string type;  // "LORA", "LOHA", "LOKR"
  std::vector<ConfigLayer> layers;
  std::vector<std::string> modules_to_save;
  bool dora = false;
  bool bias = false;
  bool decompose_both = false;
  std::string base_model;
  std::string
      original;  // configuration the adapter came with, for the keys that are not derived; or ""
};
// adapter_config.json: keys sorted, indented by 2.
std::string peft_config_text(const ConfigToWrite& config);
// lora_adapter_metadata of several components.
std::string diffusers_config_text(
    const std::vector<std::pair<std::string, ConfigToWrite>>& components);

}  // namespace loraaccel
