#include "adapters/formats.h"

#include <algorithm>

#include "adapters/name_row.h"
#include "adapters/name_text.h"

namespace loraaccel {
namespace {

Status read_row(const std::vector<std::string>& words, Formats* formats) {
  if (words[0] == "format" && words.size() == 4) {
    AdapterFormat format{words[1], words[2], AlphaPlace::kNone};
    if (words[3] == "tensor") format.alpha = AlphaPlace::kTensor;
    if (words[3] == "config") format.alpha = AlphaPlace::kConfig;
    formats->formats.push_back(format);
    return Status();
  }
  KeyEnding ending;
  if (words[0] != "suffix" || words.size() != 4 || !parse_adapter_role(words[1], &ending.role))
    return Status(StatusCode::kInternal, "formats.names: no row: " + words[0] + " " + words[1]);
  ending.style = words[2];
  ending.text = words[3];
  formats->endings.push_back(ending);
  return Status();
}

}  // namespace

Status read_formats(std::string_view text, Formats* formats) {
  for (const std::string& line : split_lines(text)) {
    const std::vector<std::string> words = split_words(line);
    if (words.size() < 2) continue;
    LORAACCEL_RETURN_IF_ERROR(read_row(words, formats));
  }
  formats->by_length = formats->endings;
  const auto key = [](const KeyEnding& e) {
    const bool any = e.text.find('*') != std::string::npos;
    return std::pair<int, int64_t>(e.bare() ? 2 : any ? 1 : 0, -static_cast<int64_t>(e.text.size()));
  };
  std::stable_sort(formats->by_length.begin(), formats->by_length.end(),
                   [&](const KeyEnding& a, const KeyEnding& b) { return key(a) < key(b); });
  return Status();
}

const Formats& adapter_format_table() {
  static const Formats formats = [] {
    Formats result;
    for (size_t i = 0; i < kNumNameTexts; ++i) {
      // Part of the library and tested; what cannot be read is left out.
      if (std::string_view(kNameTexts[i].name) == "formats" &&
          !read_formats(kNameTexts[i].text, &result).ok()) {
        result = Formats();
      }
    }
    return result;
  }();
  return formats;
}

const AdapterFormat* Formats::find(std::string_view name) const {
  for (const AdapterFormat& format : formats) {
    if (format.name == name) return &format;
  }
  return nullptr;
}

const KeyEnding* Formats::written(std::string_view style, AdapterRole role) const {
  for (const KeyEnding& ending : endings) {
    if (ending.role == role && ending.style == style) return &ending;
  }
  return nullptr;
}

bool stem_of(std::string_view key, const KeyEnding& ending, std::string_view* stem) {
  const std::string_view text = ending.text;
  const size_t star = text.find('*');
  if (star == std::string_view::npos) {
    if (key.size() <= text.size() || !key.ends_with(text)) return false;
    *stem = key.substr(0, key.size() - text.size());
    return true;
  }
  const std::string_view after = text.substr(star + 1);
  if (!key.ends_with(after)) return false;
  key.remove_suffix(after.size());
  const size_t dot = key.rfind('.');
  if (dot == std::string_view::npos || dot + 1 == key.size()) return false;
  const std::string_view before = text.substr(0, star);
  const std::string_view head = key.substr(0, dot + 1);
  if (head.size() <= before.size() || !head.ends_with(before)) return false;
  *stem = head.substr(0, head.size() - before.size());
  return true;
}

std::vector<std::string> adapter_formats() {
  std::vector<std::string> names;
  for (const AdapterFormat& format : adapter_format_table().formats) {
    if (format.style != "old") names.push_back(format.name);
  }
  return names;
}

}  // namespace loraaccel
