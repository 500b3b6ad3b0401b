// Files from entries: keys, alpha, configuration, metadata.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>

#include "adapters/formats.h"
#include "adapters/layers.h"
#include "adapters/numbers.h"
#include "adapters/peft_config.h"
#include "adapters/rows.h"
#include "loraaccel/adapter_convert.h"

namespace loraaccel {
namespace {

using Role = AdapterRole;

bool has_factor(AdapterKind kind) {
  return kind == AdapterKind::kLora || kind == AdapterKind::kLoha || kind == AdapterKind::kLokr ||
         kind == AdapterKind::kEmbedding;
}

const char* peft_type(AdapterKind kind) {
  if (kind == AdapterKind::kLoha) return "LOHA";
  if (kind == AdapterKind::kLokr) return "LOKR";
  if (kind == AdapterKind::kIa3) return "IA3";
  return "LORA";
}

// r of a configuration: of LoKr with whole factors one that makes PEFT build whole factors, too.
int64_t config_rank(const AdapterEntry& entry) {
  if (entry.rank > 0) return entry.rank;
  const AdapterTensor* second = entry.find(Role::kKron2);
  return second == nullptr ? 1 : std::max(second->shape[0], second->shape[1]);
}

// The magnitude and the factors in the shapes that PEFT's modules have.
void peft_shapes(SpelledEntry* s) {
  const bool conv = s->known_kind && (s->kind == LayerKind::kConv1 || s->kind == LayerKind::kConv2 ||
                                      s->kind == LayerKind::kConv3);
  const AdapterTensor* down = s->entry.find(Role::kDown);
  const bool wide = s->known_kind ? conv : down != nullptr && down->shape.size() == 4;
  for (AdapterTensor& t : s->entry.tensors) {
    if (t.role == Role::kDoraScale) {
      t.shape = wide ? std::vector<int64_t>{1, t.numel(), 1, 1} : std::vector<int64_t>{t.numel()};
    } else if (s->known_kind && (t.role == Role::kDown || t.role == Role::kUp)) {
      if (!conv && t.shape.size() == 4 && t.shape[2] == 1 && t.shape[3] == 1) t.shape.resize(2);
      if (conv && t.shape.size() == 2) t.shape.insert(t.shape.end(), {1, 1});
    }
  }
}

// [out, 1] beside matrices, [out, 1, 1, 1] beside convolutions, as LyCORIS has it.
void kohya_shapes(SpelledEntry* s) {
  const AdapterTensor* down = s->entry.find(Role::kDown);
  const size_t dims = down == nullptr ? 2 : down->shape.size();
  for (AdapterTensor& t : s->entry.tensors) {
    if (t.role != Role::kDoraScale || t.shape.size() > 1) continue;
    const int64_t count = t.numel();
    t.shape.assign(dims, 1);
    t.shape[0] = count;
  }
}

// float16's smallest number and largest.
constexpr double kSmallest = 5.9604644775390625e-8;
constexpr double kLargest = 65504;

// The least power of two that keeps all non-zero elements of the tensor from becoming zero as F16; 0 where none does.
int rescue_exponent(const AdapterTensor& t) {
  double least = std::numeric_limits<double>::infinity();
  double most = 0;
  for (int64_t i = 0; i < t.numel(); ++i) {
    double value = 0;
    if (!element_value(t.dtype, t.data, i, &value) || value == 0 || !std::isfinite(value)) continue;
    least = std::min(least, std::abs(value));
    most = std::max(most, std::abs(value));
  }
  int exponent = 0;
  while (std::ldexp(least, exponent) < kSmallest && std::ldexp(most, exponent + 1) <= kLargest) ++exponent;
  return exponent;
}

class FileMaker {
 public:
  FileMaker(const Adapter& adapter, const ConvertOptions& options, const AdapterFormat& format)
      : adapter_(adapter), options_(options), format_(format) {}

  Status run(std::vector<SpelledFile>* files, std::vector<std::string>* notes) {
    std::vector<SpelledEntry> entries;
    LORAACCEL_RETURN_IF_ERROR(spell_entries(adapter_, format_.name, &entries, &inexact_));
    std::set<std::string> components;
    for (const SpelledEntry& s : entries) components.insert(s.entry.component);
    const bool folders = format_.name == "peft" && components.size() > 1;
    std::map<std::string, size_t> index;
    for (SpelledEntry& s : entries) {
      const std::string folder = folders ? s.entry.component : "";
      const auto [place, added] = index.try_emplace(folder, files->size());
      if (added) {
        files->emplace_back();
        files->back().folder = folder;
      }
      LORAACCEL_RETURN_IF_ERROR(add(&s, &(*files)[place->second]));
    }
    if (!placeless_.empty()) return no_place();
    for (SpelledFile& file : *files) LORAACCEL_RETURN_IF_ERROR(finish(&file, notes));
    if (inexact_ > 0)
      notes->push_back(std::to_string(inexact_) + " numbers were rounded where factors were multiplied in");
    return Status();
  }

 private:
  Status add(SpelledEntry* s, SpelledFile* file) {
    const bool peft = format_.style == "peft";
    if (peft && s->entry.find(Role::kDoraScale) != nullptr && !dora_on_output(s->entry))
      return Status(StatusCode::kInvalidArgument, s->entry.path + ": its DoRA is over inputs, and " + format_.name +
                                                      " files know only the one over outputs");
    LORAACCEL_RETURN_IF_ERROR(place_scale(s));
    if (peft) {
      peft_shapes(s);
    } else {
      kohya_shapes(s);
    }
    if (format_.alpha == AlphaPlace::kConfig) LORAACCEL_RETURN_IF_ERROR(configure(*s));
    for (AdapterTensor& t : s->entry.tensors) {
      const KeyEnding* ending = adapter_format_table().written(format_.style, t.role);
      if (ending == nullptr) {
        placeless_[adapter_role_name(t.role)].push_back(s->path);
        continue;
      }
      t.key = s->stem() + ending->text;
      file->tensors.push_back(std::move(t));
    }
    return Status();
  }

  // Leaves the factor where the format has its place for it.
  Status place_scale(SpelledEntry* s) {
    AdapterEntry& entry = s->entry;
    if (!has_factor(entry.kind)) return Status();
    if (options_.rescue && options_.dtype == FileDType::kF16) LORAACCEL_RETURN_IF_ERROR(rescue(&entry));
    const bool whole = entry.rank == 0 && entry.scale.value != 1;
    if (options_.fold_alpha || format_.alpha == AlphaPlace::kNone ||
        (whole && format_.alpha == AlphaPlace::kTensor)) {
      LORAACCEL_RETURN_IF_ERROR(fold_scale(&entry, &inexact_));
    }
    const double rank = entry.rank > 0 ? static_cast<double>(entry.rank) : 1;
    const double alpha = entry.scale.value * rank;
    const AdapterTensor* given = entry.find(Role::kAlpha);
    if (format_.alpha != AlphaPlace::kTensor) {
      std::erase_if(entry.tensors, [](const AdapterTensor& t) { return t.role == Role::kAlpha; });
      return Status();
    }
    double value = 0;
    if (given != nullptr && element_value(given->dtype, given->data, 0, &value) &&
        (value == alpha || entry.rank == 0 || value == 0)) {
      return Status();
    }
    const FileDType like = given != nullptr ? given->dtype : entry.tensors[0].dtype;
    std::erase_if(entry.tensors, [](const AdapterTensor& t) { return t.role == Role::kAlpha; });
    AdapterTensor number;
    LORAACCEL_RETURN_IF_ERROR(make_number(Role::kAlpha, like, alpha, &number));
    entry.tensors.push_back(std::move(number));
    return Status();
  }

  Status rescue(AdapterEntry* entry) {
    int total = 0;
    for (AdapterTensor& t : entry->tensors) {
      if (t.role != Role::kDown && t.role != Role::kUp) continue;
      const int exponent = rescue_exponent(t);
      if (exponent == 0) continue;
      AdapterTensor result;
      LORAACCEL_RETURN_IF_ERROR(scaled(t, std::ldexp(1.0, exponent), &result, &inexact_));
      t = std::move(result);
      total += exponent;
    }
    entry->scale.value = std::ldexp(entry->scale.value, -total);
    return Status();
  }

  Status configure(const SpelledEntry& s) {
    const AdapterEntry& entry = s.entry;
    ConfigToWrite& config = configs_[entry.component];
    if (entry.kind == AdapterKind::kReplace) {
      config.modules_to_save.push_back(s.path);
      return Status();
    }
    if (entry.kind == AdapterKind::kFull || entry.kind == AdapterKind::kNorm) return Status();
    const char* type = peft_type(entry.kind);
    if (!config.type.empty() && config.type != type)
      return Status(StatusCode::kInvalidArgument, s.path + ": the " + std::string(adapter_kind_name(entry.kind)) +
                                                      " adapter cannot share a configuration with one of type " +
                                                      config.type + ", which has one type for all layers");
    config.type = type;
    config.original = adapter_.format == "peft" ? adapter_.config : "";
    const int64_t rank = config_rank(entry);
    config.layers.push_back({s.path, rank, entry.scale.value * static_cast<double>(rank)});
    config.dora = config.dora || entry.find(Role::kDoraScale) != nullptr;
    config.bias = config.bias || entry.find(Role::kUpBias) != nullptr;
    config.decompose_both = config.decompose_both || entry.find(Role::kKron1A) != nullptr;
    return Status();
  }

  Status no_place() const {
    std::string text;
    for (const auto& [role, layers] : placeless_) {
      text += (text.empty() ? "" : "; ") + role + " (" + std::to_string(layers.size()) + ", as of " + layers[0] + ")";
    }
    return Status(StatusCode::kInvalidArgument, "the format " + format_.name + " has no place for " + text);
  }

  Status finish(SpelledFile* file, std::vector<std::string>* notes) {
    const bool peft = format_.style == "peft";
    for (const auto& [key, value] : adapter_.metadata) {
      if (key == "lora_adapter_metadata" || (key == "format" && peft)) continue;
      if (key == "modelspec.hash_sha256") {
        notes->push_back("modelspec.hash_sha256 is left out: it was of the other file");
        continue;
      }
      file->metadata.emplace_back(key, value);
    }
    if (peft) file->metadata.emplace_back("format", "pt");
    if (format_.name == "peft") {
      const std::string component = file->folder.empty() && !configs_.empty() ? configs_.begin()->first : file->folder;
      ConfigToWrite& config = configs_[component];
      if (config.type.empty()) config.type = "LORA";
      file->config = peft_config_text(config);
    } else if (format_.alpha == AlphaPlace::kConfig) {
      const std::vector<std::pair<std::string, ConfigToWrite>> all(configs_.begin(), configs_.end());
      file->metadata.emplace_back("lora_adapter_metadata", diffusers_config_text(all));
      for (const auto& [component, config] : all) {
        const bool plain = std::all_of(config.layers.begin(), config.layers.end(), [](const ConfigLayer& l) {
          return l.alpha == static_cast<double>(l.rank);
        });
        if (plain) continue;
        notes->push_back(
            "factors other than 1 are in the file's metadata, which diffusers reads from 0.35 on; "
            "fold_alpha multiplies them into the weights for older readers");
        break;
      }
    }
    std::set<std::string> keys;
    for (const AdapterTensor& t : file->tensors) {
      if (!keys.insert(t.key).second)
        return Status(StatusCode::kInvalidArgument, "two tensors would be named " + t.key);
    }
    return Status();
  }

  const Adapter& adapter_;
  const ConvertOptions& options_;
  const AdapterFormat& format_;
  std::map<std::string, ConfigToWrite> configs_;
  std::map<std::string, std::vector<std::string>> placeless_;
  int64_t inexact_ = 0;
};

}  // namespace

Status spell_adapter(const Adapter& adapter, const ConvertOptions& options, std::vector<SpelledFile>* files,
                     std::vector<std::string>* notes) {
  files->clear();
  const AdapterFormat* format = adapter_format_table().find(options.format);
  if (format == nullptr || format->style == "old") {
    std::string names;
    for (const std::string& name : adapter_formats()) names += (names.empty() ? "" : ", ") + name;
    return Status(StatusCode::kInvalidArgument, "there is no format " + options.format + ", expected one of " + names);
  }
  if (adapter.entries.empty()) return Status(StatusCode::kInvalidArgument, "the adapter has no entries to write");
  return FileMaker(adapter, options, *format).run(files, notes);
}

}  // namespace loraaccel
