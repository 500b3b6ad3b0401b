// Means over windows. Reading the image once is nearly all of the time.
#include <algorithm>
#include <type_traits>

#include "half.h"
#include "losses/loss_checks.h"

namespace loraaccel {
namespace {

constexpr const char* kOp = "area_resize";
constexpr int64_t kStrip = 2048;  // columns that are summed up at once, in the first cache

struct Windows {
  int64_t in, out;

  int64_t begin(int64_t i) const { return i * in / out; }
  int64_t end(int64_t i) const { return ceil_div((i + 1) * in, out); }
};

// One row of the result: the means over rows of the image, of which the first is at `image`.
template <class T, class Out>
void resize_row(const T* image, int64_t stride, int64_t rows, const Windows& columns, Out* out) {
  using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
  Sum sums[kStrip];
  for (int64_t j = 0; j < columns.out;) {
    const int64_t first = columns.begin(j);
    int64_t next = j + 1;  // as many windows as the strip has room for
    while (next < columns.out && columns.end(next) - first <= kStrip) ++next;
    const int64_t end = columns.end(next - 1);
    double wide = 0;  // of a window that is wider than the strip, and then the only one
    for (int64_t from = first; from < end; from += kStrip) {
      const int64_t count = std::min(end - from, kStrip);
      std::fill_n(sums, count, Sum(0));
      for (int64_t r = 0; r < rows; ++r) {
        const T* row = image + r * stride + from;
        for (int64_t c = 0; c < count; ++c) sums[c] += static_cast<Sum>(to_float(row[c]));
      }
      if (end - first > kStrip) {
        for (int64_t c = 0; c < count; ++c) wide += sums[c];
      }
    }
    for (; j < next; ++j) {
      const int64_t begin = columns.begin(j);
      const int64_t width = columns.end(j) - begin;
      double sum = wide;
      if (end - first <= kStrip) {
        for (int64_t c = 0; c < width; ++c) sum += sums[begin - first + c];
      }
      from_float(sum / static_cast<double>(rows * width), out + j);
    }
  }
}

Status check(const ExecContext& ctx, const AreaResizeArgs& args) {
  const LossChecker checker(kOp, ctx.device);
  LORAACCEL_RETURN_IF_ERROR(checker.context(ctx));
  for (const auto& [name, v] :
       {std::pair{"image", &args.image}, std::pair{"resized", &args.resized}}) {
    if (v->ndim != 2 || args.planes < 1 || v->rows() % args.planes != 0) {
      return checker.fail(StatusCode::kShapeMismatch, std::string(name) + " has shape " +
                                                          shape_text(*v) + ", expected rows of " +
                                                          std::to_string(args.planes) + " planes");
    }
    LORAACCEL_RETURN_IF_ERROR(checker.dense_matrix(name, *v, *v));
  }
  if (args.image.numel() == 0 && args.resized.numel() != 0)
    return checker.fail(StatusCode::kInvalidArgument, "image is empty, expected pixels");
  return checker.apart("resized", args.resized, {args.image});
}

}  // namespace

Status area_resize(const ExecContext& ctx, const AreaResizeArgs& args) {
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check(ctx, args));
    if (args.resized.numel() == 0) return Status();
    const Windows rows = {args.image.rows() / args.planes, args.resized.rows() / args.planes};
    const Windows columns = {args.image.cols(), args.resized.cols()};
    visit_dtype(args.image.dtype, [&](auto from) {
      using T = typename decltype(from)::type;
      visit_dtype(args.resized.dtype, [&](auto to) {
        using Out = typename decltype(to)::type;
        const auto* image = static_cast<const T*>(args.image.data);
        auto* out = static_cast<Out*>(args.resized.data);
        parallel_for(ctx, args.resized.rows(), [&](int64_t i) {
          const int64_t plane = i / rows.out;
          const int64_t begin = rows.begin(i % rows.out);
          resize_row(image + (plane * rows.in + begin) * columns.in, columns.in,
                     rows.end(i % rows.out) - begin, columns, out + i * columns.out);
        });
      });
    });
    return Status();
  });
}

}  // namespace loraaccel
