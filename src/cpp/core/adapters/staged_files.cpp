#include "adapters/staged_files.h"

#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "adapters/text_file.h"
#include "checkpoint/file_ops.h"

namespace loraaccel {
namespace fs = std::filesystem;

StagedFiles::~StagedFiles() {
  std::error_code error;
  for (const File& file : files_) fs::remove(file.path, error);
  // only those that are empty go
  for (size_t i = folders_.size(); i > 0; --i) fs::remove(folders_[i - 1], error);
}

Status StagedFiles::place(const std::string& target, std::string* path) {
  std::vector<std::string> missing;
  std::error_code error;
  for (fs::path folder = fs::path(target).parent_path();
       !folder.empty() && !fs::exists(folder, error); folder = folder.parent_path()) {
    missing.push_back(folder.string());
  }
  for (size_t i = missing.size(); i > 0; --i) {
    LORAACCEL_RETURN_IF_ERROR(make_folder(missing[i - 1]));
    folders_.push_back(missing[i - 1]);
  }
  *path = target + ".loraaccel-" + std::to_string(::getpid());
  files_.push_back({target, *path});
  return Status();
}

Status StagedFiles::copy(const std::string& source, const std::string& target) {
  std::string path;
  LORAACCEL_RETURN_IF_ERROR(place(target, &path));
  std::error_code error;
  fs::copy_file(source, path, fs::copy_options::overwrite_existing, error);
  if (error) return file_error(source, "copying", error.value());
  return Status();
}

Status StagedFiles::commit(std::vector<std::string>* paths) {
  while (!files_.empty()) {
    const File file = files_.front();
    std::error_code error;
    fs::rename(file.path, file.target, error);
    if (error) return file_error(file.target, "moving the new file there", error.value());
    if (paths != nullptr) paths->push_back(file.target);
    files_.erase(files_.begin());
  }
  folders_.clear();
  return Status();
}

}  // namespace loraaccel
