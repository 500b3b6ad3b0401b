#include "adapters/recognise.h"

#include <algorithm>
#include <array>
#include <tuple>

namespace loraaccel {
namespace {

// The keys of a file are taken to be of this table, this format, and this component where files have only one.
struct Guess {
  const NameTable* table = nullptr;
  const AdapterFormat* format = nullptr;
  int component = -1;
  int64_t known = 0;    // keys that then have a place
  int64_t usual = 0;    // of them, with an ending of the format's own
  int64_t fitting = 0;  // of them, with the size that the table says
};

bool find_layer(const NameComponent& component, const Spelling& spelling, std::string_view stem,
                int* layer, std::string* path) {
  if (!stem.starts_with(spelling.prefix)) return false;
  const NameColumn& names = component.columns[static_cast<size_t>(spelling.column)];
  *path = stem.substr(spelling.prefix.size());
  const auto& map = spelling.flat ? names.flat : names.dotted;
  const auto found = map.find(*path);
  if (found == map.end()) return false;
  *layer = found->second;
  return true;
}

// Is the tensor as wide as the layer?
bool fits(const NameTable& table, const KeyPlace& place, const AdapterTensor& tensor) {
  const NameColumn& names = table.components[static_cast<size_t>(place.component)]
                                .columns[static_cast<size_t>(place.column)];
  const Spelled& layer = names.layers[static_cast<size_t>(place.layer)];
  const NativeModule& module = table.modules[static_cast<size_t>(layer.pieces[0].module)];
  const bool conv = module.kind == LayerKind::kConv1 || module.kind == LayerKind::kConv2 ||
                    module.kind == LayerKind::kConv3;
  switch (place.role) {
    case AdapterRole::kDown:
      return tensor.shape.size() == (conv ? 4 : 2) && tensor.shape[1] == module.in;
    case AdapterRole::kUp:
      return tensor.shape.size() == (conv ? 4 : 2) && tensor.shape[0] == layer.rows;
    case AdapterRole::kHada1A:
    case AdapterRole::kDiff:
      return !tensor.shape.empty() && tensor.shape[0] == layer.rows;
    case AdapterRole::kHada1B:
      return tensor.shape.size() == 2 && tensor.shape[1] == module.in;
    default:
      return false;
  }
}

// A key taken apart, in one of the ways that its end allows.
struct Ended {
  const KeyEnding* ending;
  std::string_view stem;
};

// All of them, for each tensor: found once, and not again for each guess. Views into the source's keys.
std::vector<std::vector<Ended>> take_apart(const AdapterSource& source) {
  std::vector<std::vector<Ended>> all(source.tensors.size());
  for (size_t i = 0; i < all.size(); ++i) {
    for (const KeyEnding& ending : adapter_format_table().by_length) {
      std::string_view stem;
      if (stem_of(source.tensors[i].key, ending, &stem)) all[i].push_back({&ending, stem});
    }
  }
  return all;
}

bool place_key(const Guess& guess, const std::vector<Ended>& ways, KeyPlace* place, bool* usual) {
  const NameTable& table = *guess.table;
  for (const auto& [key_ending, stem] : ways) {
    const KeyEnding& ending = *key_ending;
    *usual = ending.style == guess.format->style;
    // ".weight" and ".bias" are endings only where the format has them
    if (ending.bare() && !*usual) continue;
    for (size_t c = 0; c < table.components.size(); ++c) {
      if (guess.component >= 0 && static_cast<size_t>(guess.component) != c) continue;
      for (const Spelling& spelling : table.components[c].spellings) {
        if (spelling.format != guess.format->name) continue;
        if (!find_layer(table.components[c], spelling, stem, &place->layer, &place->path)) continue;
        place->role = ending.role;
        place->peft = ending.style == "peft";
        place->component = static_cast<int>(c);
        place->column = spelling.column;
        place->name = table.components[c].name;
        return true;
      }
    }
  }
  return false;
}

void weigh(const AdapterSource& source, const std::vector<std::vector<Ended>>& ways, Guess* guess) {
  for (size_t i = 0; i < ways.size(); ++i) {
    KeyPlace place;
    bool usual = false;
    if (!place_key(*guess, ways[i], &place, &usual)) continue;
    ++guess->known;
    if (usual) ++guess->usual;
    if (fits(*guess->table, place, source.tensors[i])) ++guess->fitting;
  }
}

auto weight_of(const Guess& g) { return std::tuple(g.known, g.usual, g.fitting); }

// Files of this format have one component, and their keys do not say which.
bool one_component(const AdapterFormat& format) { return format.name == "peft"; }

// Fewer known keys than this, and the file is of a model without a table. PEFT's keys spell the layer in full, and any
// model may have a "conv_in": there nearly all must be known.
int64_t least_known(const AdapterFormat& format, int64_t total) {
  return one_component(format) ? total - total / 10 : (total + 1) / 2;
}

std::vector<Guess> guesses(const AdapterSource& source, const ReadAdapterOptions& options,
                           const std::vector<std::vector<Ended>>& ways) {
  std::vector<Guess> all;
  const std::string& wanted = options.component.empty() ? source.component : options.component;
  for (const NameTable& table : name_tables()) {
    if (!options.base.empty() && table.base != options.base) continue;
    for (const AdapterFormat& format : adapter_format_table().formats) {
      if (!one_component(format)) {
        all.push_back({&table, &format});
        continue;
      }
      for (size_t c = 0; c < table.components.size(); ++c) {
        if (wanted.empty() || table.components[c].name == wanted)
          all.push_back({&table, &format, static_cast<int>(c)});
      }
    }
  }
  for (Guess& guess : all) weigh(source, ways, &guess);
  return all;
}

struct Prefix {
  const char* text;
  const char* format;
  const char* component;  // "": the model's only one
};
// Of dotted keys without a table. The last takes any key.
constexpr std::array<Prefix, 8> kPrefixes = {{{"base_model.model.", "peft", ""},
                                              {"transformer.", "diffusers", "transformer"},
                                              {"unet.", "diffusers", "unet"},
                                              {"text_encoder_2.", "diffusers", "text_encoder_2"},
                                              {"text_encoder_3.", "diffusers", "text_encoder_3"},
                                              {"text_encoder.", "diffusers", "text_encoder"},
                                              {"diffusion_model.", "comfy", "transformer"},
                                              {"", "bfl", "model"}}};
constexpr std::array kFlatPrefixes = {"lora_unet_", "lora_transformer_", "lora_te1_",
                                      "lora_te2_",  "lora_te3_",         "lora_te_",
                                      "lycoris_",   "lora_prior_",       ""};

bool dotted_style(const std::string& style) {
  return style == "peft" || style == "comfy" || style == "old";
}

// "x.lora_A.a.b" is no layer's path: it is left of a key with more after ".lora_A" than an adapter's name.
bool inside_adapter(std::string_view path) {
  for (const KeyEnding& ending : adapter_format_table().endings) {
    const size_t star = ending.text.find('*');
    if (star != std::string::npos &&
        path.find(std::string_view(ending.text).substr(0, star)) != std::string_view::npos)
      return true;
  }
  return false;
}

// Keys that spell their layer's path in full need no table.
void place_dotted(const AdapterSource& source, const ReadAdapterOptions& options,
                  KeyPlaces* places) {
  const std::string& component = options.component.empty() ? source.component : options.component;
  for (size_t i = 0; i < source.tensors.size(); ++i) {
    KeyPlace& place = places->places[i];
    if (!place.path.empty()) continue;
    for (const KeyEnding& ending : adapter_format_table().by_length) {
      std::string_view stem;
      if (!dotted_style(ending.style) || !stem_of(source.tensors[i].key, ending, &stem)) continue;
      for (const Prefix& prefix : kPrefixes) {
        if (!stem.starts_with(prefix.text) || stem.size() == std::string_view(prefix.text).size())
          continue;
        // Whole weights belong to PEFT's files only: elsewhere anything ends so.
        const bool whole = ending.role == AdapterRole::kWeight || ending.role == AdapterRole::kBias;
        if (whole && (std::string_view(prefix.format) != "peft" || inside_adapter(stem))) break;
        place.role = ending.role;
        place.peft = ending.style == "peft";
        place.path = stem.substr(std::string_view(prefix.text).size());
        place.name = prefix.component;
        if (place.name.empty()) place.name = component.empty() ? "model" : component;
        if (places->format.empty()) places->format = prefix.format;
        break;
      }
      if (!place.path.empty()) break;
    }
  }
}

// Flat keys of a model whose layers the caller lists.
Status place_listed(const AdapterSource& source, const ReadAdapterOptions& options,
                    KeyPlaces* places) {
  std::unordered_map<std::string, std::string> layers;
  for (const std::string& path : options.modules) {
    const auto [other, added] = layers.emplace(flat_name(path), path);
    if (!added && other->second != path)
      return Status(StatusCode::kInvalidArgument,
                    source.name + ": the layers " + other->second + " and " + path + " both are " +
                        other->first + " in kohya's spelling, expected names that differ");
  }
  const std::string component = options.component.empty() ? "model" : options.component;
  for (size_t i = 0; i < source.tensors.size(); ++i) {
    KeyPlace& place = places->places[i];
    if (!place.path.empty()) continue;
    for (const KeyEnding& ending : adapter_format_table().by_length) {
      std::string_view stem;
      if (!stem_of(source.tensors[i].key, ending, &stem)) continue;
      for (const char* prefix : kFlatPrefixes) {
        if (!stem.starts_with(prefix)) continue;
        const auto found = layers.find(std::string(stem.substr(std::string_view(prefix).size())));
        if (found == layers.end()) continue;
        place.role = ending.role;
        place.path = found->second;
        place.name = component;
        if (places->format.empty()) places->format = "kohya";
        break;
      }
      if (!place.path.empty()) break;
    }
  }
  return Status();
}

// What the caller names is there.
Status check_options(const AdapterSource& source, const ReadAdapterOptions& options) {
  if (options.base.empty()) return Status();
  const NameTable* table = find_name_table(options.base);
  std::string names;
  if (table == nullptr) {
    for (const NameTable& other : name_tables()) names += (names.empty() ? "" : ", ") + other.base;
    return Status(StatusCode::kInvalidArgument, source.name +
                                                    ": there is no table for the base model " +
                                                    options.base + ", expected one of " + names);
  }
  bool found = options.component.empty();
  for (const auto& component : table->components) {
    found = found || component.name == options.component;
    names += (names.empty() ? "" : ", ") + component.name;
  }
  if (found) return Status();
  return Status(StatusCode::kInvalidArgument, source.name + ": " + options.base +
                                                  " has no component " + options.component +
                                                  ", expected one of " + names);
}

}  // namespace

Status recognise_keys(const AdapterSource& source, const ReadAdapterOptions& options,
                      KeyPlaces* places) {
  *places = KeyPlaces();
  places->places.resize(source.tensors.size());
  LORAACCEL_RETURN_IF_ERROR(check_options(source, options));
  if (!options.modules.empty()) {
    LORAACCEL_RETURN_IF_ERROR(place_listed(source, options, places));
    place_dotted(source, options, places);
    return Status();
  }
  const std::vector<std::vector<Ended>> ways = take_apart(source);
  const std::vector<Guess> all = guesses(source, options, ways);
  const Guess* best = nullptr;
  for (const Guess& guess : all) {
    if (guess.known > 0 && (best == nullptr || weight_of(guess) > weight_of(*best))) best = &guess;
  }
  const auto total = static_cast<int64_t>(source.tensors.size());
  if (best == nullptr ||
      (options.base.empty() && best->known < least_known(*best->format, total))) {
    // (Of a model that the caller names, keys that its table lacks are unknown.)
    if (options.base.empty()) place_dotted(source, options, places);
    return Status();
  }
  places->table = best->table;
  places->format = best->format->name;
  for (const Guess& guess : all) {
    if (guess.table != best->table && guess.format == best->format &&
        weight_of(guess) == weight_of(*best) &&
        (places->also_fits.empty() || places->also_fits.back() != guess.table->base)) {
      places->also_fits.push_back(guess.table->base);
    }
  }
  for (size_t i = 0; i < source.tensors.size(); ++i) {
    bool usual = false;
    if (!place_key(*best, ways[i], &places->places[i], &usual)) places->places[i] = KeyPlace();
  }
  return Status();
}

std::vector<std::string> adapter_bases() {
  std::vector<std::string> names;
  for (const NameTable& table : name_tables()) names.push_back(table.base);
  return names;
}

}  // namespace loraaccel
