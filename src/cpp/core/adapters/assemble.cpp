// From keys to entries.
#include <algorithm>
#include <map>
#include <numeric>

#include "adapters/entry.h"
#include "adapters/numbers.h"
#include "adapters/peft_config.h"
#include "adapters/recognise.h"

namespace loraaccel {
namespace {

constexpr size_t kNamesInMessage = 6;

std::string some_of(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kNamesInMessage; ++i)
    text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kNamesInMessage)
    text += " and " + std::to_string(names.size() - kNamesInMessage) + " more";
  return text;
}

// The configurations of a source, by component; "": of all.
struct Configs {
  std::vector<std::pair<std::string, PeftConfig>> all;

  const PeftConfig* of(const std::string& component) const {
    for (const auto& [name, config] : all) {
      if (name.empty() || name == component) return &config;
    }
    return nullptr;
  }
};

Status read_configs(const AdapterSource& source, Configs* configs, std::string* text) {
  if (!source.config.empty()) {
    configs->all.emplace_back();
    *text = source.config;
    return parse_peft_config(source.name + " (adapter_config.json)", source.config,
                             &configs->all.back().second);
  }
  for (const auto& [key, value] : source.metadata) {
    if (key != "lora_adapter_metadata") continue;
    *text = value;
    return parse_diffusers_config(source.name + " (lora_adapter_metadata)", value, &configs->all);
  }
  return Status();
}

class Assembler {
 public:
  Assembler(const AdapterSource& source, const KeyPlaces& places, Adapter* adapter)
      : source_(source), places_(places), adapter_(*adapter) {}

  Status run() {
    LORAACCEL_RETURN_IF_ERROR(read_configs(source_, &configs_, &adapter_.config));
    LORAACCEL_RETURN_IF_ERROR(group());
    for (Group& g : groups_) LORAACCEL_RETURN_IF_ERROR(finish(&g));
    return Status();
  }

 private:
  struct Group {
    AdapterEntry entry;
    const KeyPlace* place = nullptr;
  };

  std::string layer_of(const KeyPlace& place) const { return place.name + "." + place.path; }

  Status group() {
    std::map<std::pair<std::string, std::string>, size_t> index;
    for (size_t i = 0; i < source_.tensors.size(); ++i) {
      const KeyPlace& place = places_.places[i];
      if (place.path.empty()) {
        adapter_.report.unused.push_back(source_.tensors[i].key);
        continue;
      }
      std::string column = std::to_string(place.column) + ":" + std::to_string(place.layer);
      if (places_.table == nullptr) column = place.path;
      const auto [found, added] = index.try_emplace({place.name, column}, groups_.size());
      if (added) {
        groups_.emplace_back();
        groups_.back().place = &place;
      }
      AdapterEntry& entry = groups_[found->second].entry;
      const AdapterTensor* other = entry.find(place.role);
      if (other != nullptr)
        return Status(StatusCode::kMalformedFile,
                      source_.name + ": " + other->key + " and " + source_.tensors[i].key +
                          " are the same tensor of " + layer_of(place) + ", expected one of them");
      // (Integers are somebody's quantised numbers, without the scales that make numbers of them.)
      if (place.role < AdapterRole::kWeight && place.role != AdapterRole::kAlpha &&
          is_integer_dtype(source_.tensors[i].dtype))
        return Status(StatusCode::kMalformedFile, source_.name + ": " + source_.tensors[i].key +
                                                      " is of type " +
                                                      file_dtype_name(source_.tensors[i].dtype) +
                                                      ", expected floating-point numbers");
      entry.tensors.push_back(source_.tensors[i]);
      AdapterTensor& tensor = entry.tensors.back();
      tensor.role = place.role;
      // PEFT's is over outputs always, and [1, out, 1, 1] of a convolution looks like one over inputs.
      if (place.role == AdapterRole::kDoraScale && place.peft) tensor.shape = {tensor.numel()};
    }
    return Status();
  }

  Status finish(Group* g) {
    AdapterEntry& entry = g->entry;
    const KeyPlace& place = *g->place;
    entry.component = place.name;
    entry.path = place.path;
    std::vector<std::string> missing;
    bool orphan = false;
    LORAACCEL_RETURN_IF_ERROR(complete_entry(source_.name, &entry, &missing, &orphan));
    if (orphan) {
      for (const AdapterTensor& t : entry.tensors) adapter_.report.unused.push_back(t.key);
      return Status();
    }
    for (const std::string& role : missing)
      adapter_.report.missing.push_back(layer_of(place) + ": " + role);
    if (!missing.empty()) return Status();
    if (places_.table != nullptr) LORAACCEL_RETURN_IF_ERROR(set_rows(place, &entry));
    ScaleSource scale;
    const PeftConfig* config = configs_.of(place.name);
    if (config != nullptr) {
      const Status status = config_scale(*config, place.path, &scale);
      if (!status.ok())
        return Status(status.code(), source_.name + ": alpha_pattern: " + status.message());
    }
    LORAACCEL_RETURN_IF_ERROR(scale_entry(source_.name, scale, &entry));
    adapter_.entries.push_back(std::move(entry));
    return Status();
  }

  // The native name, and which of its rows these are. Sizes of a table are proportions here: a model of the same build
  // may be narrower.
  Status set_rows(const KeyPlace& place, AdapterEntry* entry) {
    const NameTable& table = *places_.table;
    const NameColumn& names = table.components[static_cast<size_t>(place.component)]
                                  .columns[static_cast<size_t>(place.column)];
    const Spelled& layer = names.layers[static_cast<size_t>(place.layer)];
    const NativeModule& module = table.modules[static_cast<size_t>(layer.pieces[0].module)];
    entry->path = module.path;
    const int64_t out = entry->out();
    const bool whole = layer.pieces.size() == 1 && layer.pieces[0].rows == module.out;
    if (whole) {
      entry->native_rows = out;
      return Status();
    }
    // Rows of this tensor are rows of the table times out / layer.rows.
    int64_t unit = layer.rows;
    for (const SpelledPiece& piece : layer.pieces) {
      for (const int64_t n : {piece.row, piece.native_row, piece.rows}) unit = std::gcd(unit, n);
    }
    unit = std::gcd(unit, module.out);
    const int64_t units = unit == 0 ? 0 : layer.rows / unit;
    if (out == 0 || units == 0 || out % units != 0)
      return Status(StatusCode::kMalformedFile,
                    source_.name + ": " + entry->tensors[0].key + " belongs to a layer of " +
                        std::to_string(out) + " rows, expected a multiple of " +
                        std::to_string(units) + ": " + place.path + " is a part of " + module.path);
    const int64_t size = out / units;
    for (const SpelledPiece& piece : layer.pieces) {
      entry->rows.push_back(
          {piece.row / unit * size, piece.native_row / unit * size, piece.rows / unit * size});
    }
    entry->native_rows = module.out / unit * size;
    return Status();
  }

  const AdapterSource& source_;
  const KeyPlaces& places_;
  Adapter& adapter_;
  Configs configs_;
  std::vector<Group> groups_;
};

bool overlap(const AdapterEntry& a, const AdapterEntry& b) {
  if (a.rows.empty() || b.rows.empty()) return true;
  for (const RowPiece& p : a.rows) {
    for (const RowPiece& q : b.rows) {
      if (p.native_row < q.native_row + q.rows && q.native_row < p.native_row + p.rows) return true;
    }
  }
  return false;
}

// Two spellings of one layer in one file would count twice.
Status check_overlaps(const std::string& where, const Adapter& adapter) {
  std::map<std::pair<std::string, std::string>, std::vector<const AdapterEntry*>> layers;
  for (const AdapterEntry& entry : adapter.entries) {
    std::vector<const AdapterEntry*>& others = layers[{entry.component, entry.path}];
    for (const AdapterEntry* other : others) {
      if (!overlap(*other, entry)) continue;
      return Status(StatusCode::kMalformedFile,
                    where + ": " + other->tensors[0].key + " and " + entry.tensors[0].key +
                        " both belong to " + entry.path + ", expected one spelling of each layer");
    }
    others.push_back(&entry);
  }
  return Status();
}

Status verdict(const std::string& where, const ReadAdapterOptions& options, size_t total,
               const Adapter& adapter) {
  const AdapterReport& report = adapter.report;
  if (!report.missing.empty())
    return Status(StatusCode::kMalformedFile, where + ": halves of pairs are missing in " +
                                                  std::to_string(report.missing.size()) +
                                                  " places: " + some_of(report.missing));
  if (adapter.entries.empty())
    return Status(StatusCode::kMalformedFile,
                  where + ": none of its " + std::to_string(total) +
                      " tensors belongs to an adapter of a known model" +
                      (report.unused.empty() ? "" : ": " + some_of(report.unused)));
  if (!report.unused.empty() && !options.allow_unmatched)
    return Status(
        StatusCode::kMalformedFile,
        where + ": " + std::to_string(report.unused.size()) + " of " + std::to_string(total) +
            " tensors match no layer of " + (adapter.base.empty() ? "the model" : adapter.base) +
            " in " + (adapter.format.empty() ? "any" : adapter.format) +
            " spelling: " + some_of(report.unused) + ". allow_unmatched goes on without them");
  return Status();
}

}  // namespace

Status read_adapter(const std::vector<AdapterSource>& sources, const ReadAdapterOptions& options,
                    Adapter* adapter) {
  *adapter = Adapter();
  if (sources.empty())
    return Status(StatusCode::kInvalidArgument, "read_adapter: there are no tensors to read");
  size_t total = 0;
  ReadAdapterOptions inner = options;
  // Where several folders make one adapter, the one that says most about the base model says it for all.
  std::vector<const AdapterSource*> order;
  order.reserve(sources.size());
  for (const AdapterSource& source : sources) order.push_back(&source);
  std::sort(order.begin(), order.end(), [](const AdapterSource* a, const AdapterSource* b) {
    return a->tensors.size() != b->tensors.size() ? a->tensors.size() > b->tensors.size() : a < b;
  });
  for (const AdapterSource* source : order) {
    KeyPlaces places;
    LORAACCEL_RETURN_IF_ERROR(recognise_keys(*source, inner, &places));
    if (places.table != nullptr) {
      adapter->base = places.table->base;
      if (source == order[0]) adapter->also_fits = places.also_fits;
      inner.base = adapter->base;
    }
    adapter->format = places.format;
    total += source->tensors.size();
    Assembler assembler(*source, places, adapter);
    LORAACCEL_RETURN_IF_ERROR(assembler.run());
    for (const auto& item : source->metadata) {
      if (std::find(adapter->metadata.begin(), adapter->metadata.end(), item) ==
          adapter->metadata.end())
        adapter->metadata.push_back(item);
    }
  }
  const std::string& where = sources[0].name;
  LORAACCEL_RETURN_IF_ERROR(check_overlaps(where, *adapter));
  return verdict(where, options, total, *adapter);
}

}  // namespace loraaccel
