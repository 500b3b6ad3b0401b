#include "adapters/text_file.h"

#include <fcntl.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "checkpoint/file_ops.h"
#include "checkpoint/output_file.h"

namespace loraaccel {
namespace fs = std::filesystem;

bool file_exists(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

bool folder_exists(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

std::string join_path(const std::string& folder, const std::string& name) {
  return (fs::path(folder) / name).string();
}

std::string parent_of(const std::string& path) { return fs::path(path).parent_path().string(); }

std::string file_name_of(const std::string& path) {
  const fs::path p(path);
  return (p.has_filename() ? p : p.parent_path()).filename().string();
}

Status read_text_file(const std::string& path, size_t limit, std::string* text) {
  const FileOps& ops = system_file_ops();
  const int fd = ops.open(ops.state, path.c_str(), O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return file_error(path, "opening", errno);
  Status status;
  const int64_t size = ops.size(ops.state, fd);
  if (size < 0) {
    status = file_error(path, "reading", errno);
  } else if (static_cast<uint64_t>(size) > limit) {
    status =
        Status(StatusCode::kMalformedFile, path + " has " + std::to_string(size) +
                                               " bytes, expected at most " + std::to_string(limit));
  } else {
    text->resize(static_cast<size_t>(size));
    size_t done = 0;
    while (status.ok() && done < text->size()) {
      const ssize_t got = ops.pread(ops.state, fd, text->data() + done, text->size() - done,
                                    static_cast<int64_t>(done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) status = file_error(path, "reading", errno);
      if (got == 0) text->resize(done);  // cut off while it was read
      if (got > 0) done += static_cast<size_t>(got);
    }
  }
  ops.close(ops.state, fd);
  return status;
}

Status write_text_file(const std::string& path, const std::string& text) {
  OutputFile file(system_file_ops());
  LORAACCEL_RETURN_IF_ERROR(file.create(path, text.size()));
  const iovec part{const_cast<char*>(text.data()), text.size()};
  LORAACCEL_RETURN_IF_ERROR(file.append({&part, 1}));
  return file.commit(/*sync=*/true);
}

Status make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) return file_error(path, "making the folder", error.value());
  return Status();
}

}  // namespace loraaccel
