#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "loraaccel/safetensors.h"
#include "support/files.h"

namespace loraaccel::test {
namespace {

const char* const kTwo =
    R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}})";

TEST(SafetensorsReader, ReadsPartsAndViewsWithoutAlignment) {
  const TemporaryFolder folder;
  const std::string path = folder / "two.safetensors";
  write_file(path, file_of(kTwo, 11));
  SafetensorsReader file;
  EXPECT_FALSE(static_cast<bool>(file));
  ASSERT_TRUE(SafetensorsReader::open(path, &file).ok());
  EXPECT_TRUE(static_cast<bool>(file));
  const TensorEntry& b = *file.find("b");
  char bytes[8] = {};
  ASSERT_TRUE(file.read(b, 0, 8, bytes).ok());
  for (int i = 0; i < 8; ++i) EXPECT_EQ(bytes[i], static_cast<char>((i + 3) * 7 + 1));
  ASSERT_TRUE(file.read(b, 7, 1, bytes).ok());
  EXPECT_EQ(bytes[0], static_cast<char>(10 * 7 + 1));
  EXPECT_EQ(file.read(b, 0, 9, bytes).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(file.read(b, 9, 0, bytes).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(file.read(b, UINT64_MAX, 2, bytes).code(), StatusCode::kInvalidArgument);
  void* data = nullptr;
  ASSERT_TRUE(file.view(b, &data).ok());
  EXPECT_EQ(static_cast<char*>(data)[0], static_cast<char>(3 * 7 + 1));
  // Private: writing to it changes neither the file nor what read() says.
  static_cast<char*>(data)[0] = 99;
  ASSERT_TRUE(file.read(b, 0, 1, bytes).ok());
  EXPECT_EQ(bytes[0], static_cast<char>(3 * 7 + 1));
  EXPECT_EQ(read_file(path), file_of(kTwo, 11));
}

TEST(SafetensorsReader, ViewsLiveAsLongAsAReader) {
  const TemporaryFolder folder;
  const std::string path = folder / "two.safetensors";
  write_file(path, file_of(kTwo, 11));
  SafetensorsReader copy;
  void* data = nullptr;
  const TensorEntry* b = nullptr;
  {
    SafetensorsReader file;
    ASSERT_TRUE(SafetensorsReader::open(path, &file).ok());
    copy = file;
    b = file.find("b");
    ASSERT_TRUE(file.view(*b, &data).ok());
  }
  unlink(path.c_str());
  EXPECT_EQ(b->name, "b");
  EXPECT_EQ(static_cast<char*>(data)[0], static_cast<char>(3 * 7 + 1));
}

TEST(SafetensorsReader, AFileThatIsCutWhileOpenIsAnError) {
  const TemporaryFolder folder;
  const std::string path = folder / "two.safetensors";
  write_file(path, file_of(kTwo, 11));
  SafetensorsReader file;
  ASSERT_TRUE(SafetensorsReader::open(path, &file).ok());
  ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(file.data_offset() + 5)), 0);
  char bytes[8];
  EXPECT_TRUE(file.read(*file.find("a"), 0, 3, bytes).ok());
  const Status status = file.read(*file.find("b"), 0, 8, bytes);
  EXPECT_EQ(status.code(), StatusCode::kMalformedFile);
  EXPECT_NE(status.message().find("cut"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find(path), std::string::npos);
}

TEST(SafetensorsReader, VW5PathsThatCannotBeRead) {
  const TemporaryFolder folder;
  SafetensorsReader file;
  Status status = SafetensorsReader::open(folder / "none", &file);
  EXPECT_EQ(status.code(), StatusCode::kFileError);
  EXPECT_EQ(status.error_number(), ENOENT);
  EXPECT_NE(status.message().find(folder / "none"), std::string::npos);
  status = SafetensorsReader::open(folder.path(), &file);
  EXPECT_EQ(status.code(), StatusCode::kFileError);
  EXPECT_EQ(status.error_number(), EISDIR);
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  status = SafetensorsReader::open(folder / "pipe", &file);  // must not wait for a writer
  EXPECT_EQ(status.code(), StatusCode::kFileError);
  status = SafetensorsReader::open(std::string("a\0b", 3), &file);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(static_cast<bool>(file));
  const std::string odd = folder / "\xE6\xA8\xA1\xE5\x9E\x8B \xC3\xA9\xF0\x9F\x98\x80.safetensors";
  write_file(odd, file_of(kTwo, 11));
  EXPECT_TRUE(SafetensorsReader::open(odd, &file).ok());
  EXPECT_EQ(file.path(), odd);
}

TEST(SafetensorsReader, AnEmptyReaderHasNothing) {
  const SafetensorsReader file;
  EXPECT_TRUE(file.entries().empty());
  EXPECT_TRUE(file.metadata().empty());
  EXPECT_EQ(file.find("a"), nullptr);
  EXPECT_EQ(file.file_size(), 0U);
  EXPECT_EQ(file.path(), "");
  EXPECT_EQ(file.read({}, 0, 0, nullptr).code(), StatusCode::kInvalidArgument);
  void* data;
  EXPECT_EQ(file.view({}, &data).code(), StatusCode::kInvalidArgument);
}

// A file with holes: its size needs neither disk nor memory.
TEST(SafetensorsReader, OffsetsBeyondFourGigabytes) {
  const TemporaryFolder folder;
  const std::string path = folder / "large.safetensors";
  constexpr uint64_t kFirst = (uint64_t{1} << 32) - 3;
  const std::string json =
      R"({"a":{"dtype":"U8","shape":[4294967293],"data_offsets":[0,4294967293]},)"
      R"("b":{"dtype":"F64","shape":[2],"data_offsets":[4294967293,4294967309]}})";
  write_file(path, length_prefix(json.size()) + json);
  const int fd = ::open(path.c_str(), O_WRONLY);
  ASSERT_GE(fd, 0);
  const auto data = static_cast<off_t>(8 + json.size());
  const double values[2] = {1.25, -3};
  if (pwrite(fd, values, sizeof values, data + static_cast<off_t>(kFirst)) != sizeof values) {
    close(fd);
    GTEST_SKIP() << "no file of this size here";
  }
  close(fd);
  SafetensorsReader file;
  const Status status = SafetensorsReader::open(path, &file);
  ASSERT_TRUE(status.ok()) << status.message();
  double found[2] = {};
  ASSERT_TRUE(file.read(*file.find("b"), 0, sizeof found, found).ok());
  EXPECT_EQ(found[0], 1.25);
  EXPECT_EQ(found[1], -3);
  char end[3] = {1, 1, 1};
  ASSERT_TRUE(file.read(*file.find("a"), kFirst - 3, 3, end).ok());
  EXPECT_EQ(end[0] + end[1] + end[2], 0);
  void* view = nullptr;
  if (sizeof(void*) == 8 && file.view(*file.find("b"), &view).ok()) {
    std::memcpy(found, view, sizeof found);
    EXPECT_EQ(found[1], -3);
  }
}

// Memory that ends where the pages do: nothing is read beyond it.
TEST(SafetensorsReader, VR4NothingIsReadBeyondTheMemory) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  auto* pages = static_cast<char*>(
      mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(mprotect(pages + page, page, PROT_NONE), 0);
  for (const std::string& bytes :
       {file_of(kTwo, 11), file_of(kTwo, 10), file_of("{", 0), file_of("{\"a", 0),
        file_of("{\"a\":-", 0), file_of("{\"a\":{\"x\":1.", 0), file_of("{\"a\":{\"x\":\"\\u00", 0),
        std::string("\x01"), length_prefix(1) + "\xF0", std::string("{"), std::string("GGU")}) {
    char* at = pages + page - bytes.size();
    std::memcpy(at, bytes.data(), bytes.size());
    SafetensorsReader file;
    const Status status = SafetensorsReader::from_memory(at, bytes.size(), "memory", &file);
    EXPECT_EQ(status.ok(), bytes == file_of(kTwo, 11)) << status.message();
  }
  munmap(pages, 2 * page);
}

}  // namespace
}  // namespace loraaccel::test
