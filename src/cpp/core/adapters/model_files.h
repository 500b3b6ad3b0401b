// The files of a model that is a folder.
#pragma once

#include <string>
#include <vector>

#include "loraaccel/status.h"

namespace loraaccel {

// All files in `folder` and the folders in it, sorted, as paths below it.
Status list_files(const std::string& folder, std::vector<std::string>* names);

}  // namespace loraaccel
