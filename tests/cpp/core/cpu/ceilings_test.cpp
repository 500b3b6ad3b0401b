#include "cpu/ceilings.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace loraaccel::test {
namespace {

TEST(Ceilings, EveryDtypeHasARate) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    const char* isa = nullptr;
    EXPECT_GT(cpu::measure_fma_gflops(dtype, 0.01, &isa), 0.01) << dtype;
    EXPECT_NE(isa, nullptr) << dtype;
    EXPECT_GT(cpu::measure_fma_gflops(dtype, 0.001, nullptr), 0) << dtype;
  }
}

TEST(Ceilings, UnknownDtypeIsZero) {
  const char* isa = "not written";
  EXPECT_EQ(cpu::measure_fma_gflops("int4", 0.001, &isa), 0);
  EXPECT_EQ(isa, nullptr);
}

TEST(Ceilings, Reading) {
  std::vector<uint64_t> buffer(1 << 20, 1);
  EXPECT_GT(cpu::measure_read_gbytes(buffer.data(), buffer.size() * sizeof(uint64_t), 2), 0.001);
  EXPECT_EQ(cpu::measure_read_gbytes(buffer.data(), 1023, 1), 0);  // less than one step
  EXPECT_EQ(cpu::measure_read_gbytes(buffer.data(), 4096, 0), 0);
  EXPECT_EQ(cpu::measure_read_gbytes(nullptr, 0, 1), 0);
}

}  // namespace
}  // namespace loraaccel::test
