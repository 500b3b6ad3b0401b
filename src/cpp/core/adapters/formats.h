// Formats of adapter files and the endings of their keys, from src/data/names/formats.names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "loraaccel/adapter.h"

namespace loraaccel {

enum class AlphaPlace : int8_t { kTensor, kConfig, kNone };

struct AdapterFormat {
  std::string name;
  std::string style;
  AlphaPlace alpha = AlphaPlace::kNone;
};

struct KeyEnding {
  AdapterRole role = AdapterRole::kDown;
  std::string style;
  std::string text;  // may have one component "*"

  // Any model's own tensors end so.
  bool bare() const { return text == ".weight" || text == ".bias" || text == ".base_layer.weight"; }
};

struct Formats {
  std::vector<AdapterFormat> formats;
  std::vector<KeyEnding> endings;   // as in the file
  std::vector<KeyEnding> by_length;  // the longest first; those with "*" after those without, bare ones last

  const AdapterFormat* find(std::string_view name) const;
  // The ending that files of this style get; null where it has no place for the role.
  const KeyEnding* written(std::string_view style, AdapterRole role) const;
};

Status read_formats(std::string_view text, Formats* formats);
const Formats& adapter_format_table();

// The part of the key before the ending; false where the key does not end so.
bool stem_of(std::string_view key, const KeyEnding& ending, std::string_view* stem);

}  // namespace loraaccel
