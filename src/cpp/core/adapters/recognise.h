// What a file of keys is: base model, format, and the layer and role of each key.
#pragma once

#include <string>
#include <vector>

#include "adapters/formats.h"
#include "adapters/name_table.h"

namespace loraaccel {

// Where a key belongs.
struct KeyPlace {
  AdapterRole role = AdapterRole::kDown;
  int component = -1;  // of the table
  int column = -1;     // of the table
  int layer = -1;      // of the column
  bool peft = false;   // the key ends as PEFT's do
  std::string path;    // the key without prefix and ending
  std::string name;    // of the component where there is no table
};

struct KeyPlaces {
  const NameTable* table = nullptr;  // null: the paths are the layers' names
  std::string format;
  std::vector<std::string> also_fits;
  std::vector<KeyPlace> places;  // one for each tensor; path empty: unknown
};

// `component`: of a file that has only one; "" where it is not known.
Status recognise_keys(const AdapterSource& source, const ReadAdapterOptions& options,
                      KeyPlaces* places);

}  // namespace loraaccel
