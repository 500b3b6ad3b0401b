// The tensors of a plan as a sequence of pieces of memory, in the order of the file.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <vector>

#include "checkpoint/save_plan.h"

namespace loraaccel {

// Enough that a call to the system costs nothing beside what it does; small enough for the caches, and for machines
// with little memory.
constexpr size_t kChunkBytes = size_t{4} << 20;
constexpr size_t kChunkParts = 256;
constexpr int kSlots = 3;

struct Chunk {
  std::vector<iovec> parts;
  int slot = -1;          // its bytes are in this slot of the cast's memory
  bool borrowed = false;  // its bytes are gone after the next fetch
};

class ChunkProducer {
 public:
  ChunkProducer(const std::string& what, const SavePlan& plan) : what_(what), plan_(plan) {}

  // The next chunk; one without parts at the end. Writes into `slot`, which nobody may be reading then.
  Status next(int slot, Chunk* chunk);
  const std::vector<CastLoss>& losses() const { return losses_; }

 private:
  Status take(size_t room, int slot, Chunk* chunk, size_t* used);
  Status source_bytes(const PlannedTensor& t, uint64_t offset, size_t bytes, const void** data);
  Status cast_piece(const PlannedTensor& t, size_t room, char* to, size_t* used);
  void finish_tensor(const PlannedTensor& t);

  const std::string& what_;
  const SavePlan& plan_;
  size_t tensor_ = 0;
  uint64_t offset_ = 0;  // in the tensor, in bytes of the source
  uint64_t zeros_ = 0;
  uint64_t infinities_ = 0;
  std::unique_ptr<char[]> slots_[kSlots];
  std::vector<CastLoss> losses_;
};

}  // namespace loraaccel
