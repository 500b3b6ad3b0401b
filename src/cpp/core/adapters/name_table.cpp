#include "adapters/name_table.h"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "adapters/name_row.h"
#include "adapters/name_text.h"
#include "loraaccel/adapter_names.h"

namespace loraaccel {
namespace {

constexpr std::array kBases = {"sd15", "sd2", "sdxl", "flux", "sd3", "sd35-medium", "sd35-large"};
constexpr int kMaxIncludes = 8;

const char* text_of(const std::vector<NameText>* texts, const std::string& name) {
  const NameText* first = texts != nullptr ? texts->data() : kNameTexts;
  const size_t count = texts != nullptr ? texts->size() : kNumNameTexts;
  for (size_t i = 0; i < count; ++i) {
    if (name == first[i].name) return first[i].text;
  }
  return nullptr;
}

class TableReader {
 public:
  TableReader(const std::vector<NameText>* texts, NameTable* table) : texts_(texts), table_(table) {
    table_->columns = {"native", "diffusers"};
  }

  Status file(const std::string& name, NameVariables variables, int depth);
  void finish();

 private:
  struct Block {
    std::string name;
    std::vector<std::vector<std::string>> rows;
  };
  // What a row's paths are below: "" outside of a block.
  struct Place {
    std::string native;
    std::string diffusers;
  };

  Status line(const std::vector<std::string>& words, NameVariables* variables, int depth);
  Status use(const std::vector<std::string>& words, const NameVariables& variables);
  Status row(std::vector<std::string> words, const Place& place, const NameVariables& variables);
  Status layer(const std::vector<std::string>& words, LayerKind kind, const Place& place);
  Status alias(const std::vector<std::string>& words, const Place& place);
  int column(const std::string& name);
  Status spell(int column, const std::string& path, SpelledPiece piece);

  const std::vector<NameText>* texts_;
  NameTable* table_;
  std::vector<Block> blocks_;
  Block* open_ = nullptr;
};

Status mistake(const std::string& what) { return Status(StatusCode::kInternal, what); }

Status TableReader::file(const std::string& name, NameVariables variables, int depth) {
  const char* text = text_of(texts_, name);
  if (text == nullptr) return mistake("there is no name table " + name);
  if (depth > kMaxIncludes) return mistake(name + ".names: included within itself");
  int number = 0;
  for (const std::string& raw : split_lines(text)) {
    ++number;
    const std::vector<std::string> words = split_words(raw);
    if (words.empty()) continue;
    const Status status = line(words, &variables, depth);
    if (!status.ok()) {
      return Status(status.code(),
                    name + ".names:" + std::to_string(number) + ": " + status.message());
    }
  }
  return Status();
}

Status TableReader::line(const std::vector<std::string>& words, NameVariables* variables,
                         int depth) {
  const std::string& what = words[0];
  if (what == "end") {
    open_ = nullptr;
    return Status();
  }
  if (open_ != nullptr) {
    open_->rows.push_back(words);
    return Status();
  }
  if (what == "set") return assign_variables(words, 1, variables);
  if (what == "use") return use(words, *variables);
  if (what == "include" && words.size() >= 2) {
    NameVariables inner = *variables;
    LORAACCEL_RETURN_IF_ERROR(assign_variables(words, 2, &inner));
    return file(words[1], inner, depth + 1);
  }
  if (what == "block" && words.size() == 2) {
    blocks_.push_back({words[1], {}});
    open_ = &blocks_.back();
    return Status();
  }
  if (what == "base" && words.size() == 3) {
    table_->base = words[1];
    table_->architecture = words[2];
    return Status();
  }
  if (what == "component" && words.size() == 2) {
    NameComponent component;
    LORAACCEL_RETURN_IF_ERROR(substitute(words[1], *variables, &component.name));
    table_->components.push_back(component);
    return Status();
  }
  if (table_->components.empty()) return mistake("a row before the first component");
  if (what == "spell" && words.size() == 5 && (words[4] == "flat" || words[4] == "dotted")) {
    const int c = column(words[3]);
    table_->components.back().spellings.push_back(
        {words[1], words[2] == "-" ? "" : words[2], c, words[4] == "flat"});
    return Status();
  }
  if (what == "checkpoint" && words.size() == 3) {
    const int c = column(words[2]);
    table_->components.back().checkpoints.push_back({words[1] == "-" ? "" : words[1], c});
    return Status();
  }
  return row(words, {}, *variables);
}

Status TableReader::use(const std::vector<std::string>& words, const NameVariables& variables) {
  if (words.size() < 4) return mistake("expected: use BLOCKS NATIVE DIFFUSERS v=n ...");
  NameVariables inner = variables;
  LORAACCEL_RETURN_IF_ERROR(assign_variables(words, 4, &inner));
  for (const std::string& name : split_at(words[1], ',')) {
    const auto block = std::find_if(blocks_.begin(), blocks_.end(),
                                    [&](const Block& b) { return b.name == name; });
    if (block == blocks_.end()) return mistake("there is no block " + name);
    for (const std::vector<std::string>& r : block->rows) {
      LORAACCEL_RETURN_IF_ERROR(row(r, {words[2] + ".", words[3] + "."}, inner));
    }
  }
  return Status();
}

Status TableReader::row(std::vector<std::string> words, const Place& place,
                        const NameVariables& variables) {
  std::vector<std::vector<std::string>> expanded;
  LORAACCEL_RETURN_IF_ERROR(expand_row(std::move(words), variables, &expanded));
  for (const std::vector<std::string>& r : expanded) {
    LayerKind kind;
    if (r[0] == "alias") {
      LORAACCEL_RETURN_IF_ERROR(alias(r, place));
    } else if (layer_kind(r[0], &kind)) {
      LORAACCEL_RETURN_IF_ERROR(layer(r, kind, place));
    } else {
      return mistake("unknown kind of row: " + r[0]);
    }
  }
  return Status();
}

Status TableReader::layer(const std::vector<std::string>& words, LayerKind kind,
                          const Place& place) {
  if (words.size() != 5) return mistake("expected: KIND NATIVE DIFFUSERS OUT IN");
  NativeModule module;
  module.component = static_cast<int>(table_->components.size()) - 1;
  module.path = place.native + words[1];
  module.kind = kind;
  LORAACCEL_RETURN_IF_ERROR(product_of(words[3], &module.out));
  LORAACCEL_RETURN_IF_ERROR(product_of(words[4], &module.in));
  const int index = static_cast<int>(table_->modules.size());
  table_->modules.push_back(module);
  LORAACCEL_RETURN_IF_ERROR(spell(kNativeColumn, module.path, {index, 0, 0, module.out}));
  std::vector<RowPart> parts;
  LORAACCEL_RETURN_IF_ERROR(parts_of(words[2] == "=" ? words[1] : words[2], module.out, &parts));
  int64_t row = 0;
  for (const RowPart& part : parts) {
    const std::string path = place.diffusers + part.path;
    if (part.swapped) {
      const int64_t half = part.rows / 2;
      LORAACCEL_RETURN_IF_ERROR(spell(kDiffusersColumn, path, {index, 0, row + half, half}));
      LORAACCEL_RETURN_IF_ERROR(spell(kDiffusersColumn, path, {index, half, row, half}));
    } else {
      LORAACCEL_RETURN_IF_ERROR(spell(kDiffusersColumn, path, {index, 0, row, part.rows}));
    }
    row += part.rows;
  }
  return Status();
}

Status TableReader::alias(const std::vector<std::string>& words, const Place& place) {
  if (words.size() != 4) return mistake("expected: alias COLUMN SPELLED NATIVE");
  const std::vector<std::string> native = split_at(words[3], ':');
  const std::vector<std::string> spelled = split_at(words[2], '@');
  const int component = static_cast<int>(table_->components.size()) - 1;
  const int module = table_->module(component, place.native + native[0]);
  if (module < 0) return mistake("there is no module " + place.native + native[0]);
  SpelledPiece piece{module, 0, 0, table_->modules[static_cast<size_t>(module)].out};
  if (native.size() == 3) {
    LORAACCEL_RETURN_IF_ERROR(product_of(native[1], &piece.native_row));
    LORAACCEL_RETURN_IF_ERROR(product_of(native[2], &piece.rows));
  }
  if (spelled.size() == 2) {
    int64_t index = 0;
    LORAACCEL_RETURN_IF_ERROR(product_of(spelled[1], &index));
    piece.row = index * piece.rows;
  }
  return spell(column(words[1]), place.diffusers + spelled[0], piece);
}

int TableReader::column(const std::string& name) {
  const auto found = std::find(table_->columns.begin(), table_->columns.end(), name);
  const auto index = found - table_->columns.begin();
  if (found == table_->columns.end()) table_->columns.push_back(name);
  return static_cast<int>(index);
}

Status TableReader::spell(int column, const std::string& path, SpelledPiece piece) {
  NameComponent& component = table_->components.back();
  component.columns.resize(table_->columns.size());
  NameColumn& names = component.columns[static_cast<size_t>(column)];
  const auto [place, added] = names.dotted.try_emplace(path, static_cast<int>(names.layers.size()));
  if (added) names.layers.push_back({path, 0, {}});
  Spelled& layer = names.layers[static_cast<size_t>(place->second)];
  for (const SpelledPiece& other : layer.pieces) {
    if (piece.row < other.row + other.rows && other.row < piece.row + piece.rows)
      return mistake(path + " is there twice");
  }
  layer.pieces.push_back(piece);
  layer.rows = std::max(layer.rows, piece.row + piece.rows);
  return Status();
}

void TableReader::finish() {
  for (NameComponent& component : table_->components) {
    component.columns.resize(table_->columns.size());
    for (NameColumn& names : component.columns) {
      names.of_module.resize(table_->modules.size());
      for (size_t i = 0; i < names.layers.size(); ++i) {
        names.flat.emplace(flat_name(names.layers[i].path), static_cast<int>(i));
        for (const SpelledPiece& piece : names.layers[i].pieces) {
          std::vector<int>& of = names.of_module[static_cast<size_t>(piece.module)];
          if (of.empty() || of.back() != static_cast<int>(i)) of.push_back(static_cast<int>(i));
        }
      }
    }
  }
}

}  // namespace

std::string flat_name(std::string_view path) {
  std::string flat(path);
  std::replace(flat.begin(), flat.end(), '.', '_');
  return flat;
}

int NameTable::component(std::string_view name) const {
  for (size_t i = 0; i < components.size(); ++i) {
    if (components[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

int NameTable::module(int component, const std::string& path) const {
  const NameColumn& names =
      components[static_cast<size_t>(component)].columns[static_cast<size_t>(kNativeColumn)];
  const auto found = names.dotted.find(path);
  if (found == names.dotted.end()) return -1;
  return names.layers[static_cast<size_t>(found->second)].pieces[0].module;
}

Status read_name_table(const std::string& name, const std::vector<NameText>* texts,
                       NameTable* table) {
  *table = NameTable();
  TableReader reader(texts, table);
  LORAACCEL_RETURN_IF_ERROR(reader.file(name, {}, 0));
  for (const NameComponent& component : table->components) {
    if (component.columns.empty())
      return mistake(name + ".names: component " + component.name + " has no rows");
  }
  reader.finish();
  return Status();
}

const std::vector<NameTable>& name_tables() {
  static const std::vector<NameTable> tables = [] {
    std::vector<NameTable> all(kBases.size());
    for (size_t i = 0; i < kBases.size(); ++i) {
      // The tables are part of the library and tested; one that cannot be read is left empty.
      if (!read_name_table(kBases[i], nullptr, &all[i]).ok()) all[i] = NameTable();
    }
    return all;
  }();
  return tables;
}

const NameTable* find_name_table(std::string_view base) {
  for (const NameTable& table : name_tables()) {
    if (table.base == base) return &table;
  }
  return nullptr;
}

std::vector<AdapterName> adapter_names(const std::string& base) {
  std::vector<AdapterName> names;
  const NameTable* table = find_name_table(base);
  if (table == nullptr) return names;
  for (const NameComponent& component : table->components) {
    for (size_t c = 0; c < component.columns.size(); ++c) {
      for (const Spelled& layer : component.columns[c].layers) {
        for (const SpelledPiece& piece : layer.pieces) {
          const NativeModule& module = table->modules[static_cast<size_t>(piece.module)];
          names.push_back({component.name, module.path, layer_kind_name(module.kind), module.out,
                           module.in, table->columns[c], layer.path, piece.row, piece.native_row,
                           piece.rows});
        }
      }
    }
  }
  return names;
}

}  // namespace loraaccel
