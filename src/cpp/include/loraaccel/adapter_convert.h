// Adapters written in the spelling of another tool.
//
// Where only names change, tensors are the bytes of the file that was read. Layers that one spelling divides and another
// does not are divided or joined exactly; see Note [Rows of an adapter] in core/adapters/rows.h.
#pragma once

#include <string>
#include <vector>

#include "loraaccel/adapter.h"

namespace loraaccel {

struct ConvertOptions {
  std::string format;  // one of adapter_formats()
  // Multiply the factors into the weights, so that they are 1. Formats that have no place for alpha need no asking.
  bool fold_alpha = false;
  // Floating-point tensors as this type, rounded once.
  std::optional<FileDType> dtype;
  // Where the cast would make small numbers zero: multiply the factors by a power of two, and divide alpha by it.
  bool rescue = false;
};

// One file to be written.
struct SpelledFile {
  std::string folder;                  // "" or a component's name
  std::vector<AdapterTensor> tensors;  // by key
  AdapterMetadata metadata;
  std::string config;  // adapter_config.json, of PEFT's format
};

// kInvalidArgument names layers that the format has no name for, and tensors that it has no place for.
Status spell_adapter(const Adapter& adapter, const ConvertOptions& options,
                     std::vector<SpelledFile>* files, std::vector<std::string>* notes);

struct WriteReport {
  std::vector<std::string> paths;  // files written
  std::vector<std::string> notes;
  std::string
      model_hash;  // of the only file, as kohya's tools compute it; "" where there are several
};

// Writes the adapter to `path`: a file, or for PEFT's format a folder (with one for each component where there are
// several). All of it or nothing: files appear complete. Errors as of spell_adapter(), and kFileError.
Status write_adapter(const Adapter& adapter, const std::string& path, const ConvertOptions& options,
                     WriteReport* report);

// read_adapter() and write_adapter().
Status convert_adapter(const std::string& source, const std::string& target,
                       const ReadAdapterOptions& read, const ConvertOptions& options,
                       Adapter* adapter, WriteReport* report);

// delta, rows of all [out] by columns [in k k], in float64: what the adapter adds to the weight, without DoRA. For tests
// and small tools. kInvalidArgument for kinds without one.
Status adapter_delta(const AdapterEntry& entry, std::vector<double>* delta, int64_t* rows,
                     int64_t* columns);

// Frobenius norm of that; none for kinds without one.
Status adapter_norm(const AdapterEntry& entry, std::optional<double>* norm);

// kohya's hashes of a file as it is, as 64 and 8 hex digits: SaveReport in safetensors.h says of what.
Status adapter_file_hashes(const std::string& path, std::string* model_hash,
                           std::string* legacy_hash);

}  // namespace loraaccel
