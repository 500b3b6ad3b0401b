// VW2: whatever call to the system fails, and however often, the target is the old file or the whole new one, and
// nothing else is left beside it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "checkpoint/save_to.h"
#include "support/files.h"

namespace loraaccel::test {
namespace {

// Counts the calls, and lets one of them fail, or all from one on. Writes are cut short.
struct Faults {
  int calls = 0;
  int fail_at = -1;  // -1: none
  bool stays_broken = false;
  int error = EIO;
  size_t most_written = SIZE_MAX;  // by one call
  std::string failed = "";         // the call that failed first

  bool fails(const char* call) {
    const int number = calls++;
    if (fail_at < 0 || number < fail_at || (number > fail_at && !stays_broken)) return false;
    if (failed.empty()) failed = call;
    errno = error;
    return true;
  }
};

Faults& faults(void* state) { return *static_cast<Faults*>(state); }
const FileOps& real() { return system_file_ops(); }

ssize_t short_writev(void* state, int fd, const iovec* parts, int count) {
  if (faults(state).fails("writev")) return -1;
  std::vector<iovec> allowed;
  size_t left = faults(state).most_written;
  for (int i = 0; i < count && left > 0; ++i) {
    allowed.push_back({parts[i].iov_base, std::min(left, parts[i].iov_len)});
    left -= allowed.back().iov_len;
  }
  return real().writev(real().state, fd, allowed.data(), static_cast<int>(allowed.size()));
}

FileOps failing(Faults* state) {
  FileOps ops = real();
  ops.state = state;
  ops.open = [](void* s, const char* path, int flags, unsigned mode) {
    return faults(s).fails("open") ? -1 : real().open(real().state, path, flags, mode);
  };
  ops.close = [](void*, int fd) { return real().close(real().state, fd); };
  ops.pwrite = [](void* s, int fd, const void* data, size_t bytes, int64_t offset) -> ssize_t {
    if (faults(s).fails("pwrite")) return -1;
    return real().pwrite(real().state, fd, data, std::min(bytes, faults(s).most_written), offset);
  };
  ops.writev = short_writev;
  ops.lock = [](void* s, int fd) {
    return faults(s).fails("lock") ? -1 : real().lock(real().state, fd);
  };
  ops.reserve = [](void* s, int fd, int64_t bytes) {
    return faults(s).fails("reserve") ? -1 : real().reserve(real().state, fd, bytes);
  };
  ops.start_write_back = [](void* s, int, int64_t, int64_t) {
    return faults(s).fails("start_write_back") ? -1 : 0;
  };
  ops.sync = [](void* s, int) { return faults(s).fails("sync") ? -1 : 0; };
  ops.flush = [](void* s, int) { return faults(s).fails("flush") ? -1 : 0; };
  ops.rename = [](void* s, const char* from, const char* to) {
    return faults(s).fails("rename") ? -1 : real().rename(real().state, from, to);
  };
  ops.unlink = [](void* s, const char* path) {
    static_cast<void>(s);  // what cannot be removed either is another test's
    return real().unlink(real().state, path);
  };
  ops.sync_folder = [](void* s, const char*) { return faults(s).fails("sync_folder") ? -1 : 0; };
  return ops;
}

class SaveFaults : public testing::Test {
 protected:
  SaveFaults() : data_(100'000, '\x3C') {
    tensors_ = {
        {.name = "a", .dtype = FileDType::kF32, .shape = {25'000}, .data = data_.data()},
        {.name = "b", .dtype = FileDType::kU8, .shape = {777}, .data = data_.data()},
    };
    options_ = {.float_dtype = FileDType::kF16, .hashes_in_metadata = true};
    write_file(path_, "the old file");
    EXPECT_TRUE(save_safetensors(folder_ / "expected", tensors_, nullptr, options_).ok());
    complete_ = read_file(folder_ / "expected");
  }

  Status save(Faults* faults) {
    const FileOps ops = failing(faults);
    return save_with(ops, path_, tensors_, nullptr, options_, nullptr);
  }

  TemporaryFolder folder_;
  std::string path_ = folder_ / "x.safetensors";
  std::string data_;
  std::string complete_;
  std::vector<TensorToSave> tensors_;
  SaveOptions options_;
};

TEST_F(SaveFaults, VW2AnErrorAtEveryCall) {
  Faults none{.most_written = 1000};
  ASSERT_TRUE(save(&none).ok());
  ASSERT_GT(none.calls, 60) << "writes are cut short, and go on";
  ASSERT_EQ(read_file(path_), complete_);
  std::vector<std::string> seen;
  for (const bool stays_broken : {false, true}) {
    {
      const int error = stays_broken ? ENOSPC : EIO;
      for (int call = 0; call < none.calls; ++call) {
        write_file(path_, "the old file");
        Faults one{
            .fail_at = call, .stays_broken = stays_broken, .error = error, .most_written = 1000};
        const Status status = save(&one);
        SCOPED_TRACE(one.failed + ", call " + std::to_string(call));
        seen.push_back(one.failed);
        const std::string found = read_file(path_);
        if (status.ok()) {  // of what is only a help: locks, and the hint to write back
          EXPECT_TRUE(one.failed == "lock" || one.failed == "start_write_back");
          EXPECT_TRUE(found == complete_);
        } else {
          EXPECT_EQ(status.code(), StatusCode::kFileError);
          EXPECT_EQ(status.error_number(), error);
          EXPECT_EQ(status.message().find(path_), 0U) << status.message();
          EXPECT_TRUE(found == (one.failed == "sync_folder" ? complete_ : "the old file"));
        }
        EXPECT_EQ(folder_.count(), 2U) << "the target, and what it is compared with";
      }
    }
  }
  for (const char* call : {"open", "lock", "reserve", "writev", "pwrite", "start_write_back",
                           "sync", "flush", "rename", "sync_folder"})
    EXPECT_NE(std::find(seen.begin(), seen.end(), call), seen.end()) << call << " was never called";
}

TEST_F(SaveFaults, AWriteOfNothingIsAnErrorNotALoop) {
  Faults nothing{.most_written = 0};
  const FileOps ops = failing(&nothing);
  FileOps zero = ops;
  zero.writev = [](void*, int, const iovec*, int) -> ssize_t { return 0; };
  const Status status = save_with(zero, path_, tensors_, nullptr, options_, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kFileError);
  EXPECT_EQ(read_file(path_), "the old file");
}

TEST_F(SaveFaults, ALenderThatFailsKeepsTheOldFile) {
  tensors_[0].fetch = [](void*, uint64_t offset, size_t, const void**) -> Status {
    return {StatusCode::kLenderFailed, "lost at " + std::to_string(offset)};
  };
  Faults none;
  const Status status = save(&none);
  EXPECT_EQ(status.code(), StatusCode::kLenderFailed);
  EXPECT_NE(status.message().find("lost at 0"), std::string::npos);
  EXPECT_EQ(read_file(path_), "the old file");
  EXPECT_EQ(folder_.count(), 2U);
}

// The real calls, under a limit of the size of files: the signal that the system sends beyond it would end the process.
TEST_F(SaveFaults, VW2BeyondTheLimitOfFileSizes) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 20'000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
  const Status status = save_safetensors(path_, tensors_, nullptr, options_);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(status.error_number(), EFBIG) << status.message();
  EXPECT_EQ(read_file(path_), "the old file");
  EXPECT_EQ(folder_.count(), 2U);
  EXPECT_TRUE(save_safetensors(path_, tensors_, nullptr, options_).ok());
}

}  // namespace
}  // namespace loraaccel::test
