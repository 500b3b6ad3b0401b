#include "adapters/keep_originals.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <set>

#include "adapters/staged_files.h"
#include "checkpoint/file_ops.h"
#include "checkpoint/output_file.h"
#include "checkpoint/safetensors_header.h"
#include "checkpoint/sha256.h"
#include "loraaccel/adapter_merge.h"

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

const std::string* find_metadata(const SafetensorsReader& file, std::string* value) {
  for (const MetadataItem& item : file.metadata()) {
    if (item.key != kIdentityKey) continue;
    *value = item.value;
    return value;
  }
  return nullptr;
}

Status copy_tensor(const SafetensorsReader& from, const TensorEntry& entry,
                   std::vector<char>* memory, OutputFile* file) {
  for (uint64_t offset = 0; offset < entry.size_bytes(); offset += kCopyBytes) {
    const uint64_t bytes = std::min<uint64_t>(kCopyBytes, entry.size_bytes() - offset);
    LORAACCEL_RETURN_IF_ERROR(from.read(entry, offset, bytes, memory->data()));
    const iovec part{memory->data(), bytes};
    LORAACCEL_RETURN_IF_ERROR(file->append({&part, 1}));
  }
  return Status();
}

// The kept header, checked as that of a file with as much data as it says.
Status original_header(const SafetensorsReader& kept, std::string* bytes,
                       SafetensorsHeader* header) {
  const TensorEntry* entry = kept.find(kHeaderName);
  if (entry == nullptr || entry->dtype != FileDType::kU8 || entry->size_bytes() < 8)
    return Status(StatusCode::kInvalidArgument,
                  kept.path() + " was not kept by a merge: it has no tensor " + kHeaderName);
  bytes->resize(entry->size_bytes());
  LORAACCEL_RETURN_IF_ERROR(kept.read(*entry, 0, bytes->size(), bytes->data()));
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i)
    length |= static_cast<uint64_t>(static_cast<uint8_t>((*bytes)[i])) << (8 * i);
  if (length != bytes->size() - 8)
    return Status(StatusCode::kMalformedFile, kept.path() + ": " + kHeaderName + " is no header");
  uint64_t data = 0;
  const std::string* known = nullptr;
  std::string value;
  for (const MetadataItem& item : kept.metadata()) {
    if (item.key != "loraaccel.file_size") continue;
    value = item.value;
    known = &value;
  }
  if (known == nullptr)
    return Status(StatusCode::kMalformedFile, kept.path() + " does not say the original's size");
  for (const char c : value) {
    if (c < '0' || c > '9' || data > (uint64_t{1} << 58))
      return Status(StatusCode::kMalformedFile, kept.path() + ": no size");
    data = data * 10 + static_cast<uint64_t>(c - '0');
  }
  auto text = std::make_unique<char[]>(length + 1);
  std::memcpy(text.get(), bytes->data() + 8, length);
  return parse_header(kept.path(), std::move(text), length, data, header);
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

Status unmerge_adapters(const std::string& merged_path, const std::string& kept_path,
                        const std::string& target, MergeReport* report) {
  MergeReport local;
  if (report == nullptr) report = &local;
  *report = MergeReport();
  if (same_place(kept_path, target))
    return Status(StatusCode::kInvalidArgument,
                  target + " is the kept file, expected another place for the model");
  SafetensorsReader merged;
  SafetensorsReader kept;
  LORAACCEL_RETURN_IF_ERROR(SafetensorsReader::open(merged_path, &merged));
  LORAACCEL_RETURN_IF_ERROR(SafetensorsReader::open(kept_path, &kept));
  std::string of_merged;
  std::string of_kept;
  std::string bytes;
  SafetensorsHeader header;
  LORAACCEL_RETURN_IF_ERROR(original_header(kept, &bytes, &header));
  if (find_metadata(kept, &of_kept) == nullptr || find_metadata(merged, &of_merged) == nullptr ||
      of_kept != of_merged)
    return Status(StatusCode::kInvalidArgument, kept_path + " was not kept when " + merged_path +
                                                    " was merged, expected the same " +
                                                    kIdentityKey + " in both files' metadata");
  uint64_t size = bytes.size();
  for (const TensorEntry& entry : header.entries) {
    const TensorEntry* found = kept.find(entry.name);
    if (found == nullptr) found = merged.find(entry.name);
    if (found == nullptr || found->dtype != entry.dtype ||
        found->size_bytes() != entry.size_bytes())
      return Status(StatusCode::kInvalidArgument,
                    merged_path + ": " + std::string(entry.name) +
                        " is not the tensor that it was after the merge");
    size += entry.size_bytes();
  }
  OutputFile file(system_file_ops());
  LORAACCEL_RETURN_IF_ERROR(file.create(target, size));
  const iovec start{bytes.data(), bytes.size()};
  LORAACCEL_RETURN_IF_ERROR(file.append({&start, 1}));
  std::vector<char> memory(kCopyBytes);
  for (const TensorEntry& entry : header.entries) {
    const TensorEntry* found = kept.find(entry.name);
    report->changed += found != nullptr ? 1 : 0;
    LORAACCEL_RETURN_IF_ERROR(found != nullptr
                                  ? copy_tensor(kept, *found, &memory, &file)
                                  : copy_tensor(merged, *merged.find(entry.name), &memory, &file));
  }
  report->tensors = static_cast<int64_t>(header.entries.size());
  report->paths.push_back(target);
  return file.commit(/*sync=*/true);
}

}  // namespace loraaccel
