#include "adapters/keep_originals.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

#include "checkpoint/file_ops.h"
#include "checkpoint/sha256.h"

namespace loraaccel {
namespace {

constexpr size_t kCopyBytes = size_t{4} << 20;

Status read_start(const std::string& path, uint64_t bytes, std::string* text) {
  const FileOps& ops = system_file_ops();
  const int fd = ops.open(ops.state, path.c_str(), O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return file_error(path, "opening", errno);
  text->resize(bytes);
  Status status;
  for (uint64_t done = 0; done < bytes && status.ok();) {
    const ssize_t got =
        ops.pread(ops.state, fd, text->data() + done, bytes - done, static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) status = file_error(path, "reading", errno);
    if (got == 0)
      status = Status(StatusCode::kMalformedFile, path + " has become shorter while it was read");
    if (got > 0) done += static_cast<uint64_t>(got);
  }
  ops.close(ops.state, fd);
  return status;
}

struct Lent {
  const SafetensorsReader* reader;
  const TensorEntry* entry;
  std::vector<char>* memory;
};

Status lend(void* host, uint64_t offset, size_t bytes, const void** data) {
  const Lent& lent = *static_cast<Lent*>(host);
  if (lent.memory->size() < bytes) lent.memory->resize(bytes);
  LORAACCEL_RETURN_IF_ERROR(lent.reader->read(*lent.entry, offset, bytes, lent.memory->data()));
  *data = lent.memory->data();
  return Status();
}

}  // namespace

Status keep_originals(const SafetensorsReader& base, const std::vector<const TensorEntry*>& changed,
                      const std::string& path, std::string* identity) {
  std::string header;
  LORAACCEL_RETURN_IF_ERROR(read_start(base.path(), base.data_offset(), &header));
  std::vector<char> memory(kCopyBytes);
  Sha256 hash;
  hash.update(header.data(), header.size());
  for (const TensorEntry* entry : changed) {
    for (uint64_t offset = 0; offset < entry->size_bytes(); offset += kCopyBytes) {
      const uint64_t bytes = std::min<uint64_t>(kCopyBytes, entry->size_bytes() - offset);
      LORAACCEL_RETURN_IF_ERROR(base.read(*entry, offset, bytes, memory.data()));
      hash.update(memory.data(), bytes);
    }
  }
  *identity = hex_text(hash.finish());
  std::vector<Lent> lents;
  lents.reserve(changed.size());
  std::vector<TensorToSave> tensors;
  TensorToSave start;
  start.name = kHeaderName;
  start.dtype = FileDType::kU8;
  start.shape = {static_cast<int64_t>(header.size())};
  start.data = header.data();
  tensors.push_back(start);
  for (const TensorEntry* entry : changed) {
    lents.push_back({&base, entry, &memory});
    TensorToSave t;
    t.name = entry->name;
    t.dtype = entry->dtype;
    t.shape.assign(entry->shape.begin(), entry->shape.end());
    t.fetch = &lend;
    t.fetch_host = &lents.back();
    tensors.push_back(std::move(t));
  }
  const SaveMetadata metadata = {{kIdentityKey, *identity},
                                 {"loraaccel.file_size", std::to_string(base.file_size())}};
  return save_safetensors(path, tensors, &metadata, {});
}

}  // namespace loraaccel
