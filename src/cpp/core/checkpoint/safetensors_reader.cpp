#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>

#include "checkpoint/file_ops.h"
#include "checkpoint/safetensors_header.h"
#include "loraaccel/safetensors.h"

namespace loraaccel {

static_assert(std::endian::native == std::endian::little,
              "files are little-endian, and nothing here swaps bytes");

struct SafetensorsReader::File {
  std::string path;
  uint64_t size = 0;
  uint64_t data_offset = 0;
  SafetensorsHeader header;
  const char* memory = nullptr;  // from_memory()'s
  int fd = -1;
  mutable std::mutex mutex;
  mutable void* mapping = nullptr;  // of the whole file; null before the first view()

  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (mapping != nullptr) ::munmap(mapping, static_cast<size_t>(size));
    const FileOps& ops = system_file_ops();
    if (fd >= 0) ops.close(ops.state, fd);
  }

  // Copies from anywhere in the file.
  Status read(uint64_t offset, uint64_t bytes, void* destination) const {
    if (memory != nullptr || bytes == 0) {
      if (bytes > 0) std::memcpy(destination, memory + offset, static_cast<size_t>(bytes));
      return {};
    }
    const FileOps& ops = system_file_ops();
    char* to = static_cast<char*>(destination);
    while (bytes > 0) {
      const auto want = static_cast<size_t>(std::min<uint64_t>(bytes, 1U << 30));
      const ssize_t got = ops.pread(ops.state, fd, to, want, static_cast<int64_t>(offset));
      if (got < 0) return file_error(path, "reading", errno);
      if (got == 0)
        return {StatusCode::kMalformedFile,
                path + ": the file ends at byte " + std::to_string(offset) + ", expected " +
                    std::to_string(size) + " bytes: it has been cut since it was opened"};
      to += got;
      offset += static_cast<uint64_t>(got);
      bytes -= static_cast<uint64_t>(got);
    }
    return {};
  }

  // Reads the header; `size` and where to read from are set.
  Status index() {
    char head[64];
    const uint64_t known = std::min<uint64_t>(size, sizeof head);
    LORAACCEL_RETURN_IF_ERROR(read(0, known, head));
    uint64_t length;
    LORAACCEL_RETURN_IF_ERROR(
        read_header_length(path, {head, static_cast<size_t>(known)}, size, &length));
    std::unique_ptr<char[]> text(new (std::nothrow) char[length + 1]);
    if (text == nullptr)
      return {StatusCode::kOutOfMemory,
              path + ": no memory for a header of " + std::to_string(length) + " bytes"};
    LORAACCEL_RETURN_IF_ERROR(read(8, length, text.get()));
    text[length] = '\0';
    data_offset = 8 + length;
    return parse_header(path, std::move(text), length, size, &header);
  }
};

Status SafetensorsReader::open(const std::string& path, SafetensorsReader* reader) {
  if (path.find('\0') != std::string::npos)
    return {StatusCode::kInvalidArgument, path + ": a path with a null byte"};
  const auto file = std::make_shared<File>();
  const FileOps& ops = system_file_ops();
  file->path = path;
  file->fd = ops.open(ops.state, path.c_str(), O_RDONLY | O_NONBLOCK, 0);  // (a pipe must not wait)
  if (file->fd < 0) return file_error(path, "opening", errno);
  const int64_t size = ops.size(ops.state, file->fd);
  if (size < 0) return file_error(path, "opening as a regular file", errno);
  file->size = static_cast<uint64_t>(size);
  LORAACCEL_RETURN_IF_ERROR(file->index());
  reader->file_ = file;
  return {};
}

Status SafetensorsReader::from_memory(const void* data, size_t size, const std::string& name,
                                      SafetensorsReader* reader) {
  const auto file = std::make_shared<File>();
  file->path = name;
  file->memory = data == nullptr ? "" : static_cast<const char*>(data);
  file->size = size;
  LORAACCEL_RETURN_IF_ERROR(file->index());
  reader->file_ = file;
  return {};
}

std::span<const TensorEntry> SafetensorsReader::entries() const noexcept {
  if (file_ == nullptr) return {};
  return file_->header.entries;
}

std::span<const uint32_t> SafetensorsReader::by_name() const noexcept {
  if (file_ == nullptr) return {};
  return file_->header.by_name;
}

const TensorEntry* SafetensorsReader::find(std::string_view name) const noexcept {
  const auto all = entries();
  const auto order = by_name();
  const auto at = std::lower_bound(order.begin(), order.end(), name,
                                   [&](uint32_t i, std::string_view n) { return all[i].name < n; });
  return at != order.end() && all[*at].name == name ? &all[*at] : nullptr;
}

std::span<const MetadataItem> SafetensorsReader::metadata() const noexcept {
  if (file_ == nullptr) return {};
  return file_->header.metadata;
}

bool SafetensorsReader::has_metadata() const noexcept {
  return file_ != nullptr && file_->header.has_metadata;
}

const std::string& SafetensorsReader::path() const noexcept {
  static const std::string none;
  return file_ == nullptr ? none : file_->path;
}

uint64_t SafetensorsReader::file_size() const noexcept {
  return file_ == nullptr ? 0 : file_->size;
}

uint64_t SafetensorsReader::data_offset() const noexcept {
  return file_ == nullptr ? 0 : file_->data_offset;
}

Status SafetensorsReader::read(const TensorEntry& entry, uint64_t offset, uint64_t bytes,
                               void* destination) const {
  if (file_ == nullptr) return {StatusCode::kInvalidArgument, "read: no file is open"};
  if (offset > entry.size_bytes() || bytes > entry.size_bytes() - offset)
    return {StatusCode::kInvalidArgument, path() + ": tensor '" + std::string(entry.name) +
                                              "' has " + std::to_string(entry.size_bytes()) +
                                              " bytes, asked for " + std::to_string(bytes) +
                                              " from " + std::to_string(offset)};
  return file_->read(file_->data_offset + entry.begin + offset, bytes, destination);
}

Status SafetensorsReader::view(const TensorEntry& entry, void** data) const {
  if (file_ == nullptr) return {StatusCode::kInvalidArgument, "view: no file is open"};
  const uint64_t at = file_->data_offset + entry.begin;
  if (file_->memory != nullptr) {
    *data = const_cast<char*>(file_->memory + at);
    return {};
  }
  const std::lock_guard lock(file_->mutex);
  if (file_->mapping == nullptr) {
    if (file_->size > SIZE_MAX)
      return {StatusCode::kOutOfMemory, path() + ": the file is larger than the address space"};
#ifdef MAP_NORESERVE
    constexpr int kFlags = MAP_PRIVATE | MAP_NORESERVE;
#else
    constexpr int kFlags = MAP_PRIVATE;
#endif
    void* mapping = ::mmap(nullptr, static_cast<size_t>(file_->size), PROT_READ | PROT_WRITE,
                           kFlags, file_->fd, 0);
    if (mapping == MAP_FAILED) return file_error(path(), "mapping", errno);
    file_->mapping = mapping;
  }
  *data = static_cast<char*>(file_->mapping) + at;
  return {};
}

}  // namespace loraaccel
