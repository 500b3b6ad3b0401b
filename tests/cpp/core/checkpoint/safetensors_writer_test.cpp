// What is written: order, bytes, hashes, casts, and what is refused before anything is.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "checkpoint/output_file.h"
#include "checkpoint/sha256.h"
#include "loraaccel/safetensors.h"
#include "support/files.h"

namespace loraaccel::test {
namespace {

TensorToSave tensor(const std::string& name, FileDType dtype, std::vector<int64_t> shape,
                    const void* data) {
  return {.name = name, .dtype = dtype, .shape = std::move(shape), .data = data};
}

// Gives `memory` back in pieces, and spoils the piece before.
struct Lender {
  std::string memory;
  std::string lent;
  uint64_t fail_at = UINT64_MAX;
  size_t most = 0;

  static Status fetch(void* host, uint64_t offset, size_t bytes, const void** data) {
    auto& self = *static_cast<Lender*>(host);
    if (offset + bytes > self.fail_at) return {StatusCode::kLenderFailed, "the device is gone"};
    if (offset + bytes > self.memory.size()) return {StatusCode::kInternal, "asked beyond the end"};
    std::fill(self.lent.begin(), self.lent.end(), '!');
    self.lent.assign(self.memory, offset, bytes);
    self.most = std::max(self.most, bytes);
    *data = self.lent.data();
    return {};
  }
};

std::string pattern(size_t bytes) {
  std::string text(bytes, '\0');
  uint32_t state = 1;
  for (char& c : text) c = static_cast<char>((state = state * 1664525 + 1013904223) >> 24);
  return text;
}

std::string sha256(const std::string& text) {
  Sha256 sha;
  sha.update(text.data(), text.size());
  return hex_text(sha.finish());
}

std::string data_of(const std::string& file) {
  uint64_t n = 0;
  std::memcpy(&n, file.data(), 8);
  return file.substr(8 + n);
}

std::string serialized(std::span<const TensorToSave> tensors, const SaveMetadata* metadata,
                       const SaveOptions& options = {}, SaveReport* report = nullptr) {
  std::string bytes;
  const auto allocate = [](void* host, size_t size) -> void* {
    static_cast<std::string*>(host)->resize(size);
    return static_cast<std::string*>(host)->data();
  };
  const Status status = serialize_safetensors(tensors, metadata, options, allocate, &bytes, report);
  EXPECT_TRUE(status.ok()) << status.message();
  return bytes;
}

// The reference library's file of the same tensors.
TEST(SafetensorsWriter, GoldenFile) {
  const float b[] = {1, 2};
  const uint16_t a[] = {0x3C00, 0x4000};
  const int64_t c = 7;
  const char e[] = {1, 0};
  const TensorToSave tensors[] = {
      tensor("b", FileDType::kF32, {2}, b),  tensor("a", FileDType::kF16, {2}, a),
      tensor("c", FileDType::kI64, {}, &c),  tensor("d", FileDType::kF32, {0, 3}, nullptr),
      tensor("e", FileDType::kBool, {2}, e),
  };
  const SaveMetadata metadata = {{"ss_x", "1"}};
  const std::string expected =
      length_prefix(304) +
      R"({"__metadata__":{"ss_x":"1"},"c":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
      R"("b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},)"
      R"("d":{"dtype":"F32","shape":[0,3],"data_offsets":[16,16]},)"
      R"("a":{"dtype":"F16","shape":[2],"data_offsets":[16,20]},)"
      R"("e":{"dtype":"BOOL","shape":[2],"data_offsets":[20,22]}} )" +
      std::string("\x07\0\0\0\0\0\0\0\0\0\x80\x3f\0\0\0\x40\0\x3c\0\x40\x01\0", 22);
  const TemporaryFolder folder;
  const std::string path = folder / "golden.safetensors";
  SaveReport report;
  const Status status = save_safetensors(path, tensors, &metadata, {.hashes = true}, &report);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(read_file(path), expected);
  EXPECT_EQ(report.file_size, expected.size());
  EXPECT_EQ(report.model_hash, "d1705e0a035e7770c5972dbbb1ee32c590ecceaaa84c308e040f6e80f4a44f7e");
  EXPECT_EQ(report.legacy_hash, "e3b0c442");
  EXPECT_TRUE(report.losses.empty());
  EXPECT_EQ(serialized(tensors, &metadata), expected);
  EXPECT_EQ(folder.count(), 1U);
}

TEST(SafetensorsWriter, NoTensors) {
  const SaveMetadata none;
  EXPECT_EQ(serialized({}, nullptr), length_prefix(8) + "{}      ");
  EXPECT_EQ(serialized({}, &none), length_prefix(24) + "{\"__metadata__\":{}}     ");
}

TEST(SafetensorsWriter, MetadataIsSortedByKey) {
  const SaveMetadata one = {{"b", "2"}, {"a", "1"}, {"\xC3\xA9", "3"}};
  const SaveMetadata other = {{"\xC3\xA9", "3"}, {"a", "1"}, {"b", "2"}};
  EXPECT_EQ(serialized({}, &one), serialized({}, &other));
}

// The hash of 64 KiB from 1 MiB on, in the file with the keys that begin with "ss_" alone.
TEST(SafetensorsWriter, HashesAreThoseOfTheWholeAndOfTheWindow) {
  const std::string content = pattern(2'600'000);
  const TensorToSave tensors[] = {tensor("w", FileDType::kU8, {2'600'000}, content.data())};
  const SaveMetadata metadata = {{"ss_a", "1"}, {"modelspec.title", "x"}, {"sshs_other", "y"}};
  const SaveMetadata training = {{"ss_a", "1"}};
  SaveReport report;
  const std::string file = serialized(tensors, &metadata, {.hashes_in_metadata = true}, &report);
  EXPECT_EQ(report.model_hash, sha256(content));
  EXPECT_EQ(report.legacy_hash,
            sha256(serialized(tensors, &training).substr(0x100000, 0x10000)).substr(0, 8));
  SaveMetadata with = metadata;
  with.emplace_back("sshs_model_hash", report.model_hash);
  with.emplace_back("sshs_legacy_hash", report.legacy_hash);
  EXPECT_EQ(file, serialized(tensors, &with));
}

TEST(SafetensorsWriter, HashesInMetadataReplaceOlderOnes) {
  const std::string content = pattern(64);
  const TensorToSave tensors[] = {tensor("w", FileDType::kU8, {64}, content.data())};
  const SaveMetadata older = {{"sshs_model_hash", "0x12"}, {"sshs_legacy_hash", "none"}};
  const std::string file = serialized(tensors, &older, {.hashes_in_metadata = true});
  EXPECT_EQ(file, serialized(tensors, nullptr, {.hashes_in_metadata = true}));
}

TEST(SafetensorsWriter, LentBytesAreAskedForInPiecesAndHashed) {
  Lender large{.memory = pattern(9'000'004), .lent = ""};
  Lender small{.memory = pattern(6), .lent = ""};
  const std::string plain = pattern(100'000);
  const TensorToSave tensors[] = {
      {.name = "large",
       .dtype = FileDType::kF32,
       .shape = {2'250'001},
       .fetch = Lender::fetch,
       .fetch_host = &large},
      {.name = "small",
       .dtype = FileDType::kF16,
       .shape = {3},
       .fetch = Lender::fetch,
       .fetch_host = &small},
      tensor("plain", FileDType::kF16, {50'000}, plain.data()),
  };
  const TemporaryFolder folder;
  SaveReport report;
  const Status status =
      save_safetensors(folder / "x", tensors, nullptr, {.hashes = true, .sync = false}, &report);
  ASSERT_TRUE(status.ok()) << status.message();
  const std::string expected = large.memory + plain + small.memory;
  EXPECT_TRUE(data_of(read_file(folder / "x")) == expected);
  EXPECT_EQ(report.model_hash, sha256(expected));
  EXPECT_LE(large.most, size_t{4} << 20);
}

TEST(SafetensorsWriter, VW7CastsWhileWriting) {
  const std::vector<float> numbers(1'500'001, 0.1F);
  const float odd[] = {1e5F, 1e-10F, -0.0F, 65519.99F};
  const int64_t untouched = -1;
  const TensorToSave tensors[] = {
      tensor("many", FileDType::kF32, {1'500'001}, numbers.data()),
      tensor("odd", FileDType::kF32, {4}, odd),
      tensor("step", FileDType::kI64, {}, &untouched),
  };
  SaveReport report;
  const std::string file =
      serialized(tensors, nullptr, {.float_dtype = FileDType::kF16, .hashes = true}, &report);
  std::string expected(8, '\xFF');
  for (size_t i = 0; i < numbers.size(); ++i) expected += std::string("\x66\x2E", 2);
  expected += std::string("\x00\x7C\x00\x00\x00\x80\xFF\x7B", 8);
  EXPECT_TRUE(data_of(file) == expected);
  EXPECT_EQ(report.model_hash, sha256(expected));
  ASSERT_EQ(report.losses.size(), 1U);
  EXPECT_EQ(report.losses[0].name, "odd");
  EXPECT_EQ(report.losses[0].flushed_to_zero, 1U);
  EXPECT_EQ(report.losses[0].became_infinite, 1U);
  EXPECT_NE(file.find(R"("step":{"dtype":"I64")"), std::string::npos);
  EXPECT_NE(file.find(R"("many":{"dtype":"F16")"), std::string::npos);
}

TEST(SafetensorsWriter, WhatCannotBeWrittenIsRefusedFirst) {
  const TemporaryFolder folder;
  const std::string path = folder / "x";
  write_file(path, "old");
  const char data[8] = {};
  const auto refused = [&](const TensorToSave& t, const std::string& said,
                           StatusCode code = StatusCode::kInvalidArgument) {
    const TensorToSave tensors[] = {tensor("first", FileDType::kU8, {8}, data), t};
    const Status status = save_safetensors(path, tensors, nullptr, {});
    EXPECT_EQ(status.code(), code) << said;
    EXPECT_NE(status.message().find(said), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(path), std::string::npos) << status.message();
  };
  refused(tensor("first", FileDType::kU8, {8}, data), "'first' occurs twice");
  refused(tensor("__metadata__", FileDType::kU8, {8}, data), "__metadata__");
  refused(tensor("a\xFF", FileDType::kU8, {8}, data), "UTF-8");
  refused(tensor("t", FileDType::kU8, {-8}, data), "'t'");
  refused(tensor("t", FileDType::kF4, {3}, data), "[3]");
  refused(tensor("t", FileDType::kU8, {INT64_MAX, 4}, data), "2^64");
  refused(tensor("t", FileDType::kU8, {8}, nullptr), "no data");
  refused(tensor("t", static_cast<FileDType>(77), {8}, data), "dtype");
  refused(tensor("t", FileDType::kU8, std::vector<int64_t>(65, 1), data), "64");
  std::vector<TensorToSave> many;
  for (int i = 0; i < 8; ++i)
    many.push_back(tensor(std::to_string(i), FileDType::kU8, {int64_t{1} << 60}, data));
  const Status large = save_safetensors(path, many, nullptr, {});
  EXPECT_EQ(large.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(large.message().find("2^63"), std::string::npos) << large.message();
  const SaveMetadata twice = {{"k", "1"}, {"k", "2"}};
  EXPECT_EQ(save_safetensors(path, {}, &twice, {}).code(), StatusCode::kInvalidArgument);
  const SaveMetadata odd = {{"k", "\xC3"}};
  EXPECT_EQ(save_safetensors(path, {}, &odd, {}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(save_safetensors(path, {}, nullptr, {.float_dtype = FileDType::kI8}).code(),
            StatusCode::kUnsupportedDtype);
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(folder.count(), 1U);
}

TEST(SafetensorsWriter, VW1OverTheFileThatIsMapped) {
  const TemporaryFolder folder;
  const std::string path = folder / "x";
  const std::string content = pattern(300'000);
  const TensorToSave first[] = {tensor("w", FileDType::kU8, {300'000}, content.data())};
  ASSERT_TRUE(save_safetensors(path, first, nullptr, {}).ok());
  SafetensorsReader file;
  ASSERT_TRUE(SafetensorsReader::open(path, &file).ok());
  void* mapped = nullptr;
  ASSERT_TRUE(file.view(*file.find("w"), &mapped).ok());
  const int64_t more = 5;
  const TensorToSave second[] = {tensor("w", FileDType::kU8, {300'000}, mapped),
                                 tensor("more", FileDType::kI64, {}, &more)};
  ASSERT_TRUE(save_safetensors(path, second, nullptr, {}).ok());
  EXPECT_EQ(std::memcmp(mapped, content.data(), content.size()), 0);
  SafetensorsReader again;
  ASSERT_TRUE(SafetensorsReader::open(path, &again).ok());
  EXPECT_EQ(again.entries().size(), 2U);
  EXPECT_TRUE(data_of(read_file(path)) == std::string("\5\0\0\0\0\0\0\0", 8) + content);
}

TEST(SafetensorsWriter, VW5ModePathsAndLinks) {
  const TemporaryFolder folder;
  const int64_t number = 1;
  const TensorToSave tensors[] = {tensor("n", FileDType::kI64, {}, &number)};
  const auto save = [&](const std::string& path) {
    return save_safetensors(path, tensors, nullptr, {});
  };
  const mode_t old = umask(027);
  const std::string odd = folder / "\xE6\xA8\xA1\xE5\x9E\x8B \xC3\xA9\xF0\x9F\x98\x80.safetensors";
  EXPECT_TRUE(save(odd).ok());
  umask(old);
  struct stat info{};
  ASSERT_EQ(stat(odd.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777U, 0640U);

  Status status = save(folder / "no/such/folder");
  EXPECT_EQ(status.code(), StatusCode::kFileError);
  EXPECT_EQ(status.error_number(), ENOENT);
  EXPECT_NE(status.message().find(folder / "no/such/folder"), std::string::npos);
  status = save(folder.path());
  EXPECT_EQ(status.error_number(), EISDIR);
  EXPECT_EQ(save("").error_number(), ENOENT);
  EXPECT_EQ(save(std::string("a\0b", 3)).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(save(folder / std::string(300, 'n')).error_number(), ENAMETOOLONG);

  // A name as long as names can be, in a folder of its own.
  ASSERT_EQ(mkdir((folder / "deep").c_str(), 0700), 0);
  EXPECT_TRUE(save(folder / ("deep/" + std::string(255, 'n'))).ok());

  write_file(folder / "behind", "old");
  ASSERT_EQ(symlink("behind", (folder / "link").c_str()), 0);
  EXPECT_TRUE(save(folder / "link").ok());
  ASSERT_EQ(lstat((folder / "link").c_str(), &info), 0);
  EXPECT_TRUE(S_ISLNK(info.st_mode));
  EXPECT_EQ(read_file(folder / "behind"), read_file(odd));
  ASSERT_EQ(symlink("round", (folder / "round").c_str()), 0);
  EXPECT_EQ(save(folder / "round").error_number(), ELOOP);
}

TEST(SafetensorsWriter, VW2WhatKilledWritersLeftIsRemoved) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.safetensors";
  write_file(temporary_prefix(path) + "0123456789abcdef.tmp", "half a file");
  write_file(temporary_prefix(folder / "y.safetensors") + "0123456789abcdef.tmp",
             "another target's");
  write_file(folder / "x.safetensors.tmp", "the user's own");
  ASSERT_TRUE(save_safetensors(path, {}, nullptr, {}).ok());
  EXPECT_EQ(folder.count(), 3U);
  EXPECT_EQ(access((temporary_prefix(path) + "0123456789abcdef.tmp").c_str(), F_OK), -1);
}

}  // namespace
}  // namespace loraaccel::test
