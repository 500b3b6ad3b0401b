// Several files that take their places together.
#pragma once

#include <string>
#include <vector>

#include "loraaccel/status.h"

namespace loraaccel {

// Files are written beside their targets, under other names, and moved at the end; what was not moved is removed.
class StagedFiles {
 public:
  StagedFiles() = default;
  StagedFiles(const StagedFiles&) = delete;
  StagedFiles& operator=(const StagedFiles&) = delete;
  ~StagedFiles();

  // Where to write the file that is to be `target`; makes its folder.
  Status place(const std::string& target, std::string* path);
  Status copy(const std::string& source, const std::string& target);
  Status commit(std::vector<std::string>* paths);

 private:
  struct File {
    std::string target;
    std::string path;
  };
  std::vector<File> files_;
  std::vector<std::string> folders_;  // made by us, innermost last
};

}  // namespace loraaccel
