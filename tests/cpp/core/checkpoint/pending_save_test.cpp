// Saves in the background: the snapshot, the outcome, and what is refused at once.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "loraaccel/safetensors.h"
#include "support/files.h"

namespace loraaccel::test {
namespace {

TEST(PendingSave, WritesWhatTheTensorsWereWhenItBegan) {
  const TemporaryFolder folder;
  std::vector<float> values(3'000'000, 0.5F);
  const TensorToSave tensors[] = {
      {.name = "w", .dtype = FileDType::kF32, .shape = {3'000'000}, .data = values.data()}};
  const SaveMetadata metadata = {{"ss_a", "1"}};
  const SaveOptions options{.float_dtype = FileDType::kF16, .hashes_in_metadata = true};
  SaveReport expected;
  ASSERT_TRUE(save_safetensors(folder / "now", tensors, &metadata, options, &expected).ok());
  PendingSave pending;
  ASSERT_TRUE(save_safetensors_async(folder / "later", tensors, &metadata, options, &pending).ok());
  std::fill(values.begin(), values.end(), 7.0F);
  SaveReport report;
  ASSERT_TRUE(pending.wait(&report).ok());
  EXPECT_TRUE(pending.done());
  EXPECT_TRUE(read_file(folder / "later") == read_file(folder / "now"));
  EXPECT_EQ(report.model_hash, expected.model_hash);
  EXPECT_EQ(report.file_size, expected.file_size);
  EXPECT_TRUE(pending.wait().ok()) << "may be asked again";
}

TEST(PendingSave, ReportsLossesOfTheCastMadeBefore) {
  const TemporaryFolder folder;
  const float values[] = {1e5F, 1e-10F};
  const TensorToSave tensors[] = {
      {.name = "w", .dtype = FileDType::kF32, .shape = {2}, .data = values}};
  PendingSave pending;
  ASSERT_TRUE(save_safetensors_async(folder / "x", tensors, nullptr,
                                     {.float_dtype = FileDType::kF16}, &pending)
                  .ok());
  SaveReport report;
  ASSERT_TRUE(pending.wait(&report).ok());
  ASSERT_EQ(report.losses.size(), 1U);
  EXPECT_EQ(report.losses[0].became_infinite, 1U);
  EXPECT_EQ(report.losses[0].flushed_to_zero, 1U);
}

TEST(PendingSave, ErrorsOfTheFileComeWithWaitThoseOfArgumentsAtOnce) {
  const TemporaryFolder folder;
  PendingSave pending;
  EXPECT_TRUE(pending.done());
  EXPECT_TRUE(pending.wait().ok()) << "nothing was started";
  ASSERT_TRUE(save_safetensors_async(folder / "no/folder", {}, nullptr, {}, &pending).ok());
  EXPECT_EQ(pending.wait().error_number(), ENOENT);
  EXPECT_EQ(pending.wait().error_number(), ENOENT);
  const TensorToSave twice[] = {{.name = "w", .shape = {0}}, {.name = "w", .shape = {0}}};
  EXPECT_EQ(save_safetensors_async(folder / "x", twice, nullptr, {}, &pending).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(folder.count(), 0U);
}

TEST(PendingSave, TheDestructorWaits) {
  const TemporaryFolder folder;
  const std::string content(5'000'000, 'x');
  const TensorToSave tensors[] = {
      {.name = "w", .dtype = FileDType::kU8, .shape = {5'000'000}, .data = content.data()}};
  {
    PendingSave pending;
    ASSERT_TRUE(save_safetensors_async(folder / "x", tensors, nullptr, {}, &pending).ok());
    PendingSave moved = std::move(pending);
    EXPECT_TRUE(pending.done());  // NOLINT(bugprone-use-after-move): it has nothing to wait for
  }
  EXPECT_GT(read_file(folder / "x").size(), content.size());
  EXPECT_EQ(folder.count(), 1U);
}

TEST(PendingSave, TwoOfTheSameTargetLeaveOneWholeFile) {
  const TemporaryFolder folder;
  std::vector<PendingSave> saves(6);
  std::vector<std::string> contents;
  for (char c = 'a'; c < 'g'; ++c) contents.emplace_back(700'000, c);
  for (size_t i = 0; i < saves.size(); ++i) {
    const TensorToSave tensors[] = {
        {.name = "w", .dtype = FileDType::kU8, .shape = {700'000}, .data = contents[i].data()}};
    ASSERT_TRUE(
        save_safetensors_async(folder / "x", tensors, nullptr, {.sync = false}, &saves[i]).ok());
  }
  for (PendingSave& save : saves) {
    const Status status = save.wait();
    EXPECT_TRUE(status.ok()) << status.message();
  }
  const std::string file = read_file(folder / "x");
  EXPECT_EQ(file.substr(file.size() - 700'000), std::string(700'000, file.back()));
  EXPECT_EQ(folder.count(), 1U);
}

}  // namespace
}  // namespace loraaccel::test
