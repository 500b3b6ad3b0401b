// What a save will write, known before its first byte is: everything that can be wrong with the arguments is found here.
#pragma once

#include <string>
#include <vector>

#include "loraaccel/safetensors.h"

namespace loraaccel {

struct PlannedTensor {
  const TensorToSave* tensor;
  FileDType dtype;  // in the file
  uint64_t begin;   // in the data
  uint64_t end;
  uint64_t elements;  // 0 where the dtype is not changed
};

struct SavePlan {
  std::vector<PlannedTensor> tensors;  // in the order of the file
  SaveMetadata metadata;
  bool has_metadata = false;
  std::string header;         // with placeholders where SaveOptions::hashes_in_metadata
  std::string legacy_header;  // of the file that legacy_hash is about; empty without hashes
  uint64_t data_bytes = 0;

  uint64_t file_size() const { return header.size() + data_bytes; }
  // The header with these hashes: as long as `header`.
  std::string header_with(const std::string& model_hash, const std::string& legacy_hash) const;
};

// `what` stands for the path in messages. The plan refers to the tensors.
Status plan_save(const std::string& what, std::span<const TensorToSave> tensors,
                 const SaveMetadata* metadata, const SaveOptions& options, SavePlan* plan);

}  // namespace loraaccel
