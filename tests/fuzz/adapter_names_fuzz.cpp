// Any lines as the keys of an adapter file: refused with an error that names it, or an adapter that every format either
// refuses or writes so that it is read back with the same layers. The first line is a PEFT configuration.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "adapters/pattern.h"
#include "loraaccel/adapter.h"
#include "loraaccel/adapter_convert.h"

namespace {

using namespace loraaccel;

constexpr size_t kMaxKeys = 64;
const float kNumbers[64] = {1, 2, 3, 4};

void require(bool condition, const char* what, const std::string& detail = "") {
  if (condition) return;
  std::fprintf(stderr, "not so: %s %s\n", what, detail.c_str());
  std::abort();
}

std::string_view take_line(std::string_view* text) {
  const size_t end = text->find('\n');
  const std::string_view line = text->substr(0, end);
  *text = end == std::string_view::npos ? std::string_view() : text->substr(end + 1);
  return line;
}

// Sizes follow from the first byte: two or four dimensions of 1 to 4.
AdapterTensor tensor_of(std::string_view line) {
  AdapterTensor t;
  const unsigned sizes = line.empty() ? 0 : static_cast<unsigned char>(line[0]);
  t.key = line.empty() ? "" : line.substr(1);
  t.data = kNumbers;
  if ((sizes & 0x40U) != 0) t.shape = {1 + (sizes & 3U), 1 + (sizes >> 2U & 3U)};
  if ((sizes & 0x80U) != 0)
    t.shape.insert(t.shape.end(), {1 + (sizes >> 4U & 1U), 1 + (sizes >> 4U & 1U)});
  return t;
}

void write_and_read(const Adapter& adapter, const std::string& format) {
  std::vector<SpelledFile> files;
  std::vector<std::string> notes;
  ConvertOptions options;
  options.format = format;
  const Status status = spell_adapter(adapter, options, &files, &notes);
  if (!status.ok()) {
    require(!status.message().empty(), "an error has a message");
    return;
  }
  std::vector<AdapterSource> sources;
  for (const SpelledFile& file : files)
    sources.push_back({format, file.config, file.folder, file.tensors, file.metadata});
  ReadAdapterOptions read;
  read.base = adapter.base;
  for (const AdapterEntry& entry : adapter.entries) {
    if (adapter.base.empty()) read.modules.push_back(entry.path);
  }
  Adapter again;
  const Status back = read_adapter(sources, read, &again);
  if (!adapter.base.empty())
    require(back.ok(), "what was written can be read:", format + ": " + back.message());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view text(reinterpret_cast<const char*>(data), size);
  AdapterSource source;
  source.name = "fuzzed";
  source.config = take_line(&text);
  bool matches = false;
  const Status pattern = pattern_matches(source.config, text.substr(0, 256), &matches);
  require(pattern.ok() || pattern.code() == StatusCode::kInvalidArgument,
          "a pattern is known or refused");
  while (!text.empty() && source.tensors.size() < kMaxKeys) {
    AdapterTensor t = tensor_of(take_line(&text));
    for (const AdapterTensor& other : source.tensors) {
      if (other.key == t.key) return 0;  // a file has each name once
    }
    source.tensors.push_back(std::move(t));
  }
  for (const bool allow : {false, true}) {
    ReadAdapterOptions options;
    options.allow_unmatched = allow;
    Adapter adapter;
    const Status status = read_adapter({source}, options, &adapter);
    require(status.ok() || status.message().find("fuzzed") != std::string::npos,
            "an error names the file:", status.message());
    if (!status.ok()) continue;
    size_t used = adapter.report.unused.size();
    for (const AdapterEntry& entry : adapter.entries) used += entry.tensors.size();
    require(used == source.tensors.size(), "every key is used or listed");
    if (allow) continue;
    for (const std::string& format : adapter_formats()) write_and_read(adapter, format);
  }
  return 0;
}
