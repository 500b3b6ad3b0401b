#include "traceback.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "loraaccel/lora_linear.h"
#include "loraaccel/status.h"
#include "support/env.h"

namespace loraaccel::test {

// Outside an anonymous namespace and never inlined: a frame with this name has to appear.
__attribute__((noinline)) std::string traceback_from_here(int skip) {
  std::string text = capture_traceback(skip);
  return text + "\n";  // after the call, so that it is no tail call
}

namespace {

#if defined(__GLIBC__) || defined(__APPLE__)

int64_t lines_of(const std::string& text) {
  return text.empty() ? 0 : std::ranges::count(text, '\n') + (text.back() == '\n' ? 0 : 1);
}

TEST(Traceback, WantedOnlyWhenAskedFor) {
  for (const char* off : {static_cast<const char*>(nullptr), "", "0"}) {
    const ScopedEnv env("LORAACCEL_TRACEBACK", off);
    EXPECT_FALSE(traceback_wanted());
    EXPECT_TRUE(Status(StatusCode::kInternal, "x").traceback().empty());
  }
  for (const char* on : {"1", "yes"}) {
    const ScopedEnv env("LORAACCEL_TRACEBACK", on);
    EXPECT_TRUE(traceback_wanted());
    EXPECT_FALSE(Status(StatusCode::kInternal, "x").traceback().empty());
  }
}

TEST(Traceback, OneNumberedLinePerFrame) {
  const std::string text = capture_traceback(0);
  int64_t index = 0;
  for (size_t at = 0; at < text.size(); ++index) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string start = "#" + std::to_string(index) + " ";
    EXPECT_EQ(text.compare(at, start.size(), start), 0) << text.substr(at, end - at);
    EXPECT_EQ(text[end - 1], ')') << "no library in: " << text.substr(at, end - at);
    at = end + 1;
  }
  EXPECT_GT(index, 3);
}

TEST(Traceback, SkipLeavesOutFrames) {
  const int64_t all = lines_of(traceback_from_here(0));
  EXPECT_EQ(lines_of(traceback_from_here(1)), all - 1);
  EXPECT_EQ(lines_of(traceback_from_here(3)), all - 3);
  EXPECT_EQ(lines_of(capture_traceback(1000)), 0);
}

// The innermost frame is the caller of capture_traceback(). Its name, file and line need libbacktrace and -g1.
TEST(Traceback, NamesTheCaller) {
  const std::string text = traceback_from_here(0);
  const std::string first = text.substr(0, text.find('\n'));
#ifdef LORAACCEL_TEST_HAS_LINES
  EXPECT_NE(first.find("traceback_from_here"), std::string::npos) << first;
  EXPECT_NE(first.find("traceback_test.cpp:"), std::string::npos) << first;
#endif
  EXPECT_NE(first.find("loraaccel_core_tests+0x"), std::string::npos) << first;
}

TEST(Traceback, ShowsWhereAnOperatorFailed) {
  const ScopedEnv on("LORAACCEL_TRACEBACK", "1");
  const Status status = lora_linear_forward(default_context(), {});
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.to_string().find("native stack"), std::string::npos);
#ifdef LORAACCEL_TEST_HAS_LINES
  EXPECT_NE(status.traceback().find("lora_linear.cpp:"), std::string::npos) << status.traceback();
  EXPECT_NE(status.traceback().find("traceback_test.cpp:"), std::string::npos);
#endif
}

#else

TEST(Traceback, SaysThatThereIsNone) { EXPECT_FALSE(capture_traceback(0).empty()); }

#endif

}  // namespace
}  // namespace loraaccel::test
