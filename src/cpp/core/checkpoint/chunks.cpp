#include "checkpoint/chunks.h"

#include <algorithm>
#include <new>

#include "checkpoint/cast.h"

namespace loraaccel {

Status ChunkProducer::next(int slot, Chunk* chunk) {
  chunk->parts.clear();
  chunk->slot = -1;
  chunk->borrowed = false;
  size_t filled = 0;
  while (tensor_ < plan_.tensors.size() && filled < kChunkBytes &&
         chunk->parts.size() < kChunkParts && !chunk->borrowed) {
    size_t used = 0;
    LORAACCEL_RETURN_IF_ERROR(take(kChunkBytes - filled, slot, chunk, &used));
    filled += used;
    if (used == 0 && tensor_ < plan_.tensors.size() && filled > 0) break;  // no room for an element
  }
  return {};
}

Status ChunkProducer::source_bytes(const PlannedTensor& t, uint64_t offset, size_t bytes,
                                   const void** data) {
  if (t.tensor->fetch == nullptr) {
    *data = static_cast<const char*>(t.tensor->data) + offset;
    return {};
  }
  *data = nullptr;
  Status status = t.tensor->fetch(t.tensor->fetch_host, offset, bytes, data);
  if (status.ok() && *data == nullptr)
    return {StatusCode::kLenderFailed, what_ + ": tensor '" + t.tensor->name + "': no bytes came"};
  return status;
}

// Adds the next piece of the current tensor, at most `room` bytes of it in the file.
Status ChunkProducer::take(size_t room, int slot, Chunk* chunk, size_t* used) {
  const PlannedTensor& t = plan_.tensors[tensor_];
  if (t.begin == t.end) {
    finish_tensor(t);
    return {};
  }
  if (t.elements == 0) {
    // Memory needs no pieces: the system takes any number of bytes, and nobody waits for them.
    const uint64_t left = t.end - t.begin - offset_;
    const auto bytes = static_cast<size_t>(
        std::min<uint64_t>(left, t.tensor->fetch == nullptr ? kChunkBytes * 16 : room));
    const void* data;
    LORAACCEL_RETURN_IF_ERROR(source_bytes(t, offset_, bytes, &data));
    chunk->parts.push_back({const_cast<void*>(data), bytes});
    chunk->borrowed = t.tensor->fetch != nullptr;
    offset_ += bytes;
    *used = bytes;
    if (bytes == left) finish_tensor(t);
    return {};
  }
  auto& memory = slots_[slot];
  if (memory == nullptr) memory.reset(new (std::nothrow) char[kChunkBytes]);
  if (memory == nullptr) return {StatusCode::kOutOfMemory, what_ + ": no memory to cast in"};
  char* to = memory.get() + (kChunkBytes - room);
  LORAACCEL_RETURN_IF_ERROR(cast_piece(t, room, to, used));
  if (*used == 0) return {};
  const bool follows =
      !chunk->parts.empty() &&
      static_cast<char*>(chunk->parts.back().iov_base) + chunk->parts.back().iov_len == to;
  if (follows) {
    chunk->parts.back().iov_len += *used;
  } else {
    chunk->parts.push_back({to, *used});
  }
  chunk->slot = slot;
  return {};
}

Status ChunkProducer::cast_piece(const PlannedTensor& t, size_t room, char* to, size_t* used) {
  const auto from_size = static_cast<uint64_t>(file_dtype_bits(t.tensor->dtype) / 8);
  const auto to_size = static_cast<uint64_t>(file_dtype_bits(t.dtype) / 8);
  const uint64_t left = t.elements - offset_ / from_size;
  const uint64_t count = std::min({left, room / to_size, kChunkBytes / from_size});
  *used = static_cast<size_t>(count * to_size);
  if (count == 0) return {};
  const void* data;
  LORAACCEL_RETURN_IF_ERROR(source_bytes(t, offset_, count * from_size, &data));
  CastCounts counts;
  cast_elements(t.tensor->dtype, data, t.dtype, to, count, &counts);
  zeros_ += counts.zeros;
  infinities_ += counts.infinities;
  offset_ += count * from_size;
  if (count == left) finish_tensor(t);
  return {};
}

void ChunkProducer::finish_tensor(const PlannedTensor& t) {
  if (zeros_ != 0 || infinities_ != 0) losses_.push_back({t.tensor->name, zeros_, infinities_});
  zeros_ = infinities_ = 0;
  offset_ = 0;
  ++tensor_;
}

}  // namespace loraaccel
