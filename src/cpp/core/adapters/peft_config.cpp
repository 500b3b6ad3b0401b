#include "adapters/peft_config.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "adapters/pattern.h"

namespace loraaccel {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxConfigBytes = size_t{64} << 20;
constexpr int64_t kMaxRank = int64_t{1} << 30;

Status malformed(const std::string& what, const std::string& text) {
  return Status(StatusCode::kMalformedFile, what + ": " + text);
}

Status parse_object(const std::string& what, const std::string& text, Json* object) {
  if (text.size() > kMaxConfigBytes) return malformed(what, "a configuration of over 64 MiB");
  *object = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (object->is_discarded() || !object->is_object())
    return malformed(what, "expected a JSON object with the adapter's configuration");
  return Status();
}

Status number(const std::string& what, const std::string& key, const Json& value, double* out) {
  if (!value.is_number() || !std::isfinite(value.get<double>()))
    return malformed(what,
                     key + " is " +
                         value.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 100) +
                         ", expected a number");
  *out = value.get<double>();
  return Status();
}

Status rank_of(const std::string& what, const std::string& key, const Json& value, int64_t* out) {
  double rank = 0;
  LORAACCEL_RETURN_IF_ERROR(number(what, key, value, &rank));
  if (rank < 1 || rank > static_cast<double>(kMaxRank) || rank != std::floor(rank))
    return malformed(what, key + " is " + value.dump() + ", expected a whole number from 1 on");
  *out = static_cast<int64_t>(rank);
  return Status();
}

Status one_key(const std::string& what, const std::string& key, const Json& value,
               PeftConfig* config) {
  if (value.is_null()) return Status();
  if (key == "peft_type" && value.is_string()) {
    config->type = value.get<std::string>();
  } else if (key == "r") {
    int64_t rank = 0;
    LORAACCEL_RETURN_IF_ERROR(rank_of(what, key, value, &rank));
    config->rank = rank;
  } else if (key == "lora_alpha" || key == "alpha") {
    double alpha = 0;
    LORAACCEL_RETURN_IF_ERROR(number(what, key, value, &alpha));
    config->alpha = alpha;
  } else if (key == "use_rslora" || key == "fan_in_fan_out") {
    if (!value.is_boolean())
      return malformed(what, key + " is " + value.dump() + ", expected true or false");
    (key == "use_rslora" ? config->rank_stabilised : config->fan_in_fan_out) = value.get<bool>();
  } else if (key == "alpha_pattern") {
    if (!value.is_object()) return malformed(what, "alpha_pattern is no object");
    for (const auto& [pattern, alpha] : value.items()) {
      double a = 0;
      LORAACCEL_RETURN_IF_ERROR(number(what, "alpha_pattern[" + pattern + "]", alpha, &a));
      config->alpha_pattern.emplace_back(pattern, a);
    }
  }
  return Status();
}

// The most common value, the smallest of several.
template <class T, class F>
T most_common(const std::vector<ConfigLayer>& layers, T none, const F& value) {
  std::map<T, int64_t> counts;
  for (const ConfigLayer& layer : layers) ++counts[value(layer)];
  T best = none;
  int64_t most = 0;
  for (const auto& [v, count] : counts) {
    if (count > most) {
      most = count;
      best = v;
    }
  }
  return best;
}

Json alpha_json(double alpha) {
  return alpha == std::floor(alpha) && std::abs(alpha) < 1e15 ? Json(static_cast<int64_t>(alpha))
                                                              : Json(alpha);
}

// A layer's path as a key of a pattern, which PEFT takes as a regular expression: in our paths only "." is special, and
// it matches itself.
nlohmann::json config_json(const ConfigToWrite& config) {
  nlohmann::json json;
  if (!config.original.empty()) {
    const nlohmann::json original = nlohmann::json::parse(config.original, nullptr, false);
    if (original.is_object()) json = original;
  }
  const bool lora = config.type == "LORA";
  const auto rank =
      most_common<int64_t>(config.layers, 8, [](const ConfigLayer& l) { return l.rank; });
  const auto alpha = most_common<double>(config.layers, static_cast<double>(rank),
                                         [](const ConfigLayer& l) { return l.alpha; });
  nlohmann::json ranks = nlohmann::json::object();
  nlohmann::json alphas = nlohmann::json::object();
  std::vector<std::string> targets;
  for (const ConfigLayer& layer : config.layers) {
    targets.push_back(layer.path);
    if (layer.rank != rank) ranks[layer.path] = layer.rank;
    if (layer.alpha != alpha) alphas[layer.path] = nlohmann::json(alpha_json(layer.alpha));
  }
  std::sort(targets.begin(), targets.end());
  json["peft_type"] = config.type;
  json["r"] = rank;
  json[lora ? "lora_alpha" : "alpha"] = nlohmann::json(alpha_json(alpha));
  json["rank_pattern"] = ranks;
  json["alpha_pattern"] = alphas;
  json["target_modules"] = targets;
  if (!config.modules_to_save.empty()) json["modules_to_save"] = config.modules_to_save;
  json["inference_mode"] = true;
  if (lora) {
    json["bias"] = "none";
    json["lora_dropout"] = 0.0;
    // alpha already says how strong the layer is
    json["use_rslora"] = false;
    if (config.dora || json.contains("use_dora")) json["use_dora"] = config.dora;
    if (config.bias || json.contains("lora_bias")) json["lora_bias"] = config.bias;
    if (!json.contains("fan_in_fan_out")) json["fan_in_fan_out"] = false;
  }
  if (config.type == "LOKR") json["decompose_both"] = config.decompose_both;
  if (!json.contains("task_type")) json["task_type"] = nullptr;
  if (!config.base_model.empty()) json["base_model_name_or_path"] = config.base_model;
  if (!json.contains("base_model_name_or_path")) json["base_model_name_or_path"] = nullptr;
  return json;
}

std::string text_of(const nlohmann::json& json) {
  return json.dump(2, ' ', true, nlohmann::json::error_handler_t::replace);
}

}  // namespace

Status parse_peft_config(const std::string& what, const std::string& text, PeftConfig* config) {
  Json json;
  LORAACCEL_RETURN_IF_ERROR(parse_object(what, text, &json));
  for (const auto& [key, value] : json.items()) {
    LORAACCEL_RETURN_IF_ERROR(one_key(what, key, value, config));
  }
  return Status();
}

Status parse_diffusers_config(const std::string& what, const std::string& text,
                              std::vector<std::pair<std::string, PeftConfig>>* configs) {
  Json json;
  LORAACCEL_RETURN_IF_ERROR(parse_object(what, text, &json));
  for (const auto& [key, value] : json.items()) {
    const size_t dot = key.find('.');
    if (dot == std::string::npos) continue;
    const std::string component = key.substr(0, dot);
    auto found = std::find_if(configs->begin(), configs->end(),
                              [&](const auto& c) { return c.first == component; });
    if (found == configs->end()) found = configs->insert(configs->end(), {component, PeftConfig()});
    LORAACCEL_RETURN_IF_ERROR(one_key(what, key.substr(dot + 1), value, &found->second));
  }
  return Status();
}

Status config_scale(const PeftConfig& config, const std::string& path, ScaleSource* source) {
  source->config_alpha = config.alpha;
  source->rank_stabilised = config.rank_stabilised;
  source->config_rank = config.rank.value_or(0);
  for (const auto& [pattern, alpha] : config.alpha_pattern) {
    bool matches = false;
    LORAACCEL_RETURN_IF_ERROR(pattern_matches(pattern, path, &matches));
    if (!matches) continue;
    source->config_alpha = alpha;
    source->pattern = pattern;
    break;
  }
  return Status();
}

std::string peft_config_text(const ConfigToWrite& config) { return text_of(config_json(config)); }

std::string diffusers_config_text(
    const std::vector<std::pair<std::string, ConfigToWrite>>& components) {
  nlohmann::json all = nlohmann::json::object();
  for (const auto& [component, config] : components) {
    const nlohmann::json json = config_json(config);
    const std::string prefix = component + ".";
    for (const auto& [key, value] : json.items()) {
      std::string name = prefix;
      all[name.append(key)] = value;
    }
  }
  return text_of(all);
}

}  // namespace loraaccel
