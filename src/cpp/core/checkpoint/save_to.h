// A plan's bytes, written somewhere.
#pragma once

#include "checkpoint/file_ops.h"
#include "checkpoint/save_plan.h"

namespace loraaccel {

// save_safetensors() with another table of calls to the system.
Status save_with(const FileOps& ops, const std::string& path, std::span<const TensorToSave> tensors,
                 const SaveMetadata* metadata, const SaveOptions& options, SaveReport* report);

}  // namespace loraaccel
