// The words of a name table's rows: alternatives, variables, products, parts.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "adapters/name_table.h"

namespace loraaccel {

using NameVariables = std::map<std::string, std::string>;

// Lines without what follows a "#".
std::vector<std::string> split_lines(std::string_view text);
std::vector<std::string> split_words(std::string_view line);
std::vector<std::string> split_at(std::string_view text, char separator);

// words[from...] are v=value; values may use variables.
Status assign_variables(const std::vector<std::string>& words, size_t from,
                        NameVariables* variables);
Status substitute(const std::string& word, const NameVariables& variables, std::string* result);
// "3*1536" and "7".
Status product_of(const std::string& word, int64_t* value);
bool layer_kind(const std::string& word, LayerKind* kind);
const char* layer_kind_name(LayerKind kind);

// All rows that a row with alternatives and, as its last word, a range v=first..last stands for.
Status expand_row(std::vector<std::string> words, const NameVariables& variables,
                  std::vector<std::vector<std::string>>* rows);

struct RowPart {
  std::string path;
  int64_t rows = 0;
  bool swapped = false;
};

// "a.[b|c:12]~" of `out` rows.
Status parts_of(const std::string& word, int64_t out, std::vector<RowPart>* parts);

}  // namespace loraaccel
