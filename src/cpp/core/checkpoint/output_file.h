// A file that appears complete or not at all.
#pragma once

#include <span>
#include <string>

#include "checkpoint/file_ops.h"

namespace loraaccel {

// Written beside its target under a name of its own, and moved to the target by commit(). Destroyed before that, it is
// removed and the target is what it was.
class OutputFile {
 public:
  explicit OutputFile(const FileOps& ops) : ops_(ops) {}
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  // Makes the file, with room for `bytes`. Removes what killed writers of the same target have left.
  Status create(const std::string& target, uint64_t bytes);
  Status append(std::span<const iovec> parts);
  // Over what is there already.
  Status overwrite(uint64_t offset, const void* data, size_t bytes);
  // Begins writing to the disk what was appended so far.
  void start_write_back();
  Status commit(bool sync);

 private:
  Status create_beside();
  Status failed(const char* what) const;

  const FileOps& ops_;
  std::string asked_;   // as the caller wrote it, for messages
  std::string target_;  // with symbolic links followed
  std::string folder_;
  std::string temporary_;  // empty: there is none
  int fd_ = -1;
  uint64_t written_ = 0;
  uint64_t written_back_ = 0;
};

// "<folder>/.loraaccel-<hash of the target's name>-": what the temporary files of a target begin with.
std::string temporary_prefix(const std::string& target);

}  // namespace loraaccel
