// The headers that hold no code of the library: dtype.h, tensor_view.h, version.h.
#include "loraaccel/tensor_view.h"

#include <gtest/gtest.h>

#include <string>
#include <type_traits>

#include "loraaccel/version.h"

namespace loraaccel::test {
namespace {

TEST(DType, SizesAndNames) {
  EXPECT_EQ(dtype_size_bytes(DType::kFloat32), 4U);
  EXPECT_EQ(dtype_size_bytes(DType::kFloat64), 8U);
  EXPECT_EQ(dtype_size_bytes(DType::kBFloat16), 2U);
  EXPECT_EQ(dtype_size_bytes(DType::kFloat16), 2U);
  EXPECT_STREQ(dtype_name(DType::kBFloat16), "bfloat16");
  EXPECT_STREQ(dtype_name(static_cast<DType>(100)), "unknown");
}

TEST(DType, VisitorSeesTheType) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    const size_t size =
        visit_dtype(dtype, [](auto tag) { return sizeof(typename decltype(tag)::type); });
    EXPECT_EQ(size, dtype_size_bytes(dtype));
  }
  EXPECT_TRUE(visit_dtype(DType::kFloat16, [](auto tag) {
    return std::is_same_v<typename decltype(tag)::type, Float16>;
  }));
}

TEST(TensorView, DefaultIsUndefined) {
  const TensorView v;
  EXPECT_FALSE(v.defined());
  EXPECT_EQ(v.numel(), 0);
}

TEST(TensorView, MatrixIsDense) {
  float data[6] = {};
  const TensorView v = TensorView::matrix(data, DType::kFloat32, 2, 3);
  EXPECT_TRUE(v.defined());
  EXPECT_EQ(v.data, data);
  EXPECT_EQ(v.rows(), 2);
  EXPECT_EQ(v.cols(), 3);
  EXPECT_EQ(v.numel(), 6);
  EXPECT_EQ(v.stride[0], 3);
  EXPECT_EQ(v.stride[1], 1);
}

TEST(TensorView, TransposedIsTheSameMemory) {
  float data[6] = {};
  const TensorView v = TensorView::strided(data, DType::kFloat32, 2, 3, -7, 2).transposed();
  EXPECT_EQ(v.data, data);
  EXPECT_EQ(v.rows(), 3);
  EXPECT_EQ(v.cols(), 2);
  EXPECT_EQ(v.stride[0], 2);
  EXPECT_EQ(v.stride[1], -7);
}

TEST(TensorView, VectorHasOneColumn) {
  double data[3] = {};
  const TensorView v = TensorView::vector(data, DType::kFloat64, 3, -1);
  EXPECT_EQ(v.ndim, 1);
  EXPECT_EQ(v.rows(), 3);
  EXPECT_EQ(v.cols(), 1);
  EXPECT_EQ(v.numel(), 3);
  EXPECT_EQ(v.stride[0], -1);
}

TEST(Version, TextAndNumbersAgree) {
  EXPECT_EQ(std::string(LORAACCEL_VERSION).find(std::to_string(LORAACCEL_VERSION_MAJOR) + "."), 0U);
}

}  // namespace
}  // namespace loraaccel::test
