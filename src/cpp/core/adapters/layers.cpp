#include "adapters/layers.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>

#include "adapters/rows.h"

namespace loraaccel {
namespace {

constexpr size_t kNamesInMessage = 6;

// Prefixes of kohya's flat names of models without a table.
struct FlatPrefix {
  const char* component;
  const char* prefix;
};
constexpr std::array<FlatPrefix, 6> kFlatPrefixes = {{{"text_encoder", "lora_te_"},
                                                      {"text_encoder_2", "lora_te2_"},
                                                      {"text_encoder_3", "lora_te3_"},
                                                      {"transformer", "lora_unet_"},
                                                      {"unet", "lora_unet_"},
                                                      {"model", "lora_unet_"}}};

Status unnamed(const std::string& format, const std::vector<std::string>& layers) {
  std::string text;
  for (size_t i = 0; i < layers.size() && i < kNamesInMessage; ++i)
    text += (i == 0 ? "" : ", ") + layers[i];
  if (layers.size() > kNamesInMessage)
    text += " and " + std::to_string(layers.size() - kNamesInMessage) + " more";
  return Status(StatusCode::kInvalidArgument, "the format " + format + " has no name for " +
                                                  std::to_string(layers.size()) +
                                                  " layers: " + text);
}

Status without_table(const Adapter& adapter, const std::string& format,
                     std::vector<SpelledEntry>* spelled) {
  std::vector<std::string> missing;
  std::map<std::string, std::string> flat_paths;
  for (const AdapterEntry& entry : adapter.entries) {
    SpelledEntry s;
    s.entry = entry;
    s.path = entry.path;
    if (format == "peft") {
      s.prefix = "base_model.model.";
    } else if (format == "diffusers" || format == "ai-toolkit") {
      s.prefix = entry.component + ".";
    } else if (format == "comfy") {
      s.prefix = "diffusion_model.";
    } else if (format == "bfl") {
      s.prefix = "";
    } else if (format == "kohya" || format == "lycoris") {
      s.flat = true;
      s.prefix = "lycoris_";
      for (const FlatPrefix& p : kFlatPrefixes) {
        if (format == "kohya" && entry.component == p.component) s.prefix = p.prefix;
      }
      const auto [other, added] = flat_paths.emplace(s.stem(), entry.path);
      if (!added && other->second != entry.path)
        return Status(StatusCode::kInvalidArgument,
                      "the layers " + other->second + " and " + entry.path + " both are " +
                          s.stem() + " in kohya's spelling, expected names that differ");
    } else {
      missing.push_back(entry.path);
    }
    spelled->push_back(std::move(s));
  }
  return missing.empty() ? Status() : unnamed(format, missing);
}

// The entries of one native layer, and the layers that a column makes of it.
class LayerSpeller {
 public:
  LayerSpeller(const NameTable& table, const NameColumn& names, const Spelling& spelling,
               int64_t* inexact)
      : table_(table), names_(names), spelling_(spelling), inexact_(inexact) {}

  bool named(int module) const { return !names_.of_module[static_cast<size_t>(module)].empty(); }

  Status spell(const std::vector<const AdapterEntry*>& entries, int module,
               std::vector<SpelledEntry>* spelled) {
    const std::vector<int>& layers = names_.of_module[static_cast<size_t>(module)];
    const int64_t native_out = table_.modules[static_cast<size_t>(module)].out;
    if (layers.size() == 1 && entries.size() == 1 && entries[0]->rows.empty() &&
        names_.layers[static_cast<size_t>(layers[0])].pieces.size() == 1 &&
        names_.layers[static_cast<size_t>(layers[0])].rows == native_out) {
      add(*entries[0], layers[0], module, spelled);
      return Status();
    }
    if (entries[0]->native_rows == 0)
      return Status(StatusCode::kInvalidArgument, entries[0]->path + ": a " +
                                                      adapter_kind_name(entries[0]->kind) +
                                                      " adapter cannot be divided by rows");
    // Shares of every layer, in rows of the tensors.
    std::vector<std::vector<RowShare>> shares(layers.size());
    std::vector<int64_t> rows(layers.size());
    for (size_t i = 0; i < layers.size(); ++i)
      LORAACCEL_RETURN_IF_ERROR(shares_of(entries, layers[i], native_out, &shares[i], &rows[i]));
    LORAACCEL_RETURN_IF_ERROR(check_covered(entries, shares));
    std::map<const AdapterEntry*, std::vector<RowRun>> blocks = find_blocks(entries, shares);
    for (size_t i = 0; i < layers.size(); ++i) {
      if (shares[i].empty()) continue;
      AdapterEntry made;
      LORAACCEL_RETURN_IF_ERROR(one_layer(shares[i], rows[i], &blocks, &made));
      add(made, layers[i], module, spelled);
    }
    return Status();
  }

 private:
  void add(const AdapterEntry& entry, int layer, int module,
           std::vector<SpelledEntry>* spelled) const {
    SpelledEntry s;
    s.entry = entry;
    s.entry.rows.clear();
    s.path = names_.layers[static_cast<size_t>(layer)].path;
    s.prefix = spelling_.prefix;
    s.flat = spelling_.flat;
    s.kind = table_.modules[static_cast<size_t>(module)].kind;
    s.known_kind = true;
    spelled->push_back(std::move(s));
  }

  Status shares_of(const std::vector<const AdapterEntry*>& entries, int layer, int64_t native_out,
                   std::vector<RowShare>* shares, int64_t* rows) const {
    const Spelled& names = names_.layers[static_cast<size_t>(layer)];
    const int64_t actual = entries[0]->native_rows;
    // rows of the table are rows of the tensors times actual / native_out
    const auto size = [&](int64_t n) { return n * actual / native_out; };
    *rows = size(names.rows);
    for (const SpelledPiece& piece : names.pieces) {
      for (const int64_t n : {piece.row, piece.native_row, piece.rows}) {
        if (n * actual % native_out != 0)
          return Status(StatusCode::kInvalidArgument, entries[0]->path + ": its " +
                                                          std::to_string(actual) +
                                                          " rows cannot be divided as its " +
                                                          std::to_string(native_out) + " are");
      }
      for (const AdapterEntry* entry : entries) {
        if (entry->native_rows != actual)
          return Status(StatusCode::kInvalidArgument,
                        entry->path + ": its parts are of layers of " + std::to_string(actual) +
                            " and " + std::to_string(entry->native_rows) +
                            " rows, expected one size");
        std::vector<RowPiece> covered = entry->rows;
        if (covered.empty()) covered.push_back({0, 0, actual});
        for (const RowPiece& own : covered) {
          const int64_t begin = std::max(own.native_row, size(piece.native_row));
          const int64_t end =
              std::min(own.native_row + own.rows, size(piece.native_row + piece.rows));
          if (begin >= end) continue;
          shares->push_back({entry, own.row + begin - own.native_row,
                             size(piece.row) + begin - size(piece.native_row), end - begin});
        }
      }
    }
    std::sort(shares->begin(), shares->end(),
              [](const RowShare& a, const RowShare& b) { return a.row < b.row; });
    return Status();
  }

  // A format may name some rows of a layer only.
  Status check_covered(const std::vector<const AdapterEntry*>& entries,
                       const std::vector<std::vector<RowShare>>& shares) const {
    for (const AdapterEntry* entry : entries) {
      int64_t rows = 0;
      for (const std::vector<RowShare>& layer : shares) {
        for (const RowShare& share : layer) rows += share.entry == entry ? share.rows : 0;
      }
      if (rows != entry->out())
        return Status(StatusCode::kInvalidArgument,
                      entry->path + ": the format " + spelling_.format + " names only " +
                          std::to_string(rows) + " of the " + std::to_string(entry->out()) +
                          " rows that the adapter changes");
    }
    return Status();
  }

  // Entries that are divided, and whose B is block-diagonal.
  static std::map<const AdapterEntry*, std::vector<RowRun>> find_blocks(
      const std::vector<const AdapterEntry*>& entries,
      const std::vector<std::vector<RowShare>>& shares) {
    std::map<const AdapterEntry*, std::vector<RowRun>> blocks;
    for (const AdapterEntry* entry : entries) {
      std::vector<std::vector<RowRun>> parts;
      for (const std::vector<RowShare>& layer : shares) {
        std::vector<RowRun> runs;
        for (const RowShare& share : layer) {
          if (share.entry == entry) runs.push_back({share.entry_row, share.rows});
        }
        if (!runs.empty()) parts.push_back(std::move(runs));
      }
      blocks[entry] = rank_blocks(*entry, parts);
    }
    return blocks;
  }

  Status one_layer(const std::vector<RowShare>& shares, int64_t rows,
                   std::map<const AdapterEntry*, std::vector<RowRun>>* blocks,
                   AdapterEntry* made) const {
    const AdapterEntry* entry = shares[0].entry;
    std::vector<RowRun> runs;
    int64_t covered = 0;
    bool one = true;
    for (const RowShare& share : shares) {
      one = one && share.entry == entry;
      covered += share.rows;
      runs.push_back({share.entry_row, share.rows});
    }
    if (!one || covered != rows) return join_rows(shares, rows, made, inexact_);
    if (runs.size() == 1 && runs[0].row == 0 && runs[0].rows == entry->out()) {
      *made = *entry;
      return Status();
    }
    RowRun ranks;
    std::vector<RowRun>& list = (*blocks)[entry];
    if (!list.empty()) {
      ranks = list.front();
      list.erase(list.begin());
    }
    return take_rows(*entry, runs, ranks, made);
  }

  const NameTable& table_;
  const NameColumn& names_;
  const Spelling& spelling_;
  int64_t* inexact_;
};

const Spelling* spelling_of(const NameComponent& component, const std::string& format) {
  // ai-toolkit's files are diffusers' with another rule for alpha
  const std::string& name = format == "ai-toolkit" ? std::string("diffusers") : format;
  for (const Spelling& s : component.spellings) {
    if (s.format == name) return &s;
  }
  return nullptr;
}

Status ambiguous(const std::string& base, const std::string& other, const std::string& format) {
  return Status(StatusCode::kInvalidArgument,
                "the adapter may be of " + base + " or " + other + ", and " + format +
                    " names their layers differently: say which base it is");
}

// Does a base that fits as well spell the adapter's components otherwise?
Status check_certain(const Adapter& adapter, const NameTable& table, const std::string& format) {
  for (const std::string& other_base : adapter.also_fits) {
    const NameTable* other = find_name_table(other_base);
    std::set<std::string> components;
    for (const AdapterEntry& entry : adapter.entries) components.insert(entry.component);
    for (const std::string& name : components) {
      const int a = table.component(name);
      const int b = other == nullptr ? -1 : other->component(name);
      if (a < 0 || b < 0) continue;
      const Spelling* s = spelling_of(table.components[static_cast<size_t>(a)], format);
      const Spelling* t = spelling_of(other->components[static_cast<size_t>(b)], format);
      if (s != nullptr && t != nullptr && (s->prefix != t->prefix || s->column != t->column))
        return ambiguous(table.base, other_base, format);
    }
  }
  return Status();
}

}  // namespace

Status spell_entries(const Adapter& adapter, const std::string& format,
                     std::vector<SpelledEntry>* spelled, int64_t* inexact) {
  const NameTable* table = adapter.base.empty() ? nullptr : find_name_table(adapter.base);
  if (table == nullptr) return without_table(adapter, format, spelled);
  LORAACCEL_RETURN_IF_ERROR(check_certain(adapter, *table, format));
  // Layers in the order of their first entry.
  std::vector<std::pair<int, std::vector<const AdapterEntry*>>> layers;
  std::map<int, size_t> index;
  std::vector<std::string> missing;
  for (const AdapterEntry& entry : adapter.entries) {
    const int component = table->component(entry.component);
    const int module = component < 0 ? -1 : table->module(component, entry.path);
    if (module < 0) {
      missing.push_back(entry.component + "." + entry.path);
      continue;
    }
    const auto [place, added] = index.try_emplace(module, layers.size());
    if (added) layers.push_back({module, {}});
    layers[place->second].second.push_back(&entry);
  }
  for (const auto& [module, entries] : layers) {
    const NameComponent& component = table->components[static_cast<size_t>(
        table->modules[static_cast<size_t>(module)].component)];
    const Spelling* spelling = spelling_of(component, format);
    if (spelling == nullptr) {
      missing.push_back(entries[0]->component + "." + entries[0]->path);
      continue;
    }
    LayerSpeller speller(*table, component.columns[static_cast<size_t>(spelling->column)],
                         *spelling, inexact);
    if (!speller.named(module)) {
      missing.push_back(entries[0]->component + "." + entries[0]->path);
      continue;
    }
    LORAACCEL_RETURN_IF_ERROR(speller.spell(entries, module, spelled));
  }
  return missing.empty() ? Status() : unnamed(format, missing);
}

}  // namespace loraaccel
