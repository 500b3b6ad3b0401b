#include "checkpoint/file_ops.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

namespace loraaccel {
namespace {

static_assert(sizeof(off_t) == 8, "files above 2 GB need _FILE_OFFSET_BITS=64");

template <class F>
auto uninterrupted(const F& call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

int open_file(void*, const char* path, int flags, unsigned mode) {
  return uninterrupted([&] { return ::open(path, flags | O_CLOEXEC, static_cast<mode_t>(mode)); });
}

int close_file(void*, int fd) { return ::close(fd); }

int64_t size_of(void*, int fd) {
  struct stat info;
  if (::fstat(fd, &info) != 0) return -1;
  if (!S_ISREG(info.st_mode)) {
    errno = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
    return -1;
  }
  return info.st_size;
}

ssize_t pread_file(void*, int fd, void* data, size_t bytes, int64_t offset) {
  return uninterrupted([&] { return ::pread(fd, data, bytes, offset); });
}

ssize_t pwrite_file(void*, int fd, const void* data, size_t bytes, int64_t offset) {
  return uninterrupted([&] { return ::pwrite(fd, data, bytes, offset); });
}

ssize_t writev_file(void*, int fd, const iovec* parts, int count) {
  return uninterrupted([&] { return ::writev(fd, parts, count); });
}

int lock_file(void*, int fd) { return ::flock(fd, LOCK_EX | LOCK_NB); }

int reserve_room(void*, int fd, int64_t bytes) {
  // Beyond this limit the system does not only refuse: it sends a signal whose default action ends the process.
  rlimit limit;
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      static_cast<uint64_t>(bytes) > limit.rlim_cur) {
    errno = EFBIG;
    return -1;
  }
#ifdef __linux__
  if (bytes == 0) return 0;
  // (Not posix_fallocate, which writes the whole file where the file system cannot do it.)
  const int result = uninterrupted([&] { return ::fallocate(fd, 0, 0, bytes); });
  if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS || errno == EPERM)) return 0;
  return result;
#else
  (void)fd;
  return 0;
#endif
}

int start_write_back(void*, int fd, int64_t offset, int64_t bytes) {
#ifdef __linux__
  ::sync_file_range(fd, offset, bytes,
                    SYNC_FILE_RANGE_WRITE);  // only a hint: sync() reports errors
#else
  (void)fd;
  (void)offset;
  (void)bytes;
#endif
  return 0;
}

int sync_file(void*, int fd) {
  return uninterrupted([&] { return ::fsync(fd); });
}

int flush_file(void*, int fd) {
  const int copy = ::dup(fd);
  return copy < 0 ? -1 : ::close(copy);
}

int rename_file(void*, const char* from, const char* to) { return std::rename(from, to); }

int unlink_file(void*, const char* path) { return ::unlink(path); }

int sync_folder(void*, const char* path) {
  const int fd = uninterrupted([&] { return ::open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (fd < 0) return -1;
  const int result = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  errno = error;
  return result != 0 && (errno == EINVAL || errno == EROFS) ? 0 : result;  // nothing to be synced
}

}  // namespace

const FileOps& system_file_ops() {
  static constexpr FileOps kOps = {
      nullptr,     open_file,   close_file,  size_of,      pread_file,
      pwrite_file, writev_file, lock_file,   reserve_room, start_write_back,
      sync_file,   flush_file,  rename_file, unlink_file,  sync_folder,
  };
  return kOps;
}

Status file_error(const std::string& path, const char* what, int error_number) {
  return {StatusCode::kFileError,
          path + ": " + what + " failed: " + std::generic_category().message(error_number),
          error_number};
}

}  // namespace loraaccel
