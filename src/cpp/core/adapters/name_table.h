// The names of a base model's layers in every spelling, read from the tables of src/data/names.
//
// A row of a table:      KIND NATIVE DIFFUSERS OUT IN [variable=first..last]
// "=" for DIFFUSERS repeats NATIVE; [a|b|c] there are the parts that the native layer is made of, rows in this order and
// equal but for those with ":rows"; "~" after it: the two halves of the rows are swapped. {a,b} anywhere in a row makes
// one row with each alternative; $v is a variable, n*$v a product.
//   alias COLUMN SPELLED NATIVE[:row:rows]     another spelling; SPELLED@k: it is the k-th part of that layer
//   component NAME                             what follows is a part of the model
//   spell FORMAT PREFIX COLUMN flat|dotted     keys of FORMAT begin so; flat: with "_" for "."
//   checkpoint PREFIX COLUMN                   weights of base models are named so; "-": no prefix
//   block NAME ... end, use BLOCKS NATIVE DIFFUSERS v=n ...   rows that repeat, below two prefixes
//   include FILE v=n ..., set v=n ..., base NAME ARCHITECTURE
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "loraaccel/status.h"

namespace loraaccel {

enum class LayerKind : int8_t {
  kLinear,
  kConv1,
  kConv2,
  kConv3,
  kNorm,
  kScale,  // a vector named "scale", not "weight"
  kEmbedding,
};

// One layer as the original checkpoint names it.
struct NativeModule {
  int component = 0;
  std::string path;
  LayerKind kind = LayerKind::kLinear;
  int64_t out = 0;
  int64_t in = 0;
};

// Rows [row, row + rows) of a spelled layer are rows [native_row, native_row + rows) of a native one.
struct SpelledPiece {
  int module = 0;
  int64_t row = 0;
  int64_t native_row = 0;
  int64_t rows = 0;
};

// A layer in one column of the table: its path there, and what it is made of.
struct Spelled {
  std::string path;
  int64_t rows = 0;
  std::vector<SpelledPiece> pieces;
};

struct Spelling {
  std::string format;
  std::string prefix;
  int column = 0;
  bool flat = false;
};

struct CheckpointSpelling {
  std::string prefix;
  int column = 0;
};

// All layers of a component in one column.
struct NameColumn {
  std::vector<Spelled> layers;
  std::unordered_map<std::string, int> dotted;
  std::unordered_map<std::string, int> flat;
  std::vector<std::vector<int>>
      of_module;  // by index of the module in the table: which layers it is in
};

struct NameComponent {
  std::string name;
  std::vector<Spelling> spellings;
  std::vector<CheckpointSpelling> checkpoints;
  std::vector<NameColumn> columns;  // by index of NameTable::columns
};

struct NameTable {
  std::string base;
  std::string architecture;  // as modelspec.architecture spells it
  std::vector<std::string> columns;
  std::vector<NameComponent> components;
  std::vector<NativeModule> modules;

  int component(std::string_view name) const;  // -1: none
  // The native module of that path, or -1.
  int module(int component, const std::string& path) const;
};

constexpr int kNativeColumn = 0;
constexpr int kDiffusersColumn = 1;

std::string flat_name(std::string_view path);  // "_" for "."

// Parses and expands the table; kInternal names the file and line of a mistake. `texts` stands for the compiled-in files
// in tests; null: those.
struct NameText;
Status read_name_table(const std::string& name, const std::vector<NameText>* texts,
                       NameTable* table);

// The tables of all base models, in the order in which they are tried. Read at the first call.
const std::vector<NameTable>& name_tables();
const NameTable* find_name_table(std::string_view base);

}  // namespace loraaccel
