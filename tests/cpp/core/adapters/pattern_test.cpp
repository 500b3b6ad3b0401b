#include "adapters/pattern.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace loraaccel::test {
namespace {

struct Case {
  const char* pattern;
  const char* path;
  bool matches;
};

// What Python's re.match(rf"(.*\.)?({pattern})$", path) says.
const Case kCases[] = {
    {"q_proj", "model.layers.0.self_attn.q_proj", true},
    {"q_proj", "q_proj", true},
    {"q_proj", "model.xq_proj", false},
    {"q_proj", "q_proj.x", false},
    {"proj", "q_proj", false},
    {R"(layers\.0\..*)", "model.layers.0.mlp.up", true},
    {R"(layers\.0\..*)", "model.layers.10.mlp.up", false},
    {R"(layers\.\d+\.q)", "layers.123.q", true},
    {R"(layers\.[0-3]\.q)", "layers.4.q", false},
    {R"(layers\.[^0-3]\.q)", "layers.4.q", true},
    {"(q|k|v)_proj", "a.k_proj", true},
    {"(q|k|v)_proj", "a.o_proj", false},
    {"a{2,3}", "aa", true},
    {"a{2,3}", "aaaa", false},
    {"a{2}b?", "aab", true},
    {R"(\w+_proj)", "x.q_proj", true},
    {"(?:q|k)", "b.q", true},
    {"a+", "a", true},
    {"a*b", "b", true},
    {"", "anything.", true},
    {"^q$", "a.q", true},
};

TEST(Pattern, MatchesWhatPythonMatches) {
  for (const Case& c : kCases) {
    bool matches = false;
    const Status status = pattern_matches(c.pattern, c.path, &matches);
    if (!status.ok()) {
      // anchors and such are another syntax: an error, never another answer
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << c.pattern;
      EXPECT_NE(std::string(c.pattern).find_first_of("^?"), std::string::npos) << c.pattern;
      continue;
    }
    EXPECT_EQ(matches, c.matches) << c.pattern << " on " << c.path;
  }
}

TEST(Pattern, RefusesSyntaxThatItDoesNotKnow) {
  for (const char* pattern :
       {"(", ")", "[a", "*a", "a{3,1}", "(?=a)", "(?P<n>a)", R"(\1)", R"(a\)"}) {
    bool matches = true;
    const Status status = pattern_matches(pattern, "a", &matches);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << pattern;
    EXPECT_NE(status.message().find(pattern), std::string::npos) << status.message();
  }
}

TEST(Pattern, HostilePatternsEndInTime) {
  std::string path(2000, 'a');
  bool matches = true;
  const auto start = std::chrono::steady_clock::now();
  for (const char* pattern : {"(a*)*b", "(a|a)*b", "(a+)+b", "(a|aa)+b"}) {
    ASSERT_TRUE(pattern_matches(pattern, path, &matches).ok()) << pattern;
    EXPECT_FALSE(matches);
  }
  // exponential time would be longer than the age of the universe
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(1));
  EXPECT_FALSE(pattern_matches(std::string(1 << 20, '('), "a", &matches).ok());
}

}  // namespace
}  // namespace loraaccel::test
