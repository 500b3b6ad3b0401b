// Any bytes as a safetensors file: refused with an error that names it, or a file whose every tensor can be read and
// that comes back the same when it is written again.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "loraaccel/safetensors.h"

namespace {

using namespace loraaccel;

void require(bool condition, const char* what, const std::string& detail = "") {
  if (condition) return;
  std::fprintf(stderr, "not so: %s %s\n", what, detail.c_str());
  std::abort();
}

void* allocate(void* host, size_t bytes) {
  auto* memory = static_cast<std::vector<char>*>(host);
  memory->resize(bytes);
  return memory->data();
}

std::vector<TensorToSave> read_all(const SafetensorsReader& file, uint64_t size,
                                   std::vector<std::vector<char>>* memory) {
  std::vector<TensorToSave> tensors;
  uint64_t at = 0;
  for (const TensorEntry& e : file.entries()) {
    require(e.begin == at && e.end >= e.begin, "tensors follow each other");
    at = e.end;
    require(file.find(e.name) == &e, "a tensor is found by its name");
    memory->emplace_back(static_cast<size_t>(e.size_bytes()));
    require(file.read(e, 0, e.size_bytes(), memory->back().data()).ok(), "a tensor can be read");
    require(!file.read(e, 0, e.size_bytes() + 1, nullptr).ok(), "nothing behind it can");
    tensors.push_back({.name = std::string(e.name),
                       .dtype = e.dtype,
                       .shape = {e.shape.begin(), e.shape.end()},
                       .data = memory->back().data()});
  }
  require(file.data_offset() + at == size, "tensors end where the file does");
  return tensors;
}

void write_again(const SafetensorsReader& file, const std::vector<TensorToSave>& tensors) {
  SaveMetadata metadata;
  for (const MetadataItem& item : file.metadata()) metadata.emplace_back(item.key, item.value);
  std::vector<char> bytes;
  const Status status = serialize_safetensors(tensors, file.has_metadata() ? &metadata : nullptr,
                                              {}, allocate, &bytes);
  require(status.ok(), "what was read can be written:", status.message());
  SafetensorsReader again;
  const Status opened = SafetensorsReader::from_memory(bytes.data(), bytes.size(), "again", &again);
  require(opened.ok(), "what was written can be read:", opened.message());
  require(again.entries().size() == tensors.size(), "as many tensors");
  require(again.has_metadata() == file.has_metadata() &&
              again.metadata().size() == file.metadata().size(),
          "as much metadata");
  for (const TensorToSave& t : tensors) {
    const TensorEntry* e = again.find(t.name);
    require(e != nullptr && e->dtype == t.dtype, "the same names and types");
    require(std::vector<int64_t>(e->shape.begin(), e->shape.end()) == t.shape, "the same shapes");
    void* data = nullptr;
    require(again.view(*e, &data).ok(), "a view of memory");
    require(e->size_bytes() == 0 || std::memcmp(data, t.data, e->size_bytes()) == 0,
            "the same bytes");
  }
}

uint64_t length_of(const uint8_t* data) {
  uint64_t n = 0;
  for (int i = 7; i >= 0; --i) n = n << 8 | data[i];
  return n;
}

}  // namespace

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Changes the header, or the number of bytes behind it, and keeps the length in step: else nearly every change would
// end at the first check. One in eight changes anything at all.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  if (size < 8 || max_size < 64 || seed % 8 == 0) return LLVMFuzzerMutate(data, size, max_size);
  const auto header = static_cast<size_t>(std::min<uint64_t>(length_of(data), size - 8));
  std::vector<uint8_t> tail(data + 8 + header, data + size);
  if (seed % 8 == 1) {
    tail.resize((seed >> 8) % 64);
    if (tail.size() + header + 8 > max_size) tail.clear();
  }
  std::vector<uint8_t> text(data + 8, data + 8 + header);
  const size_t room = max_size - 8 - tail.size();
  text.resize(std::max(room, header));
  const size_t length = seed % 8 == 1 ? header : LLVMFuzzerMutate(text.data(), header, room);
  for (int i = 0; i < 8; ++i)
    data[i] = static_cast<uint8_t>(static_cast<uint64_t>(length) >> (8 * i));
  std::copy_n(text.begin(), length, data + 8);
  std::copy(tail.begin(), tail.end(), data + 8 + length);
  return 8 + length + tail.size();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // A copy of exactly this size: the address sanitizer sees what is read beyond it.
  const std::vector<uint8_t> input(data, data + size);
  SafetensorsReader file;
  const Status status = SafetensorsReader::from_memory(input.data(), size, "the input", &file);
  if (!status.ok()) {
    require(status.code() == StatusCode::kMalformedFile, "malformed:", status.message());
    require(status.message().starts_with("the input: "), "the message names it:", status.message());
    return 0;
  }
  std::vector<std::vector<char>> memory;
  write_again(file, read_all(file, size, &memory));
  return 0;
}
