// The calls to the operating system that reading and writing files makes, in a table that tests replace.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "loraaccel/status.h"

namespace loraaccel {

// As the functions of these names (POSIX): -1 and errno on failure. `state` is the table's own.
struct FileOps {
  void* state;
  int (*open)(void* state, const char* path, int flags, unsigned mode);
  int (*close)(void* state, int fd);
  int64_t (*size)(void* state,
                  int fd);  // of a regular file; another kind fails with EISDIR or EINVAL
  ssize_t (*pread)(void* state, int fd, void* data, size_t bytes, int64_t offset);
  ssize_t (*pwrite)(void* state, int fd, const void* data, size_t bytes, int64_t offset);
  ssize_t (*writev)(void* state, int fd, const iovec* parts, int count);
  int (*lock)(void* state, int fd);                    // flock(), exclusive, not waiting
  int (*reserve)(void* state, int fd, int64_t bytes);  // room on the disk
  int (*start_write_back)(void* state, int fd, int64_t offset, int64_t bytes);
  int (*sync)(void* state, int fd);
  int (*flush)(void* state, int fd);  // what close() would report, with the file still open
  int (*rename)(void* state, const char* from, const char* to);
  int (*unlink)(void* state, const char* path);
  int (*sync_folder)(void* state, const char* path);
};

const FileOps& system_file_ops();

// kFileError: "<path>: <what> failed: <the error's text>", with the number.
Status file_error(const std::string& path, const char* what, int error_number);

}  // namespace loraaccel
