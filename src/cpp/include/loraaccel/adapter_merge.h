// Adapters merged into a base model's weights, and taken out again.
//
//   W' = round(W + sum_i m_i s_i delta_i)           m: the strength asked for, s: the adapter's factor
//   DoRA:  V = W + s delta,  W' = round(W + m (g V - W)),  g = magnitude / (norm of V's row + eps)
//
// in float32 with one rounding (float64 for F64 weights). One tensor at a time is in memory: a model needs no more than
// its largest weight and a few MB. Everything is checked before anything is written, and files appear complete.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "loraaccel/adapter.h"

namespace loraaccel {

struct AdapterToMerge {
  const Adapter* adapter = nullptr;
  double strength = 1;
};

struct MergeOptions {
  // Floating-point tensors of the result as this type; none: as they are.
  std::optional<FileDType> dtype;
  // Where to keep the original bytes of what changes, for unmerge_adapters(); "": nowhere. Not with dtype. A file, or
  // for a model that is a folder a folder with a file for each .safetensors file of it.
  std::string keep;
  // Go on where layers of an adapter are not in the base model.
  bool allow_unmatched = false;
  // Called before each tensor of the result is made, with how many are done and of how many, from any thread but one at
  // a time. A status that is not ok ends the merge with it: the target is then what it was.
  Status (*progress)(void* host, int64_t done, int64_t total) = nullptr;
  void* progress_host = nullptr;
};

struct MergeReport {
  std::vector<std::string> paths;   // files written
  int64_t changed = 0;              // tensors of the base model
  int64_t tensors = 0;              // all of them
  std::vector<std::string> unused;  // layers of adapters that the base model has not
  std::vector<std::string> notes;
};

// `base`: a .safetensors file, or a folder with such files (shards, components in folders of their names), which `target`
// becomes a copy of. Base models in any spelling of the adapters' table: the original one-file checkpoint, or
// diffusers' folders; models without a table by their layers' paths.
// Fails with kInvalidArgument (adapters of different bases, quantised weights, layers without a weight, no numbers),
// kShapeMismatch, kMalformedFile, kFileError; the target is then what it was.
Status merge_adapters(const std::string& base, std::span<const AdapterToMerge> adapters,
                      const std::string& target, const MergeOptions& options, MergeReport* report);

// The base model again, byte for byte, from the merged one and the file or folder that `MergeOptions::keep` named. Never
// by subtraction, which rounds. kInvalidArgument where what was kept belongs to another merge, or is not of every file.
Status unmerge_adapters(const std::string& merged, const std::string& kept,
                        const std::string& target, MergeReport* report);

}  // namespace loraaccel
