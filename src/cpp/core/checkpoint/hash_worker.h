// The two hashes of a file, computed in a thread of its own while the file is written.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "checkpoint/chunks.h"
#include "checkpoint/sha256.h"

namespace loraaccel {

class HashWorker {
 public:
  // The header counts for the second hash only.
  explicit HashWorker(const std::string& legacy_header);
  HashWorker(const HashWorker&) = delete;
  HashWorker& operator=(const HashWorker&) = delete;
  ~HashWorker();  // drops what is left to do

  // Starts the thread; kOutOfMemory where the system has none.
  Status start();
  // The bytes must stay until the slot is free, or everything is done.
  void add(const Chunk& chunk);
  void wait_for_slot(int slot);
  void wait_for_all();
  // To be called once, at the end.
  void finish(std::string* model_hash, std::string* legacy_hash);

 private:
  void run();
  void take(const iovec& part);
  bool uses_slot(int slot) const;

  Sha256 all_;
  Sha256 window_;
  uint64_t at_;  // in the file of the second hash
  std::thread thread_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Chunk> queue_;  // the first one is in work
  bool stopping_ = false;
};

}  // namespace loraaccel
