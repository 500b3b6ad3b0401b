// Which tensors of a base model change, and by what.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "adapters/name_table.h"
#include "loraaccel/adapter_merge.h"
#include "loraaccel/safetensors.h"

namespace loraaccel {

// Rows [row, row + rows) of a weight get rows [entry_row, ...) of an entry.
struct MergeShare {
  const AdapterEntry* entry = nullptr;
  double strength = 1;
  int64_t entry_row = 0;
  int64_t row = 0;
  int64_t rows = 0;
};

// All that happens to one tensor. For vectors (biases, norms) `role` says which tensor of the entries it is.
struct MergeWork {
  bool vector = false;
  AdapterRole role = AdapterRole::kDiffBias;
  std::vector<MergeShare> shares;
};

// Entries to be merged, by where they belong, and what of them found its weight.
class MergePlan {
 public:
  // kInvalidArgument: adapters of different bases, kinds that cannot be merged, numbers that are not finite.
  Status prepare(std::span<const AdapterToMerge> adapters);

  // What happens to each tensor of a file. `component`: what the file's folder is called, or "".
  // kShapeMismatch and kInvalidArgument name the file, the tensor and the key.
  Status plan(const SafetensorsReader& file, const std::string& component,
              std::map<std::string, MergeWork, std::less<>>* work);

  // Layers, and biases of layers, that no file had.
  std::vector<std::string> unused() const;

 private:
  struct Item {
    const AdapterEntry* entry;
    double strength;
    int64_t rows_placed = 0;  // of its weight
    bool bias_placed = false;
  };
  struct Target {
    const Spelled* layer = nullptr;  // null: the path itself
    int component = -1;
    std::string path;
    bool bias = false;
  };
  bool find_target(std::string_view key, const std::string& component, int64_t rows,
                   Target* target) const;
  Status plan_tensor(const SafetensorsReader& file, const TensorEntry& tensor, const Target& target,
                     MergeWork* work);
  Status place(const SafetensorsReader& file, const TensorEntry& tensor, const Target& target,
               Item* item, MergeWork* work);

  const NameTable* table_ = nullptr;
  std::vector<AdapterEntry> turned_;  // of layers stored [in, out]
  std::vector<Item> items_;
  std::map<std::pair<std::string, std::string>, std::vector<size_t>>
      by_layer_;  // component (or ""), path
};

}  // namespace loraaccel
