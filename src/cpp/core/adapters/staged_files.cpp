#include "adapters/staged_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "adapters/text_file.h"
#include "checkpoint/file_ops.h"

namespace loraaccel {
namespace fs = std::filesystem;

namespace {

std::string new_name(const std::string& target) { return target + ".loraaccel-new"; }
std::string old_name(const std::string& target) { return target + ".loraaccel-old"; }
std::string lock_name(const std::string& target) { return target + ".loraaccel-lock"; }

// An empty file that whoever writes `target` holds the lock of. One that is not held was left by a killed process.
Status take_lock(const std::string& target, int* lock) {
  const FileOps& ops = system_file_ops();
  const std::string name = lock_name(target);
  for (int tries = 0; tries < 16; ++tries) {
    const int fd = ops.open(ops.state, name.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW, 0666);
    if (fd < 0) return file_error(target, "making a file beside it", errno);
    // (A file system without locks has no other writer that could tell.)
    if (ops.lock(ops.state, fd) != 0 && errno == EWOULDBLOCK) {
      ops.close(ops.state, fd);
      return file_error(target, "writing it while another process does", EBUSY);
    }
    struct stat info;
    if (::fstat(fd, &info) == 0 && info.st_nlink > 0) {
      *lock = fd;
      return Status();
    }
    ops.close(ops.state, fd);  // the one who held it has removed it in between
  }
  return file_error(target, "making a file beside it", EBUSY);
}

}  // namespace

bool same_place(const std::string& a, const std::string& b) {
  std::error_code error;
  if (fs::equivalent(a, b, error) && !error) return true;
  const fs::path first = fs::weakly_canonical(a, error);
  if (error) return a == b;
  const fs::path second = fs::weakly_canonical(b, error);
  return error ? a == b : first == second;
}

bool inside(const std::string& path, const std::string& folder) {
  std::error_code error;
  for (fs::path p = fs::weakly_canonical(path, error).parent_path(); p.has_relative_path();
       p = p.parent_path()) {
    if (same_place(p.string(), folder)) return true;
  }
  return false;
}

StagedFiles::~StagedFiles() {
  std::error_code error;
  const FileOps& ops = system_file_ops();
  for (const File& file : files_) {
    if (!file.moved) fs::remove(file.path, error);
    ops.unlink(ops.state, lock_name(file.target).c_str());
    ops.close(ops.state, file.lock);
  }
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
  int lock = -1;
  LORAACCEL_RETURN_IF_ERROR(take_lock(target, &lock));
  *path = new_name(target);
  fs::remove(*path, error);
  fs::remove(old_name(target), error);
  files_.push_back({target, *path, lock});
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
  for (File& file : files_) {
    std::error_code error;
    const bool there = fs::is_regular_file(file.target, error);
    error.clear();  // (that there is none is one)
    if (there) {
      fs::create_hard_link(file.target, old_name(file.target), error);
      // (A file system without links: the old file is away until the new one is there.)
      if (error) fs::rename(file.target, old_name(file.target), error);
      file.had_old = !error;
    }
    if (!error) fs::rename(file.path, file.target, error);
    if (error) {
      const Status status = file_error(file.target, "moving the new file there", error.value());
      for (size_t i = files_.size(); i > 0; --i) take_back(files_[i - 1]);
      return status;
    }
    file.moved = true;
  }
  for (const File& file : files_) {
    std::error_code error;
    if (file.had_old) fs::remove(old_name(file.target), error);
    if (paths != nullptr) paths->push_back(file.target);
  }
  folders_.clear();
  return Status();
}

void StagedFiles::take_back(const File& file) {
  std::error_code error;
  if (file.had_old) {
    fs::rename(old_name(file.target), file.target, error);
    fs::remove(old_name(file.target), error);  // two names of one file: rename() does nothing
  } else if (file.moved) {
    fs::remove(file.target, error);
  }
}

}  // namespace loraaccel
