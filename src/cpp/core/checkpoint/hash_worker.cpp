#include "checkpoint/hash_worker.h"

#include <algorithm>
#include <system_error>

namespace loraaccel {
namespace {

// Bytes of a file that the second hash is about.
constexpr uint64_t kWindowBegin = 0x100000;
constexpr uint64_t kWindowEnd = 0x110000;

}  // namespace

HashWorker::HashWorker(const std::string& legacy_header) : at_(legacy_header.size()) {
  if (at_ > kWindowBegin)
    window_.update(legacy_header.data() + kWindowBegin, std::min(at_, kWindowEnd) - kWindowBegin);
}

Status HashWorker::start() {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {
    return {StatusCode::kOutOfMemory, "no thread to hash in"};
  }
  return {};
}

HashWorker::~HashWorker() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (queue_.size() > 1) queue_.resize(1);
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void HashWorker::add(const Chunk& chunk) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(chunk);
  }
  changed_.notify_all();
}

bool HashWorker::uses_slot(int slot) const {
  return std::any_of(queue_.begin(), queue_.end(), [&](const Chunk& c) { return c.slot == slot; });
}

void HashWorker::wait_for_slot(int slot) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !uses_slot(slot); });
}

void HashWorker::wait_for_all() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty(); });
}

void HashWorker::finish(std::string* model_hash, std::string* legacy_hash) {
  wait_for_all();
  *model_hash = hex_text(all_.finish());
  *legacy_hash = hex_text(window_.finish()).substr(0, 8);
}

void HashWorker::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    const Chunk& chunk = queue_.front();  // (elements of a deque stay where they are)
    lock.unlock();
    for (const iovec& part : chunk.parts) take(part);
    lock.lock();
    queue_.pop_front();
    changed_.notify_all();
  }
}

void HashWorker::take(const iovec& part) {
  all_.update(part.iov_base, part.iov_len);
  const uint64_t end = at_ + part.iov_len;
  const uint64_t first = std::max(at_, kWindowBegin);
  const uint64_t last = std::min(end, kWindowEnd);
  if (first < last)
    window_.update(static_cast<const char*>(part.iov_base) + (first - at_),
                   static_cast<size_t>(last - first));
  at_ = end;
}

}  // namespace loraaccel
