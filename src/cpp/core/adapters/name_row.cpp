#include "adapters/name_row.h"

#include <algorithm>
#include <array>
#include <charconv>

namespace loraaccel {
namespace {

constexpr int64_t kMaxRange = 1000;
constexpr std::array<const char*, 7> kLayerKinds = {"linear", "conv1", "conv2",    "conv3",
                                                    "norm",   "scale", "embedding"};

Status mistake(const std::string& what) { return Status(StatusCode::kInternal, what); }

Status number_of(std::string_view word, int64_t* value) {
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), *value);
  if (error == std::errc() && end == word.data() + word.size()) return Status();
  return mistake("expected a number, found " + std::string(word));
}

// The alternatives of every {a,b} in all words are taken together: one row for each.
Status expand_alternatives(const std::vector<std::string>& words,
                           std::vector<std::vector<std::string>>* rows) {
  size_t count = 1;
  for (const std::string& word : words) {
    for (size_t at = word.find('{'); at != std::string::npos; at = word.find('{', at + 1)) {
      const size_t end = word.find('}', at);
      if (end == std::string::npos) return mistake("no } in " + word);
      const size_t here = split_at(std::string_view(word).substr(at + 1, end - at - 1), ',').size();
      if (count != 1 && here != count) return mistake("unequal numbers of alternatives");
      count = here;
    }
  }
  for (size_t k = 0; k < count; ++k) {
    std::vector<std::string> row;
    for (std::string word : words) {
      for (size_t at = word.find('{'); at != std::string::npos; at = word.find('{')) {
        const size_t end = word.find('}', at);
        const auto choices = split_at(std::string_view(word).substr(at + 1, end - at - 1), ',');
        word = word.substr(0, at) + choices[k] + word.substr(end + 1);
      }
      row.push_back(std::move(word));
    }
    rows->push_back(std::move(row));
  }
  return Status();
}

}  // namespace

std::vector<std::string> split_at(std::string_view text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end = text.find(separator); end != std::string_view::npos;
       end = text.find(separator, begin)) {
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  parts.emplace_back(text.substr(begin));
  return parts;
}

std::vector<std::string> split_lines(std::string_view text) {
  std::vector<std::string> lines = split_at(text, '\n');
  for (std::string& line : lines) line = line.substr(0, line.find('#'));
  return lines;
}

std::vector<std::string> split_words(std::string_view line) {
  std::vector<std::string> words;
  size_t begin = 0;
  while ((begin = line.find_first_not_of(" \t\r", begin)) != std::string_view::npos) {
    size_t end = line.find_first_of(" \t\r", begin);
    if (end == std::string_view::npos) end = line.size();
    words.emplace_back(line.substr(begin, end - begin));
    begin = end;
  }
  return words;
}

Status assign_variables(const std::vector<std::string>& words, size_t from,
                        NameVariables* variables) {
  for (size_t i = from; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    if (equals == std::string::npos) return mistake("expected v=value, found " + words[i]);
    std::string value;
    LORAACCEL_RETURN_IF_ERROR(substitute(words[i].substr(equals + 1), *variables, &value));
    (*variables)[words[i].substr(0, equals)] = value;
  }
  return Status();
}

Status substitute(const std::string& word, const NameVariables& variables, std::string* result) {
  result->clear();
  for (size_t i = 0; i < word.size(); ++i) {
    if (word[i] != '$') {
      result->push_back(word[i]);
      continue;
    }
    size_t end = i + 1;
    while (end < word.size() &&
           ((word[end] >= 'A' && word[end] <= 'Z') || (word[end] >= 'a' && word[end] <= 'z'))) {
      ++end;
    }
    const auto found = variables.find(word.substr(i + 1, end - i - 1));
    if (found == variables.end()) return mistake("a variable without a value in " + word);
    *result += found->second;
    i = end - 1;
  }
  return Status();
}

Status product_of(const std::string& word, int64_t* value) {
  *value = 1;
  for (const std::string& factor : split_at(word, '*')) {
    int64_t number = 0;
    LORAACCEL_RETURN_IF_ERROR(number_of(factor, &number));
    *value *= number;
  }
  return Status();
}

bool layer_kind(const std::string& word, LayerKind* kind) {
  const auto* found = std::find(kLayerKinds.begin(), kLayerKinds.end(), word);
  if (found == kLayerKinds.end()) return false;
  *kind = static_cast<LayerKind>(found - kLayerKinds.begin());
  return true;
}

const char* layer_kind_name(LayerKind kind) { return kLayerKinds[static_cast<size_t>(kind)]; }

Status expand_row(std::vector<std::string> words, const NameVariables& variables,
                  std::vector<std::vector<std::string>>* rows) {
  std::string variable;
  int64_t first = 0;
  int64_t last = 0;
  const size_t range = words.back().find("..");
  if (range != std::string::npos) {
    std::string word;
    LORAACCEL_RETURN_IF_ERROR(substitute(words.back(), variables, &word));
    const size_t equals = word.find('=');
    const size_t dots = word.find("..");
    if (equals == std::string::npos || equals > dots) return mistake("expected v=first..last");
    variable = word.substr(0, equals);
    LORAACCEL_RETURN_IF_ERROR(number_of(word.substr(equals + 1, dots - equals - 1), &first));
    LORAACCEL_RETURN_IF_ERROR(number_of(word.substr(dots + 2), &last));
    if (last - first > kMaxRange) return mistake("a range that is too long");
    words.pop_back();
  }
  std::vector<std::vector<std::string>> alternatives;
  LORAACCEL_RETURN_IF_ERROR(expand_alternatives(words, &alternatives));
  for (int64_t i = first; i <= last; ++i) {
    NameVariables inner = variables;
    if (!variable.empty()) inner[variable] = std::to_string(i);
    for (const std::vector<std::string>& alternative : alternatives) {
      std::vector<std::string> row(alternative.size());
      for (size_t k = 0; k < alternative.size(); ++k) {
        LORAACCEL_RETURN_IF_ERROR(substitute(alternative[k], inner, &row[k]));
      }
      rows->push_back(std::move(row));
    }
  }
  return Status();
}

Status parts_of(const std::string& word, int64_t out, std::vector<RowPart>* parts) {
  std::string text = word;
  const bool swapped = text.back() == '~';
  if (swapped) text.pop_back();
  const size_t open = text.find('[');
  if (open == std::string::npos) {
    if (swapped && out % 2 != 0) return mistake("an odd number of rows has no halves");
    parts->push_back({text, out, swapped});
    return Status();
  }
  const size_t close = text.find(']', open);
  if (close == std::string::npos || swapped) return mistake("expected a.[b|c]");
  int64_t rest = out;
  int64_t unsized = 0;
  for (const std::string& choice : split_at(text.substr(open + 1, close - open - 1), '|')) {
    const std::vector<std::string> halves = split_at(choice, ':');
    RowPart part{text.substr(0, open) + halves[0] + text.substr(close + 1), 0, false};
    if (halves.size() == 2) LORAACCEL_RETURN_IF_ERROR(product_of(halves[1], &part.rows));
    rest -= part.rows;
    if (part.rows == 0) ++unsized;
    parts->push_back(part);
  }
  if (rest < 0 || (unsized == 0 ? rest != 0 : rest % unsized != 0))
    return mistake("the parts do not make up the rows");
  const int64_t each = unsized == 0 ? 0 : rest / unsized;
  for (RowPart& part : *parts) {
    if (part.rows == 0) part.rows = each;
  }
  return Status();
}

}  // namespace loraaccel
