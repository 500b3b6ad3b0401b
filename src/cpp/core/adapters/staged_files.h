// Several files that take their places together.
#pragma once

#include <string>
#include <vector>

#include "loraaccel/status.h"

namespace loraaccel {

// Two names of one file or folder, whether it is there or not.
bool same_place(const std::string& a, const std::string& b);
// Is `path` below `folder`?
bool inside(const std::string& path, const std::string& folder);

// Files are written beside their targets, under other names, and moved at the end; what was not moved is removed, and
// where a move fails those before it are taken back. What a process that was killed has left, the next one for the
// same target removes.
class StagedFiles {
 public:
  StagedFiles() = default;
  StagedFiles(const StagedFiles&) = delete;
  StagedFiles& operator=(const StagedFiles&) = delete;
  ~StagedFiles();

  // Where to write the file that is to be `target`; makes its folder. kFileError (EBUSY) while another process does.
  Status place(const std::string& target, std::string* path);
  Status copy(const std::string& source, const std::string& target);
  Status commit(std::vector<std::string>* paths);

 private:
  struct File {
    std::string target;
    std::string path;
    int lock;  // of an empty file beside it
    bool moved = false;
    bool had_old = false;  // under old_name(target), until all are moved
  };
  static void take_back(const File& file);
  std::vector<File> files_;
  std::vector<std::string> folders_;  // made by us, innermost last
};

}  // namespace loraaccel
