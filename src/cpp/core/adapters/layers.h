// The entries of an adapter as the layers of another column of the table.
#pragma once

#include <string>
#include <vector>

#include "adapters/name_table.h"
#include "loraaccel/adapter.h"

namespace loraaccel {

// An entry under the name that a format has for it.
struct SpelledEntry {
  AdapterEntry entry;  // rows is empty: it is all of the spelled layer
  std::string path;    // dotted, without a prefix
  std::string prefix;
  bool flat = false;
  LayerKind kind = LayerKind::kLinear;
  bool known_kind = false;  // `kind` is from a table

  std::string stem() const { return prefix + (flat ? flat_name(path) : path); }
};

// In the order of the adapter. *inexact counts rounded elements; kInvalidArgument lists layers without a name.
Status spell_entries(const Adapter& adapter, const std::string& format,
                     std::vector<SpelledEntry>* spelled, int64_t* inexact);

}  // namespace loraaccel
