#include <cstring>
#include <new>
#include <optional>

#include "checkpoint/chunks.h"
#include "checkpoint/hash_worker.h"
#include "checkpoint/output_file.h"
#include "checkpoint/save_to.h"

namespace loraaccel {
namespace {

// Where bytes go, in order; then the header once more.
class Sink {
 public:
  Sink() = default;
  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;
  virtual ~Sink() = default;
  virtual Status append(std::span<const iovec> parts) = 0;
  virtual Status overwrite_header(const std::string& header) = 0;
};

class FileSink final : public Sink {
 public:
  FileSink(OutputFile* file, bool sync) : file_(file), sync_(sync) {}

  Status append(std::span<const iovec> parts) override {
    LORAACCEL_RETURN_IF_ERROR(file_->append(parts));
    if (sync_) file_->start_write_back();  // the disk works while the rest is made ready
    return {};
  }
  Status overwrite_header(const std::string& header) override {
    return file_->overwrite(0, header.data(), header.size());
  }

 private:
  OutputFile* file_;
  bool sync_;
};

class MemorySink final : public Sink {
 public:
  explicit MemorySink(char* memory) : memory_(memory), next_(memory) {}

  Status append(std::span<const iovec> parts) override {
    for (const iovec& part : parts) {
      std::memcpy(next_, part.iov_base, part.iov_len);
      next_ += part.iov_len;
    }
    return {};
  }
  Status overwrite_header(const std::string& header) override {
    std::memcpy(memory_, header.data(), header.size());
    return {};
  }

 private:
  char* memory_;
  char* next_;
};

Status write_data(ChunkProducer* producer, HashWorker* hashes, Sink* sink) {
  Chunk chunk;
  for (int slot = 0;; slot = (slot + 1) % kSlots) {
    if (hashes != nullptr) {
      if (chunk.borrowed) hashes->wait_for_all();
      hashes->wait_for_slot(slot);
    }
    LORAACCEL_RETURN_IF_ERROR(producer->next(slot, &chunk));
    if (chunk.parts.empty()) break;
    if (hashes != nullptr) hashes->add(chunk);
    LORAACCEL_RETURN_IF_ERROR(sink->append(chunk.parts));
  }
  return {};
}

Status write_plan(const std::string& what, const SavePlan& plan, const SaveOptions& options,
                  Sink* sink, SaveReport* report) {
  ChunkProducer producer(what, plan);  // its memory is read by what comes next
  std::optional<HashWorker> hashes;
  if (options.hashes || options.hashes_in_metadata) {
    hashes.emplace(plan.legacy_header);
    LORAACCEL_RETURN_IF_ERROR(hashes->start());
  }
  const iovec header{const_cast<char*>(plan.header.data()), plan.header.size()};
  LORAACCEL_RETURN_IF_ERROR(sink->append({&header, 1}));
  LORAACCEL_RETURN_IF_ERROR(write_data(&producer, hashes ? &*hashes : nullptr, sink));
  report->losses = producer.losses();
  if (hashes) hashes->finish(&report->model_hash, &report->legacy_hash);
  if (options.hashes_in_metadata) {
    LORAACCEL_RETURN_IF_ERROR(
        sink->overwrite_header(plan.header_with(report->model_hash, report->legacy_hash)));
  }
  report->file_size = plan.file_size();
  return {};
}

}  // namespace

Status save_with(const FileOps& ops, const std::string& path, std::span<const TensorToSave> tensors,
                 const SaveMetadata* metadata, const SaveOptions& options, SaveReport* report) {
  SavePlan plan;
  LORAACCEL_RETURN_IF_ERROR(plan_save(path, tensors, metadata, options, &plan));
  OutputFile file(ops);
  LORAACCEL_RETURN_IF_ERROR(file.create(path, plan.file_size()));
  FileSink sink(&file, options.sync);
  SaveReport result;
  LORAACCEL_RETURN_IF_ERROR(write_plan(path, plan, options, &sink, &result));
  LORAACCEL_RETURN_IF_ERROR(file.commit(options.sync));
  if (report != nullptr) *report = std::move(result);
  return {};
}

Status save_safetensors(const std::string& path, std::span<const TensorToSave> tensors,
                        const SaveMetadata* metadata, const SaveOptions& options,
                        SaveReport* report) {
  return save_with(system_file_ops(), path, tensors, metadata, options, report);
}

Status serialize_safetensors(std::span<const TensorToSave> tensors, const SaveMetadata* metadata,
                             const SaveOptions& options,
                             void* (*allocate)(void* host, size_t bytes), void* host,
                             SaveReport* report) {
  const std::string what = "serialize";
  SavePlan plan;
  LORAACCEL_RETURN_IF_ERROR(plan_save(what, tensors, metadata, options, &plan));
  void* memory =
      plan.file_size() > SIZE_MAX ? nullptr : allocate(host, static_cast<size_t>(plan.file_size()));
  if (memory == nullptr)
    return {StatusCode::kOutOfMemory,
            what + ": no memory for " + std::to_string(plan.file_size()) + " bytes"};
  MemorySink sink(static_cast<char*>(memory));
  SaveReport result;
  LORAACCEL_RETURN_IF_ERROR(write_plan(what, plan, options, &sink, &result));
  if (report != nullptr) *report = std::move(result);
  return {};
}

}  // namespace loraaccel
