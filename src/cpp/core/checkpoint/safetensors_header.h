// The header of a safetensors file: checked on the way in, planned on the way out.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "loraaccel/safetensors.h"

namespace loraaccel {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference library's
constexpr size_t kMaxDimensions = 64;              // as many as numpy and torch have

// Elements, and bytes; false where they overflow, or the bits are no whole bytes. A product is taken from left to right:
// a zero behind an overflow does not help.
bool tensor_bytes(FileDType dtype, std::span<const int64_t> shape, uint64_t* bytes);

// "[2, 3]"
std::string shape_text(std::span<const int64_t> shape);

// What a header says. The views are into `text` and `dimensions`.
struct SafetensorsHeader {
  std::unique_ptr<char[]> text;
  std::vector<int64_t> dimensions;
  std::vector<TensorEntry> entries;  // by begin
  std::vector<uint32_t> by_name;
  std::vector<MetadataItem> metadata;
  bool has_metadata = false;
};

// The length N from the first bytes of a file of `file_size` bytes; `head` holds the first min(file_size, 64) of them.
// Says what else the file looks like where it is none of ours.
Status read_header_length(const std::string& path, std::string_view head, uint64_t file_size,
                          uint64_t* length);

// Parses `text`, `length` bytes and a null byte, and checks it against a file of `file_size` bytes.
Status parse_header(const std::string& path, std::unique_ptr<char[]> text, uint64_t length,
                    uint64_t file_size, SafetensorsHeader* header);

struct HeaderTensor {
  std::string_view name;
  FileDType dtype;
  std::span<const int64_t> shape;
  uint64_t begin;
  uint64_t end;
};

// Length prefix, JSON and padding, so that the data begins at a multiple of 8.
std::string format_header(std::span<const HeaderTensor> tensors, const SaveMetadata* metadata);

}  // namespace loraaccel
