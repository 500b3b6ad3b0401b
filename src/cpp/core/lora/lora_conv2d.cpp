#include "loraaccel/lora_conv2d.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "lora/blocked_product.h"
#include "lora/checks.h"
#include "lora/lora_linear_kernels.h"
#include "lora/pixel_columns.h"
#include "lora/plain.h"

namespace loraaccel {
namespace {

Status check(const ExecContext& ctx, const LoraConv2dArgs& args) {
  const Checker checker("lora_conv2d", ctx.device);
  LORAACCEL_RETURN_IF_ERROR(checker.context(ctx));
  const ConvShape& s = args.shape;
  for (int d = 0; d < 2; ++d) {
    if (s.kernel[d] < 1 || s.stride[d] < 1 || s.dilation[d] < 1 || s.padding[d] < 0) {
      return checker.fail(StatusCode::kInvalidArgument,
                          "kernel, stride or dilation below 1, or padding below 0");
    }
    if (s.output(d) < 1)
      return checker.fail(StatusCode::kShapeMismatch, "the kernel is larger than the padded image");
  }
  if (args.dtype == DType::kFloat64)
    return checker.fail(StatusCode::kUnsupportedDtype, "x is float64, expected at most 32 bits");
  const TensorView like = TensorView::strided(nullptr, args.dtype, 0, s.inputs(), 0, 0);
  if (args.w.ndim != 2)
    return checker.fail(StatusCode::kShapeMismatch,
                        "weight has shape " + shape_text(args.w) + ", expected [N, C kh kw]");
  LORAACCEL_RETURN_IF_ERROR(
      checker.matrix("weight", args.w, args.w.rows(), s.inputs(), "N, C kh kw"));
  LORAACCEL_RETURN_IF_ERROR(checker.dtype("weight", args.w, args.dtype, "x"));
  if (args.bias.defined())
    LORAACCEL_RETURN_IF_ERROR(checker.vector("bias", args.bias, args.w.rows(), "N"));
  LoraAdapter adapter;
  adapter.a = args.a;
  adapter.b = args.b;
  adapter.scale = args.scale;
  LORAACCEL_RETURN_IF_ERROR(checker.adapter(adapter, like, args.w));
  if (s.samples > 0 && (args.x == nullptr || args.y == nullptr || args.h == nullptr))
    return checker.fail(StatusCode::kInvalidArgument, "x, y or h is null");
  return Status();
}

Status forward_ref(const ExecContext& ctx, const LoraConv2dArgs& args) {
  const ConvShape& s = args.shape;
  const int64_t pixels = s.pixels();
  const int64_t rank = args.a.rows();
  const int64_t taps = s.kernel[0] * s.kernel[1];
  const TensorView x =
      TensorView::matrix(args.x, args.dtype, s.samples * s.channels, s.height * s.width);
  const TensorView y = TensorView::matrix(args.y, args.dtype, s.samples * args.w.rows(), pixels);
  parallel_for(ctx, s.samples * pixels, [&](int64_t i) {
    const int64_t sample = i / pixels;
    const int64_t p = i % pixels;
    const auto pixel = [&](int64_t k) {
      const int64_t u = k % taps / s.kernel[1];
      const int64_t v = k % taps % s.kernel[1];
      const int64_t row = p / s.output(1) * s.stride[0] - s.padding[0] + u * s.dilation[0];
      const int64_t column = p % s.output(1) * s.stride[1] - s.padding[1] + v * s.dilation[1];
      if (row < 0 || row >= s.height || column < 0 || column >= s.width) return 0.0;
      return plain_read(x, sample * s.channels + k / taps, row * s.width + column);
    };
    for (int64_t r = 0; r < rank; ++r) {
      double sum = 0;
      for (int64_t k = 0; k < s.inputs(); ++k) sum += pixel(k) * plain_read(args.a, r, k);
      args.h[(sample * rank + r) * pixels + p] = static_cast<float>(sum);
    }
    for (int64_t n = 0; n < args.w.rows(); ++n) {
      double sum = 0;
      for (int64_t k = 0; k < s.inputs(); ++k) sum += pixel(k) * plain_read(args.w, n, k);
      double update = 0;
      for (int64_t r = 0; r < rank; ++r) {
        update += static_cast<double>(args.h[(sample * rank + r) * pixels + p]) *
                  plain_read(args.b, n, r);
      }
      if (args.bias.defined()) {
        TensorView bias = args.bias;
        bias.stride[1] = 0;
        sum += plain_read(bias, n, 0);
      }
      plain_write(y, sample * args.w.rows() + n, p, sum + args.scale * update);
    }
  });
  return Status();
}

// A in the type that multiplies the panels. Floats beside pairs of bfloat16 become two bfloat16s, high and low: their
// sum has 16 digits, and the result of an addition of both products is that of A itself as far as y can tell.
struct RankLeft {
  Scratch<float> floats;
  Scratch<char> pairs;
  AnyRows rows;
  int64_t parts = 1;  // rows of A are there so many times

  Status make(const ExecContext& ctx, const char* op, const TensorView& a, bool as_pairs) {
    Rows<float> given;
    LORAACCEL_RETURN_IF_ERROR(rows_as<float>(ctx, op, a, &floats, &given));
    if (!as_pairs) {
      rows = {given.data, given.stride, DType::kFloat32};
      return Status();
    }
    parts = a.dtype == DType::kBFloat16 ? 1 : 2;
    const int64_t stride = ceil_div(a.cols(), 2) * 2;
    if (!pairs.allocate(ctx, parts * a.rows() * stride * static_cast<int64_t>(sizeof(BFloat16))))
      return out_of_memory(op);
    auto* to = reinterpret_cast<BFloat16*>(pairs.data());
    std::fill_n(to, parts * a.rows() * stride, BFloat16{});
    for (int64_t r = 0; r < a.rows(); ++r) {
      for (int64_t k = 0; k < a.cols(); ++k) {
        const float v = given.data[r * given.stride + k];
        BFloat16* high = to + r * stride + k;
        from_float(v, high);
        if (parts == 2)
          from_float(v - static_cast<float>(to_float(*high)), high + a.rows() * stride);
      }
    }
    rows = {to, stride, DType::kBFloat16};
    return Status();
  }
};

// The frozen product of every image, with W on the left; A multiplies each panel of pixels as soon as it is packed, and
// what it gives is the right factor of the update: rows of h, and a row of ones for the bias.
Status forward_own(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                   const LoraConv2dArgs& args) {
  const ConvShape& s = args.shape;
  const int64_t pixels = s.pixels();
  const int64_t outputs = args.w.rows();
  const int64_t rank = args.a.rows();
  const bool pairs = simd.pairs && args.dtype == DType::kBFloat16;
  RankLeft a;
  LORAACCEL_RETURN_IF_ERROR(a.make(ctx, op, args.a, pairs));
  const int64_t a_rows = a.parts * rank;
  const bool biased = args.bias.defined();
  const int64_t depth2 = a_rows + (biased ? 1 : 0);

  // [N, depth2]: s B for every part of A, and the bias.
  Scratch<float> left2;
  if (!left2.allocate(ctx, outputs * depth2)) return out_of_memory(op);
  for (int64_t n = 0; n < outputs; ++n) {
    float* row = left2.data() + n * depth2;
    for (int64_t r = 0; r < a_rows; ++r)
      row[r] = static_cast<float>(args.scale * plain_read(args.b, n, r % rank));
    if (biased) {
      TensorView bias = args.bias;
      bias.stride[1] = 0;
      row[a_rows] = static_cast<float>(plain_read(bias, n, 0));
    }
  }
  Scratch<char> w_copy;
  ProductTerm term;
  term.depth = s.inputs();
  LORAACCEL_RETURN_IF_ERROR(rows_of(ctx, op, args.w, &w_copy, &term.left));

  const auto images = static_cast<size_t>(s.samples);
  const int64_t element = static_cast<int64_t>(dtype_size_bytes(args.dtype));
  std::vector<PixelColumns> columns;
  columns.reserve(images);
  std::vector<ProductRight> rights(images);
  std::vector<RankPanels> panels(images);
  std::vector<TensorView> out(images);
  std::vector<ProductOutput> products(images);
  for (size_t i = 0; i < images; ++i) {
    const auto image = static_cast<int64_t>(i);
    columns.emplace_back(
        s, args.dtype,
        static_cast<const char*>(args.x) + image * s.channels * s.height * s.width * element);
    LORAACCEL_RETURN_IF_ERROR(panels[i].allocate(simd, ctx, op, pixels, depth2));
    if (biased) {
      for (int64_t p = 0; p < ceil_div(pixels, simd.width); ++p)
        std::fill_n(panels[i].writable(p) + a_rows * simd.width, simd.width, 1.0F);
    }
    rights[i].columns = &columns[i];
    rights[i].packed = [&, i](int64_t panel, const void* data, int64_t begin, int64_t words,
                              bool first) {
      PanelProduct p{};
      p.pairs = pairs;
      p.left = a.rows.at(0, begin);
      p.left_stride = a.rows.stride * static_cast<int64_t>(dtype_size_bytes(a.rows.dtype));
      p.panel = data;
      p.depth = words;
      p.c = panels[i].writable(panel);
      p.c_stride = simd.width;
      p.c_dtype = DType::kFloat32;
      p.partial = first ? nullptr : panels[i].writable(panel);
      p.partial_stride = simd.width;
      p.m = a_rows;
      p.n = simd.width;
      simd.product(p);
    };
    out[i] = TensorView::matrix(static_cast<char*>(args.y) + image * outputs * pixels * element,
                                args.dtype, outputs, pixels);
    products[i].rights = {&rights[i], 1};
    products[i].left2 = left2.data();
    products[i].left2_stride = depth2;
    products[i].right2 = &panels[i];
    products[i].out = &out[i];
  }
  LORAACCEL_RETURN_IF_ERROR(blocked_product(simd, ctx, op, outputs, {&term, 1}, products));
  parallel_for(ctx, s.samples * rank, [&](int64_t i) {
    const RankPanels& from = panels[static_cast<size_t>(i / rank)];
    const int64_t r = i % rank;
    float* to = args.h + i * pixels;
    for (int64_t col = 0; col < pixels; col += simd.width) {
      const float* panel = from.panel(col / simd.width) + r * simd.width;
      for (int64_t j = 0; j < std::min<int64_t>(simd.width, pixels - col); ++j) {
        to[col + j] = panel[j];
        if (a.parts == 2) to[col + j] += panel[rank * simd.width + j];
      }
    }
  });
  return Status();
}

}  // namespace

Status lora_conv2d_forward(const ExecContext& ctx, const LoraConv2dArgs& args) {
  constexpr const char* kOp = "lora_conv2d";
  return without_exceptions(kOp, [&]() -> Status {
    LORAACCEL_RETURN_IF_ERROR(check(ctx, args));
    if (args.shape.samples == 0 || args.w.rows() == 0) return Status();
    const LoraSimd* table = nullptr;
    LORAACCEL_RETURN_IF_ERROR(choose_table(kOp, ctx, args.dtype, true, &table));
    return table == nullptr ? forward_ref(ctx, args) : forward_own(*table, ctx, kOp, args);
  });
}

}  // namespace loraaccel
