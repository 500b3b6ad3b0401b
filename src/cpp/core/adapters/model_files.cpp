#include "adapters/model_files.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

namespace loraaccel {

namespace fs = std::filesystem;

Status list_files(const std::string& folder, std::vector<std::string>* names) {
  std::error_code error;
  for (auto i = fs::recursive_directory_iterator(folder, error);
       !error && i != fs::recursive_directory_iterator(); i.increment(error)) {
    if (i->is_regular_file(error)) names->push_back(i->path().lexically_relative(folder).string());
  }
  if (error)
    return Status(StatusCode::kFileError,
                  folder + ": listing the folder failed: " + error.message(), error.value());
  std::sort(names->begin(), names->end());
  return Status();
}

}  // namespace loraaccel
