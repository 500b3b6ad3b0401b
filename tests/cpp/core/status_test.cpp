#include "loraaccel/status.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

#include "support/env.h"

namespace loraaccel::test {
namespace {

TEST(Status, OkIsEmpty) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kOk);
  EXPECT_TRUE(status.message().empty());
  EXPECT_TRUE(status.traceback().empty());
  EXPECT_TRUE(status.to_string().empty());
}

TEST(Status, FailureOwnsItsMessage) {
  const ScopedEnv off("LORAACCEL_TRACEBACK", nullptr);
  std::string text = "op: x has shape [2], expected [3]";
  const Status status(StatusCode::kShapeMismatch, text);
  text.assign(text.size(), '?');
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kShapeMismatch);
  EXPECT_EQ(status.message(), "op: x has shape [2], expected [3]");
  EXPECT_TRUE(status.traceback().empty());
  EXPECT_EQ(status.to_string(), status.message());
}

TEST(Status, CopiesKeepEverything) {
  const ScopedEnv on("LORAACCEL_TRACEBACK", "1");
  const Status status(StatusCode::kInternal, "op: broken");
  const Status copy = status;  // NOLINT(performance-unnecessary-copy-initialization)
  EXPECT_EQ(copy.code(), status.code());
  EXPECT_EQ(copy.to_string(), status.to_string());
  EXPECT_FALSE(copy.traceback().empty());
  EXPECT_EQ(copy.to_string().find("op: broken\n"), 0U);
}

TEST(Status, EveryCodeHasAName) {
  std::set<std::string> names;
  for (int code = 0; code <= static_cast<int>(StatusCode::kInternal); ++code) {
    const char* name = status_code_name(static_cast<StatusCode>(code));
    ASSERT_NE(name, nullptr);
    EXPECT_GT(std::strlen(name), 0U);
    EXPECT_EQ(std::string(name).find_first_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), std::string::npos)
        << name;
    names.insert(name);
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(StatusCode::kInternal) + 1)
      << "two codes share a name";
  EXPECT_NE(status_code_name(static_cast<StatusCode>(999)), nullptr);
}

Status first_failure_of(int* calls, bool first_fails) {
  const auto step = [&](bool fails) {
    ++*calls;
    return fails ? Status(StatusCode::kInvalidArgument, "step") : Status();
  };
  LORAACCEL_RETURN_IF_ERROR(step(first_fails));
  LORAACCEL_RETURN_IF_ERROR(step(true));
  return Status(StatusCode::kInternal, "not reached");
}

TEST(Status, MacroReturnsTheFirstFailure) {
  int calls = 0;
  EXPECT_EQ(first_failure_of(&calls, true).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(calls, 1);
  calls = 0;
  EXPECT_EQ(first_failure_of(&calls, false).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace loraaccel::test
