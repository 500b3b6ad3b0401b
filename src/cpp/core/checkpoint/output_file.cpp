#include "checkpoint/output_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <vector>

namespace loraaccel {
namespace {

constexpr const char* kSuffix = ".tmp";

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string hex_text(uint64_t value) {
  std::string text(16, '0');
  for (size_t i = 0; i < 16; ++i) text[i] = "0123456789abcdef"[value >> (60 - 4 * i) & 15];
  return text;
}

// FNV-1a.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3U;
  return hash;
}

// Different for each call, and most likely for each process: O_EXCL makes sure.
uint64_t unusual_number() {
  static std::atomic<uint64_t> calls{0};
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  return hash_of(std::to_string(::getpid()) + "/" + std::to_string(now) + "/" +
                 std::to_string(calls.fetch_add(1)));
}

// Follows symbolic links; the last one may lead to nothing.
Status follow_links(const std::string& path, std::string* target) {
  *target = path;
  char link[PATH_MAX];
  for (int hops = 0; hops < 40; ++hops) {
    const ssize_t length = ::readlink(target->c_str(), link, sizeof link);
    if (length < 0) return {};  // not a link, or nothing there
    const std::string to(link, static_cast<size_t>(length));
    *target = to.starts_with('/') ? to : folder_of(*target) + "/" + to;
  }
  return file_error(path, "following symbolic links", ELOOP);
}

// A writer that lives holds the lock of its file. What cannot be looked at or removed is left where it is.
void remove_left_behind(const std::string& target) {
  const std::string prefix = temporary_prefix(target);
  const std::string folder = folder_of(target);
  DIR* listing = ::opendir(folder.c_str());
  if (listing == nullptr) return;
  const std::string name_prefix = prefix.substr(folder.size() + (folder == "/" ? 0 : 1));
  std::vector<std::string> found;
  while (const dirent* item = ::readdir(listing)) {
    const std::string_view name = item->d_name;
    if (name.starts_with(name_prefix) && name.ends_with(kSuffix))
      found.push_back(folder + "/" + std::string(name));
  }
  ::closedir(listing);
  const FileOps& ops = system_file_ops();
  for (const std::string& path : found) {
    const int fd = ops.open(ops.state, path.c_str(), O_WRONLY | O_NOFOLLOW, 0);
    if (fd < 0) continue;
    if (ops.lock(ops.state, fd) == 0) ops.unlink(ops.state, path.c_str());
    ops.close(ops.state, fd);
  }
}

}  // namespace

std::string temporary_prefix(const std::string& target) {
  const std::string folder = folder_of(target);
  const size_t slash = target.rfind('/');
  const std::string name = slash == std::string::npos ? target : target.substr(slash + 1);
  return folder + (folder == "/" ? "" : "/") + ".loraaccel-" + hex_text(hash_of(name)) + "-";
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ops_.close(ops_.state, fd_);
  if (!temporary_.empty()) ops_.unlink(ops_.state, temporary_.c_str());
}

Status OutputFile::failed(const char* what) const { return file_error(asked_, what, errno); }

Status OutputFile::create(const std::string& target, uint64_t bytes) {
  asked_ = target;
  if (target.find('\0') != std::string::npos)
    return {StatusCode::kInvalidArgument, target + ": a path with a null byte"};
  if (target.empty()) return file_error("''", "writing", ENOENT);
  LORAACCEL_RETURN_IF_ERROR(follow_links(target, &target_));
  struct stat info;
  if (::stat(target_.c_str(), &info) == 0 && !S_ISREG(info.st_mode))
    return file_error(asked_, "writing a regular file in its place",
                      S_ISDIR(info.st_mode) ? EISDIR : EINVAL);
  folder_ = folder_of(target_);
  remove_left_behind(target_);
  LORAACCEL_RETURN_IF_ERROR(create_beside());
  if (bytes > INT64_MAX) return file_error(asked_, "making room", EFBIG);
  if (ops_.reserve(ops_.state, fd_, static_cast<int64_t>(bytes)) != 0) return failed("making room");
  return {};
}

Status OutputFile::create_beside() {
  // A few tries: another writer of the same target may take the file, before it is locked, for one left behind.
  for (int tries = 0; tries < 16; ++tries) {
    const std::string name = temporary_prefix(target_) + hex_text(unusual_number()) + kSuffix;
    const int fd =
        ops_.open(ops_.state, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0666);
    if (fd < 0) {
      if (errno == EEXIST) continue;
      return failed("making a file beside it");
    }
    // (A file system without locks has no writer that could take it.)
    const bool taken = ops_.lock(ops_.state, fd) != 0 && errno == EWOULDBLOCK;
    struct stat info;
    if (taken || (::fstat(fd, &info) == 0 && info.st_nlink == 0)) {
      ops_.close(ops_.state, fd);
      continue;
    }
    fd_ = fd;
    temporary_ = name;
    return {};
  }
  return file_error(asked_, "making a file beside it", EEXIST);
}

Status OutputFile::append(std::span<const iovec> parts) {
  std::vector<iovec> left(parts.begin(), parts.end());
  size_t at = 0;
  while (at < left.size()) {
    if (left[at].iov_len == 0) {
      ++at;
      continue;
    }
    const int count = static_cast<int>(std::min<size_t>(left.size() - at, 256));
    const ssize_t done = ops_.writev(ops_.state, fd_, left.data() + at, count);
    if (done < 0) return failed("writing");
    if (done == 0) return file_error(asked_, "writing", ENOSPC);
    written_ += static_cast<uint64_t>(done);
    auto rest = static_cast<size_t>(done);
    while (rest > 0) {
      const size_t take = std::min(rest, left[at].iov_len);
      left[at].iov_base = static_cast<char*>(left[at].iov_base) + take;
      left[at].iov_len -= take;
      rest -= take;
      if (left[at].iov_len == 0) ++at;
    }
  }
  return {};
}

Status OutputFile::overwrite(uint64_t offset, const void* data, size_t bytes) {
  const auto* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ops_.pwrite(ops_.state, fd_, p, bytes, static_cast<int64_t>(offset));
    if (done < 0) return failed("writing");
    if (done == 0) return file_error(asked_, "writing", ENOSPC);
    p += done;
    offset += static_cast<uint64_t>(done);
    bytes -= static_cast<size_t>(done);
  }
  return {};
}

void OutputFile::start_write_back() {
  ops_.start_write_back(ops_.state, fd_, static_cast<int64_t>(written_back_),
                        static_cast<int64_t>(written_ - written_back_));
  written_back_ = written_;
}

Status OutputFile::commit(bool sync) {
  if (sync && ops_.sync(ops_.state, fd_) != 0) return failed("writing to the disk");
  // The lock is held until the rename: a network's file system reports here what it would at close.
  if (ops_.flush(ops_.state, fd_) != 0) return failed("writing");
  if (ops_.rename(ops_.state, temporary_.c_str(), target_.c_str()) != 0)
    return failed("moving the complete file to its place");
  temporary_.clear();
  if (sync && ops_.sync_folder(ops_.state, folder_.c_str()) != 0)
    return failed("writing its folder to the disk (the file itself is in its place)");
  return {};
}

}  // namespace loraaccel
