// Means over windows, against sums in double.
#include <gtest/gtest.h>

#include <vector>

#include "loraaccel/losses.h"
#include "support/host.h"
#include "support/operand.h"
#include "support/random.h"

namespace loraaccel::test {
namespace {

void check(int64_t planes, int64_t h, int64_t w, int64_t out_h, int64_t out_w, DType dtype) {
  SCOPED_TRACE(std::to_string(h) + " x " + std::to_string(w) + " to " + std::to_string(out_h) +
               " x " + std::to_string(out_w) + " " + dtype_name(dtype));
  Random random(1);
  TestHost host;
  const Operand image =
      Operand::matrix(dtype, planes * h, w, Layout::kDense, [&] { return random.real(); });
  const DType sums = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
  const Operand resized = Operand::output(sums, planes * out_h, out_w);
  const Status status = area_resize(
      host.context(3), {.image = image.view(), .resized = resized.view(), .planes = planes});
  ASSERT_TRUE(status.ok()) << status.message();
  for (int64_t p = 0; p < planes; ++p) {
    for (int64_t i = 0; i < out_h; ++i) {
      for (int64_t j = 0; j < out_w; ++j) {
        double sum = 0;
        double count = 0;
        for (int64_t r = i * h / out_h; r * out_h < (i + 1) * h; ++r) {
          for (int64_t c = j * w / out_w; c * out_w < (j + 1) * w; ++c, ++count)
            sum += image.at(p * h + r, c);
        }
        ASSERT_NEAR(resized.at(p * out_h + i, j), sum / count,
                    dtype == DType::kFloat64 ? 1e-15 : 1e-6)
            << p << " " << i << " " << j;
      }
    }
  }
  EXPECT_TRUE(image.untouched() && resized.guards_intact());
}

TEST(AreaResize, AllSizes) {
  for (const int64_t h : {1, 2, 5, 9}) {
    for (const int64_t w : {1, 3, 8, 17}) {
      for (const int64_t out : {1, 2, 4, 7, 11}) check(2, h, w, out, out + 1, DType::kFloat32);
    }
  }
  check(1, 3, 5000, 2, 1, DType::kFloat32);  // a window wider than a strip
  check(1, 3, 5000, 2, 3, DType::kFloat32);
  check(2, 2, 5000, 1, 700, DType::kFloat32);
  for (const DType dtype : {DType::kFloat64, DType::kBFloat16, DType::kFloat16})
    check(3, 16, 24, 2, 3, dtype);
}

TEST(AreaResize, KnownVector) {
  const std::vector<float> image = {0, 1, 1, 0, 1};
  const Operand resized = Operand::output(DType::kFloat32, 1, 2);
  TestHost host;
  ASSERT_TRUE(
      area_resize(host.context(), {.image = TensorView::matrix(image.data(), DType::kFloat32, 1, 5),
                                   .resized = resized.view()})
          .ok());
  EXPECT_EQ(resized.at(0, 0), 2.0F / 3.0F);
  EXPECT_EQ(resized.at(0, 1), 2.0F / 3.0F);
}

TEST(AreaResize, Errors) {
  TestHost host;
  const Operand image = Operand::matrix(DType::kFloat32, 4, 4, Layout::kDense, [] { return 1.0; });
  const Operand out = Operand::output(DType::kFloat32, 2, 2);
  const Operand empty = Operand::output(DType::kFloat32, 0, 4);
  const auto code = [&](const AreaResizeArgs& args) {
    return area_resize(host.context(), args).code();
  };
  EXPECT_EQ(code({.image = image.view(), .resized = out.view(), .planes = 3}),
            StatusCode::kShapeMismatch);
  EXPECT_EQ(code({.image = image.view(), .resized = out.view(), .planes = 0}),
            StatusCode::kShapeMismatch);
  EXPECT_EQ(code({.image = empty.view(), .resized = out.view()}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.image = image.view(), .resized = image.view()}), StatusCode::kInvalidArgument);
  EXPECT_TRUE(out.untouched());
}

}  // namespace
}  // namespace loraaccel::test
