#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "loraaccel/kernels.h"

namespace loraaccel::test {
namespace {

TEST(ListKernels, BestFirstAndRefLast) {
  const std::vector<KernelInfo> kernels = list_kernels(/*host_lends_gemm=*/true);
  std::map<std::string, std::string> names;  // of each family; those of the CPU are the last ones
  for (const KernelInfo& k : kernels) {
    EXPECT_EQ(k.available, k.reason.empty()) << k.name << ": " << k.reason;
    names[k.op] += " " + k.name;
    EXPECT_TRUE(k.available || k.name != "ref") << k.op;
  }
  EXPECT_EQ(names.size(), 2U);
  const std::string& linear = names["lora_linear"];
  EXPECT_TRUE(linear.ends_with(" avx512_bf16 avx512 avx2 neon_bf16 neon torch portable ref"))
      << linear;
  EXPECT_EQ(names["resize_image"], " avx2 ref");
}

TEST(ListKernels, BorrowingNeedsALender) {
  for (const bool lends : {false, true}) {
    for (const KernelInfo& k : list_kernels(lends)) {
      if (k.name != "torch") continue;
      EXPECT_EQ(k.available, lends);
      EXPECT_EQ(k.reason.empty(), lends);
    }
  }
}

TEST(DescribeJson, NamesWhatABugReportNeeds) {
  const std::string report = describe_json();
  EXPECT_EQ(report.front(), '{');
  EXPECT_EQ(report.back(), '}');
  for (const char* key : {"\"version\"", "\"compiler\"", "\"cpu_features\"", "\"num_threads\"",
                          "\"kernels\"", "\"ref\""}) {
    EXPECT_NE(report.find(key), std::string::npos) << key;
  }
  for (const std::string& feature : cpu_features())
    EXPECT_NE(report.find(feature), std::string::npos);
}

}  // namespace
}  // namespace loraaccel::test
