// The base model again: the bytes that a merge kept in the places that it changed.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "adapters/keep_originals.h"
#include "adapters/model_files.h"
#include "adapters/staged_files.h"
#include "adapters/text_file.h"
#include "checkpoint/file_ops.h"
#include "checkpoint/output_file.h"
#include "checkpoint/safetensors_header.h"
#include "loraaccel/adapter_merge.h"

namespace loraaccel {
namespace {

constexpr size_t kCopyBytes = size_t{4} << 20;

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

Status unmerge_file(const std::string& merged_path, const std::string& kept_path,
                    const std::string& path, MergeReport* report) {
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
  LORAACCEL_RETURN_IF_ERROR(file.create(path, size));
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
  report->tensors += static_cast<int64_t>(header.entries.size());
  return file.commit(/*sync=*/true);
}

Status other_files(std::string text, const std::string& name, const char* expected,
                   const std::string& merged) {
  return Status(StatusCode::kInvalidArgument, text.append(name).append(expected).append(merged));
}

// Files of two folders that belong together, and those that were only copied.
Status unmerge_folder(const std::string& merged, const std::string& kept, const std::string& target,
                      StagedFiles* staged, MergeReport* report) {
  std::vector<std::string> names;
  std::vector<std::string> kept_names;
  LORAACCEL_RETURN_IF_ERROR(list_files(merged, &names));
  LORAACCEL_RETURN_IF_ERROR(list_files(kept, &kept_names));
  for (const std::string& name : kept_names) {
    if (std::find(names.begin(), names.end(), name) == names.end())
      return other_files(kept + " has ", name, ", expected only files that are in ", merged);
  }
  for (const std::string& name : names) {
    const std::string from = join_path(merged, name);
    const std::string to = join_path(target, name);
    if (std::find(kept_names.begin(), kept_names.end(), name) == kept_names.end()) {
      if (name.ends_with(".safetensors"))
        return other_files(kept + " has no ", name, ", expected what was kept of each file of ",
                           merged);
      LORAACCEL_RETURN_IF_ERROR(staged->copy(from, to));
      continue;
    }
    std::string path;
    LORAACCEL_RETURN_IF_ERROR(staged->place(to, &path));
    LORAACCEL_RETURN_IF_ERROR(unmerge_file(from, join_path(kept, name), path, report));
  }
  return Status();
}

}  // namespace

Status unmerge_adapters(const std::string& merged, const std::string& kept,
                        const std::string& target, MergeReport* report) {
  MergeReport local;
  if (report == nullptr) report = &local;
  *report = MergeReport();
  if (same_place(kept, target))
    return Status(StatusCode::kInvalidArgument,
                  target + " is what was kept, expected another place for the model");
  if (folder_exists(merged) != folder_exists(kept))
    return Status(StatusCode::kInvalidArgument,
                  merged + " and " + kept + " are a file and a folder, expected two of a kind");
  StagedFiles staged;
  if (folder_exists(merged)) {
    LORAACCEL_RETURN_IF_ERROR(unmerge_folder(merged, kept, target, &staged, report));
  } else {
    std::string path;
    LORAACCEL_RETURN_IF_ERROR(staged.place(target, &path));
    LORAACCEL_RETURN_IF_ERROR(unmerge_file(merged, kept, path, report));
  }
  return staged.commit(&report->paths);
}

}  // namespace loraaccel
