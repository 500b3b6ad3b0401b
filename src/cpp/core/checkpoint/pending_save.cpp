#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "checkpoint/chunks.h"
#include "checkpoint/save_to.h"

namespace loraaccel {

struct PendingSave::Job {
  std::string path;
  std::unique_ptr<char[]> memory;
  std::vector<TensorToSave> tensors;  // in `memory`
  SaveMetadata metadata;
  bool has_metadata = false;
  SaveOptions options;
  std::vector<CastLoss> losses;
  std::thread thread;
  std::mutex mutex;
  std::condition_variable ended;
  bool is_done = false;
  Status status;
  SaveReport report;

  void run() {
    SaveReport result;
    Status outcome =
        save_safetensors(path, tensors, has_metadata ? &metadata : nullptr, options, &result);
    result.losses = std::move(losses);
    memory.reset();
    const std::lock_guard lock(mutex);
    status = std::move(outcome);
    report = std::move(result);
    is_done = true;
    ended.notify_all();
  }
};

PendingSave::PendingSave() = default;
PendingSave::PendingSave(PendingSave&& other) noexcept = default;
PendingSave& PendingSave::operator=(PendingSave&& other) noexcept {
  if (this != &other) {
    const Status lost = wait();
    static_cast<void>(lost);
    job_ = std::move(other.job_);
  }
  return *this;
}
PendingSave::~PendingSave() {
  const Status lost = wait();
  static_cast<void>(lost);
}

bool PendingSave::done() const {
  if (job_ == nullptr) return true;
  const std::lock_guard lock(job_->mutex);
  return job_->is_done;
}

Status PendingSave::wait(SaveReport* report) {
  if (job_ == nullptr) return {};
  std::unique_lock lock(job_->mutex);
  job_->ended.wait(lock, [&] { return job_->is_done; });
  if (job_->thread.joinable()) job_->thread.join();
  if (report != nullptr) *report = job_->report;
  return job_->status;
}

Status save_safetensors_async(const std::string& path, std::span<const TensorToSave> tensors,
                              const SaveMetadata* metadata, const SaveOptions& options,
                              PendingSave* pending) {
  SavePlan plan;
  LORAACCEL_RETURN_IF_ERROR(plan_save(path, tensors, metadata, options, &plan));
  auto job = std::make_unique<PendingSave::Job>();
  job->memory.reset(new (std::nothrow) char[plan.data_bytes]);
  if (job->memory == nullptr)
    return {StatusCode::kOutOfMemory,
            path + ": no memory for a copy of " + std::to_string(plan.data_bytes) + " bytes"};
  ChunkProducer producer(path, plan);
  char* to = job->memory.get();
  for (Chunk chunk;;) {
    LORAACCEL_RETURN_IF_ERROR(producer.next(0, &chunk));
    if (chunk.parts.empty()) break;
    for (const iovec& part : chunk.parts) {
      std::memcpy(to, part.iov_base, part.iov_len);
      to += part.iov_len;
    }
  }
  for (const PlannedTensor& t : plan.tensors) {
    job->tensors.push_back({.name = t.tensor->name,
                            .dtype = t.dtype,
                            .shape = t.tensor->shape,
                            .data = job->memory.get() + t.begin});
  }
  job->path = path;
  job->has_metadata = metadata != nullptr;
  if (metadata != nullptr) job->metadata = *metadata;
  job->options = options;
  job->options.float_dtype.reset();
  job->losses = producer.losses();
  try {
    job->thread = std::thread([running = job.get()] { running->run(); });
  } catch (const std::system_error&) {
    return {StatusCode::kOutOfMemory, path + ": no thread to save in"};
  }
  *pending = PendingSave();
  pending->job_ = std::move(job);
  return {};
}

}  // namespace loraaccel
