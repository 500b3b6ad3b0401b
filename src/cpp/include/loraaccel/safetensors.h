// Reading and writing safetensors files: 8 bytes N (little-endian), N bytes of JSON, the tensors' bytes.
//
// A header is never trusted. Refused with kMalformedFile, before any tensor is read: a length N beyond the file or
// beyond 100,000,000; text that is not UTF-8 or not JSON; a tensor whose bytes are not what its shape and dtype need;
// tensors that overlap, leave holes, or end before or after the file does. Stricter than the reference library: a name
// that occurs twice, more than 64 dimensions or levels of nesting, a dimension of 2^63 or more.
//
// Paths are UTF-8. Every message names the path and, where there is one, the tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "loraaccel/file_dtype.h"
#include "loraaccel/status.h"

namespace loraaccel {

// ---- reading ---------------------------------------------------------------------------------------------------------

// One tensor of an open file. The views live as long as a reader of the file.
struct TensorEntry {
  std::string_view name;
  FileDType dtype = FileDType::kF32;
  std::span<const int64_t> shape;  // empty: a scalar
  uint64_t begin = 0;              // bytes from the start of the data; any alignment
  uint64_t end = 0;

  uint64_t size_bytes() const noexcept { return end - begin; }
};

struct MetadataItem {
  std::string_view key;
  std::string_view value;
};

// A file or a block of memory, opened and checked. Copies are cheap and share it; all functions are thread-safe.
class SafetensorsReader {
 public:
  SafetensorsReader() = default;

  // Reads and checks the header; kFileError, kMalformedFile. The file stays open, so that replacing it by rename
  // changes nothing for this reader.
  static Status open(const std::string& path, SafetensorsReader* reader);
  // The same over memory, which must outlive the reader. `name` stands for the path in messages.
  static Status from_memory(const void* data, size_t size, const std::string& name,
                            SafetensorsReader* reader);

  // In the order of their bytes in the file.
  std::span<const TensorEntry> entries() const noexcept;
  // Indices into entries(), sorted by name.
  std::span<const uint32_t> by_name() const noexcept;
  // Null where there is none of that name. Logarithmic.
  const TensorEntry* find(std::string_view name) const noexcept;
  // In the order of the file. has_metadata() is true for an empty object too, and false for null.
  std::span<const MetadataItem> metadata() const noexcept;
  bool has_metadata() const noexcept;
  const std::string& path() const noexcept;
  uint64_t file_size() const noexcept;
  // Where the tensors' bytes begin in the file: 8 + N.
  uint64_t data_offset() const noexcept;

  // Copies `bytes` bytes from `offset` within the tensor. kFileError where the file cannot be read, kMalformedFile
  // where it has become shorter since it was opened; kInvalidArgument beyond the tensor's end.
  Status read(const TensorEntry& entry, uint64_t offset, uint64_t bytes, void* destination) const;

  // The tensor's bytes without a copy: the file is mapped at the first call, for as long as a reader of it exists.
  // Not aligned. Pages are private: writing to them changes the memory, never the file. As with every mapping, touching
  // bytes that another process has cut off the file ends the program with SIGBUS; read() reports an error instead.
  // Over memory from from_memory(), the pointer is into it, and must not be written to.
  Status view(const TensorEntry& entry, void** data) const;

  // False for a reader that nothing has been opened with.
  explicit operator bool() const noexcept { return file_ != nullptr; }

 private:
  struct File;
  std::shared_ptr<const File> file_;
};

// ---- writing ---------------------------------------------------------------------------------------------------------

// Points *data to bytes [offset, offset + bytes) of a tensor, row-major. They are used until the next call for any
// tensor of the save, or its end. Called by the thread that saves, offsets of a tensor ascending. A failure ends the
// save and is what it returns.
using TensorFetch = Status (*)(void* host, uint64_t offset, size_t bytes, const void** data);

// A tensor to be saved: its dense, row-major bytes in memory, or a function that lends them piece by piece (from another
// device, or gathered from strides).
struct TensorToSave {
  std::string name;
  FileDType dtype = FileDType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;
  TensorFetch fetch = nullptr;  // used where it is not null
  void* fetch_host = nullptr;
};

using SaveMetadata = std::vector<std::pair<std::string, std::string>>;

struct SaveOptions {
  // F64, F32, F16 and BF16 tensors are written as this type, rounded once, to nearest even: one of these, F8_E4M3 or
  // F8_E5M2. What is too large becomes infinite; F8_E4M3 has no infinity, there it becomes NaN.
  std::optional<FileDType> float_dtype = std::nullopt;
  // Fills in SaveReport::model_hash and legacy_hash.
  bool hashes = false;
  // And writes them into the metadata, as sshs_model_hash and sshs_legacy_hash.
  bool hashes_in_metadata = false;
  // Waits until the bytes are on the disk before the new file takes the old one's place. Without it a crash of the
  // program loses nothing, a crash of the machine may.
  bool sync = true;
};

// What a cast did to one tensor. Only tensors that it did something to are reported.
struct CastLoss {
  std::string name;
  uint64_t flushed_to_zero = 0;  // elements that were not zero, and are
  uint64_t became_infinite = 0;  // elements that were finite, and are infinite or NaN
};

struct SaveReport {
  uint64_t file_size = 0;
  // SHA-256 of all tensors' bytes, 64 hex digits; and the first 8 digits of that of bytes [0x100000, 0x110000) of a file
  // whose metadata is only the keys that begin with "ss_". Empty without SaveOptions::hashes.
  std::string model_hash;
  std::string legacy_hash;
  std::vector<CastLoss> losses;
};

// Writes tensors in the reference library's order (rank of the dtype descending, then name) and metadata sorted by key:
// the same tensors give the same bytes. metadata null: none. The bytes go to a new file beside the target, which takes
// the target's place by rename when it is complete: until then the target is untouched, whatever happens, and so is
// whoever has it mapped. The new file's mode is 0666 without the umask's bits; a symbolic link is followed.
// What a save that was killed has left beside the target is removed by the next one.
// Needs a few MB of memory beside the tensors. kInvalidArgument (a name twice, a shape that does not fit ...),
// kUnsupportedDtype, kFileError, kLenderFailed; all leave the target as it was.
Status save_safetensors(const std::string& path, std::span<const TensorToSave> tensors,
                        const SaveMetadata* metadata, const SaveOptions& options,
                        SaveReport* report = nullptr);

// The same bytes into memory: `allocate` is called once, with their number, and returns where they go (null: a failure,
// kOutOfMemory).
Status serialize_safetensors(std::span<const TensorToSave> tensors, const SaveMetadata* metadata,
                             const SaveOptions& options,
                             void* (*allocate)(void* host, size_t bytes), void* host,
                             SaveReport* report = nullptr);

// A save that goes on in a thread of its own. The destructor waits for it, and its outcome is lost then.
class PendingSave {
 public:
  PendingSave();
  PendingSave(PendingSave&& other) noexcept;
  PendingSave& operator=(PendingSave&& other) noexcept;
  PendingSave(const PendingSave&) = delete;
  PendingSave& operator=(const PendingSave&) = delete;
  ~PendingSave();

  // True when wait() will not have to.
  bool done() const;
  // The outcome of the save; may be called again. Ok where nothing was started.
  Status wait(SaveReport* report = nullptr);

 private:
  friend Status save_safetensors_async(const std::string&, std::span<const TensorToSave>,
                                       const SaveMetadata*, const SaveOptions&, PendingSave*);
  struct Job;
  std::unique_ptr<Job> job_;
};

// save_safetensors() of a copy of the tensors, cast already, that is made before this returns: they may change then.
// Fails at once, with nothing started, for what is wrong with the arguments, and where there is no memory for the copy.
Status save_safetensors_async(const std::string& path, std::span<const TensorToSave> tensors,
                              const SaveMetadata* metadata, const SaveOptions& options,
                              PendingSave* pending);

}  // namespace loraaccel
