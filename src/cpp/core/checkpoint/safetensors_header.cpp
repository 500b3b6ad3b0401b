#include "checkpoint/safetensors_header.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>

#include "checkpoint/json_text.h"

namespace loraaccel {
namespace {

Status malformed(const std::string& path, const std::string& what) {
  return {StatusCode::kMalformedFile, path + ": " + what};
}

// What a file is that begins like this; null where it is nothing known.
const char* other_format(std::string_view head) {
  struct Format {
    std::string_view magic;
    const char* what;
  };
  static constexpr Format kFormats[] = {
      {"PK\x03\x04", "a zip archive, as torch.save writes (.bin, .pt, .ckpt)"},
      {"\x80\x02", "a Python pickle, as old versions of torch.save write (.bin, .pt, .ckpt)"},
      {"\x80\x03", "a Python pickle"},
      {"\x80\x04", "a Python pickle"},
      {"\x80\x05", "a Python pickle"},
      {"GGUF", "a GGUF file"},
      {"version https://git-lfs", "a Git LFS pointer: the file itself was not downloaded"},
      {"<html", "a web page: the download failed"},
      {"<HTML", "a web page: the download failed"},
      {"<!DOCTYPE", "a web page: the download failed"},
      {"<!doctype", "a web page: the download failed"},
      {"\x89HDF", "an HDF5 file"},
      {"\x1f\x8b", "a gzip archive"},
      {"{", "a JSON text"},
  };
  for (const Format& format : kFormats) {
    // A length of 123 begins with '{' too; then its other seven bytes are null.
    if (head.starts_with(format.magic) && head.find('\0') >= std::min<size_t>(4, head.size()))
      return format.what;
  }
  return nullptr;
}

std::string bytes_text(uint64_t n) { return std::to_string(n) + (n == 1 ? " byte" : " bytes"); }

// One entry, {"dtype": ..., "shape": [...], "data_offsets": [...]}.
class HeaderParser {
 public:
  HeaderParser(const std::string& path, SafetensorsHeader* header, JsonCursor cursor)
      : path_(path), header_(header), json_(std::move(cursor)) {}

  Status parse();

 private:
  Status syntax(const std::string& where = "") {
    return malformed(path_, "the header is not as expected" + where + ", " + json_.error());
  }
  Status in_tensor(std::string_view name, const std::string& what) {
    return malformed(path_, "tensor '" + std::string(name) + "': " + what);
  }
  Status bad_tensor(std::string_view name) {
    return syntax(" in tensor '" + std::string(name) + "'");
  }
  Status metadata();
  Status entry(std::string_view name);
  bool shape(size_t* first, size_t* count);
  bool offsets(TensorEntry* entry);

  const std::string& path_;
  SafetensorsHeader* header_;
  JsonCursor json_;
  bool seen_metadata_ = false;
  std::vector<std::pair<size_t, size_t>> shapes_;  // first and count in dimensions
};

Status HeaderParser::parse() {
  if (!json_.expect('{')) return syntax();
  if (!json_.take('}')) {
    do {
      std::string_view name;
      if (!json_.string(&name) || !json_.expect(':')) return syntax();
      LORAACCEL_RETURN_IF_ERROR(name == "__metadata__" ? metadata() : entry(name));
    } while (json_.take(','));
    if (!json_.expect('}')) return syntax();
  }
  if (!json_.at_end()) {
    json_.fail("nothing but white space after the object");
    return syntax();
  }
  for (size_t i = 0; i < shapes_.size(); ++i)
    header_->entries[i].shape = {header_->dimensions.data() + shapes_[i].first, shapes_[i].second};
  return {};
}

Status HeaderParser::metadata() {
  if (seen_metadata_) return malformed(path_, "the header has __metadata__ twice");
  seen_metadata_ = true;
  if (json_.peek() == 'n') {
    if (!json_.null()) return syntax();
    return {};
  }
  const std::string where = " in __metadata__";
  if (!json_.expect('{')) return syntax(where);
  header_->has_metadata = true;
  if (json_.take('}')) return {};
  do {
    MetadataItem item;
    if (!json_.string(&item.key) || !json_.expect(':')) return syntax(where);
    if (json_.peek() != '"') {
      json_.fail("a string");
      return syntax(where + ", key '" + std::string(item.key) + "'");
    }
    if (!json_.string(&item.value)) return syntax(where);
    header_->metadata.push_back(item);
  } while (json_.take(','));
  if (!json_.expect('}')) return syntax(where);
  return {};
}

bool HeaderParser::shape(size_t* first, size_t* count) {
  *first = header_->dimensions.size();
  if (!json_.expect('[')) return false;
  if (!json_.take(']')) {
    do {
      uint64_t size;
      if (!json_.whole_number(&size)) return false;
      if (size > INT64_MAX) return json_.fail("a dimension below 2^63");
      if (header_->dimensions.size() - *first == kMaxDimensions)
        return json_.fail("at most 64 dimensions");
      header_->dimensions.push_back(static_cast<int64_t>(size));
    } while (json_.take(','));
    if (!json_.expect(']')) return false;
  }
  *count = header_->dimensions.size() - *first;
  return true;
}

bool HeaderParser::offsets(TensorEntry* entry) {
  return json_.expect('[') && json_.whole_number(&entry->begin) && json_.expect(',') &&
         json_.whole_number(&entry->end) && json_.expect(']');
}

Status HeaderParser::entry(std::string_view name) {
  TensorEntry entry;
  entry.name = name;
  std::pair<size_t, size_t> dims;
  bool has_dtype = false;
  bool has_shape = false;
  bool has_offsets = false;
  if (!json_.expect('{')) return bad_tensor(name);
  if (!json_.take('}')) {
    do {
      std::string_view key;
      if (!json_.string(&key) || !json_.expect(':')) return bad_tensor(name);
      bool* seen = key == "dtype"          ? &has_dtype
                   : key == "shape"        ? &has_shape
                   : key == "data_offsets" ? &has_offsets
                                           : nullptr;
      if (seen != nullptr && *seen) return in_tensor(name, std::string(key) + " occurs twice");
      if (seen == nullptr) {
        if (!json_.skip_value()) return bad_tensor(name);
        continue;
      }
      *seen = true;
      if (seen == &has_dtype) {
        std::string_view text;
        if (!json_.string(&text)) return bad_tensor(name);
        if (!parse_file_dtype(text, &entry.dtype))
          return in_tensor(name, "unknown dtype '" + std::string(text.substr(0, 40)) + "'");
      } else if (!(seen == &has_shape ? shape(&dims.first, &dims.second) : offsets(&entry))) {
        return bad_tensor(name);
      }
    } while (json_.take(','));
    if (!json_.expect('}')) return bad_tensor(name);
  }
  const char* missing = !has_dtype     ? "dtype"
                        : !has_shape   ? "shape"
                        : !has_offsets ? "data_offsets"
                                       : nullptr;
  if (missing != nullptr) return in_tensor(name, std::string("no ") + missing);
  header_->entries.push_back(entry);
  shapes_.push_back(dims);
  return {};
}

Status check_sizes(const std::string& path, const SafetensorsHeader& header) {
  for (const TensorEntry& e : header.entries) {
    const std::string tensor = "tensor '" + std::string(e.name) + "'";
    uint64_t bytes;
    if (!tensor_bytes(e.dtype, e.shape, &bytes))
      return malformed(path, tensor + ": " + file_dtype_name(e.dtype) + " " + shape_text(e.shape) +
                                 " is no whole number of bytes below 2^64");
    if (e.begin > e.end)
      return malformed(path, tensor + ": data_offsets begin at " + std::to_string(e.begin) +
                                 " and end at " + std::to_string(e.end));
    if (e.end - e.begin != bytes)
      return malformed(path, tensor + ": data_offsets span " + bytes_text(e.end - e.begin) +
                                 ", but " + file_dtype_name(e.dtype) + " " + shape_text(e.shape) +
                                 " has " + bytes_text(bytes));
  }
  return {};
}

// Sorted by their bytes, tensors must follow each other without holes.
Status check_tiling(const std::string& path, const SafetensorsHeader& header) {
  uint64_t at = 0;
  std::string before = "the start of the data";
  const TensorEntry* last = nullptr;
  for (const TensorEntry& e : header.entries) {
    if (e.begin != at) {
      if (last != nullptr) before = "tensor '" + std::string(last->name) + "'";
      return malformed(path, "tensor '" + std::string(e.name) + "' begins at byte " +
                                 std::to_string(e.begin) + " of the data, expected byte " +
                                 std::to_string(at) + " after " + before +
                                 (e.begin < at ? ": they overlap" : ": there is a hole"));
    }
    at = e.end;
    last = &e;
  }
  return {};
}

Status check_end(const std::string& path, const SafetensorsHeader& header, uint64_t length,
                 uint64_t file_size) {
  const uint64_t data = header.entries.empty() ? 0 : header.entries.back().end;
  const uint64_t found = file_size - 8 - length;
  if (found == data) return {};
  uint64_t total;
  const bool fits = !__builtin_add_overflow(8 + length, data, &total);
  return malformed(path, "expected 8 + " + std::to_string(length) + " + " + std::to_string(data) +
                             (fits ? " = " + std::to_string(total) : "") + " bytes, found " +
                             std::to_string(file_size) +
                             (found < data ? ": the file is incomplete, download or copy it again"
                                           : ": there are bytes after the last tensor"));
}

template <class T>
Status check_names(const std::string& path, const char* what, const std::vector<T>& items,
                   std::string_view T::* name, std::vector<uint32_t>* order) {
  const auto less = [&](uint32_t a, uint32_t b) { return items[a].*name < items[b].*name; };
  order->resize(items.size());
  std::iota(order->begin(), order->end(), 0U);
  // Most files are in this order already.
  if (!std::is_sorted(order->begin(), order->end(), less))
    std::sort(order->begin(), order->end(), less);
  for (size_t i = 1; i < order->size(); ++i) {
    if (items[(*order)[i - 1]].*name == items[(*order)[i]].*name)
      return malformed(path, std::string(what) + " '" + std::string(items[(*order)[i]].*name) +
                                 "' occurs twice");
  }
  return {};
}

}  // namespace

bool tensor_bytes(FileDType dtype, std::span<const int64_t> shape, uint64_t* bytes) {
  uint64_t count = 1;
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(count, static_cast<uint64_t>(size), &count))
      return false;
  }
  uint64_t bits;
  if (__builtin_mul_overflow(count, static_cast<uint64_t>(file_dtype_bits(dtype)), &bits) ||
      bits % 8 != 0)
    return false;
  *bytes = bits / 8;
  return true;
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

Status read_header_length(const std::string& path, std::string_view head, uint64_t file_size,
                          uint64_t* length) {
  if (const char* what = other_format(head))
    return malformed(path, std::string("this is no safetensors file but ") + what);
  if (file_size < 8)
    return malformed(path,
                     "the file has " + bytes_text(file_size) +
                         ", expected at least 8: it is incomplete, download or copy it again");
  uint64_t n = 0;
  for (int i = 7; i >= 0; --i) n = n << 8 | static_cast<uint8_t>(head[static_cast<size_t>(i)]);
  if (n > kMaxHeaderBytes)
    return malformed(path, "a header of " + std::to_string(n) + " bytes, expected at most " +
                               std::to_string(kMaxHeaderBytes) + ": this is no safetensors file");
  if (n > file_size - 8)
    return malformed(path, "expected 8 + " + std::to_string(n) + " bytes and the data, found " +
                               std::to_string(file_size) +
                               ": the file is incomplete, download or copy it again");
  *length = n;
  return {};
}

Status parse_header(const std::string& path, std::unique_ptr<char[]> text, uint64_t length,
                    uint64_t file_size, SafetensorsHeader* header) {
  header->text = std::move(text);
  char* begin = header->text.get();
  if (!is_utf8({begin, length})) return malformed(path, "the header is not UTF-8");
  // About one tensor in 100 bytes; a guess that costs nothing where it is wrong.
  header->entries.reserve(length / 100);
  header->dimensions.reserve(length / 50);
  HeaderParser parser(path, header, JsonCursor(begin, begin + length));
  LORAACCEL_RETURN_IF_ERROR(parser.parse());
  LORAACCEL_RETURN_IF_ERROR(check_sizes(path, *header));
  std::vector<uint32_t> unused;
  LORAACCEL_RETURN_IF_ERROR(
      check_names(path, "the metadata key", header->metadata, &MetadataItem::key, &unused));
  const auto earlier = [](const TensorEntry& a, const TensorEntry& b) {
    // (Names lie in one text, in the order of the header.)
    return std::tuple(a.begin, a.end, a.name.data()) < std::tuple(b.begin, b.end, b.name.data());
  };
  if (!std::is_sorted(header->entries.begin(), header->entries.end(), earlier))
    std::sort(header->entries.begin(), header->entries.end(), earlier);
  LORAACCEL_RETURN_IF_ERROR(
      check_names(path, "the tensor name", header->entries, &TensorEntry::name, &header->by_name));
  LORAACCEL_RETURN_IF_ERROR(check_tiling(path, *header));
  return check_end(path, *header, length, file_size);
}

std::string format_header(std::span<const HeaderTensor> tensors, const SaveMetadata* metadata) {
  std::string text(8, '\0');
  text += '{';
  if (metadata != nullptr) {
    text += "\"__metadata__\":{";
    bool first = true;
    for (const auto& [key, value] : *metadata) {
      if (!first) text += ',';
      first = false;
      append_json_string(key, &text);
      text += ':';
      append_json_string(value, &text);
    }
    text += '}';
    if (!tensors.empty()) text += ',';
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const HeaderTensor& t = tensors[i];
    if (i > 0) text += ',';
    append_json_string(t.name, &text);
    text += ":{\"dtype\":\"";
    text += file_dtype_name(t.dtype);
    text += "\",\"shape\":[";
    for (size_t d = 0; d < t.shape.size(); ++d) {
      if (d > 0) text += ',';
      text += std::to_string(t.shape[d]);
    }
    text += "],\"data_offsets\":[" + std::to_string(t.begin) + "," + std::to_string(t.end) + "]}";
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size() - 8;
  for (size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(length >> (8 * i) & 0xFF);
  return text;
}

}  // namespace loraaccel
