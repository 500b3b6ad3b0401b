// Whole images, and images in a batch: who makes which rows, and where they go.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "half.h"
#include "images/resize_rows.h"
#include "kernel_choice.h"
#include "tasks.h"

namespace loraaccel {
namespace {

constexpr int64_t kBandRows = 32;  // fewer are not worth another thread

int64_t bands_of(int64_t rows, int64_t wanted) {
  return std::clamp<int64_t>(rows / kBandRows, 1, std::max<int64_t>(wanted, 1));
}

// f(i) for i in [0, count), on threads; false where one found no memory.
template <class F>
bool run_all(const ExecContext& ctx, int64_t count, const F& f) {
  std::atomic<bool> failed{false};
  const Tasks tasks{count, [&](int64_t i) {
                      try {
                        f(i);
                      } catch (const std::bad_alloc&) {
                        failed = true;
                      }
                    }};
  run_tasks(ctx, std::span(&tasks, 1));
  return !failed;
}

const ImageKernel* choose(const char* op, const ExecContext& ctx, Status* status) {
  return choose_kernel(
      op, image_kernels(), ctx, [](const ImageKernel& k) { return k.unavailable(); }, status);
}

// ((v / 255) - mean) / std of all 256 values, for each of three channels, in the bits of T.
template <class T>
struct Table {
  T values[3][256];
};

template <class T>
Table<T> make_table(const PrepareArgs& args) {
  Table<T> table;
  for (int c = 0; c < 3; ++c) {
    for (int v = 0; v < 256; ++v) {
      const float unit = static_cast<float>(v) / 255.0F;
      const float centred = unit - args.mean[c];
      from_float(centred / args.std[c], &table.values[c][v]);
    }
  }
  return table;
}

template <class T>
void store_row(const Table<T>& table, const PrepareArgs& args, int64_t y, const uint8_t* row) {
  const int64_t width = args.crop.size.width;
  const int64_t plane = width * args.crop.size.height;
  const int channels = args.source.channels;
  const uint8_t* first = args.flip ? row + (width - 1) * channels : row;
  const int64_t step = args.flip ? -channels : channels;
  for (int c = 0; c < 3; ++c) {
    const T* values = table.values[c];
    T* out = static_cast<T*>(args.out) + c * plane + y * width;
    const uint8_t* p = first + (channels == 1 ? 0 : args.bgr ? 2 - c : c);
    for (int64_t x = 0; x < width; ++x, p += step) out[x] = values[*p];
  }
  if (args.mask == nullptr) return;
  float* mask = args.mask + y * width;
  if (channels != 4) {
    std::fill_n(mask, width, 1.0F);
    return;
  }
  const uint8_t* p = first + 3;
  for (int64_t x = 0; x < width; ++x, p += step) mask[x] = static_cast<float>(*p) / 255.0F;
}

RowSink make_sink(const PrepareArgs& args) {
  return visit_dtype(args.dtype, [&args](auto tag) -> RowSink {
    using T = typename decltype(tag)::type;
    auto table = std::make_shared<const Table<T>>(make_table<T>(args));
    return [table, &args](int64_t y, const uint8_t* row) { store_row(*table, args, y, row); };
  });
}

ResizeJob job_of(const PrepareArgs& args) {
  return {args.source, args.size, args.rules, args.crop};
}

Status check_prepare(const PrepareArgs& args) {
  constexpr const char* kOp = "prepare_images";
  LORAACCEL_RETURN_IF_ERROR(check_resize(kOp, job_of(args)));
  if (args.dtype == DType::kFloat64) {
    return Status(StatusCode::kUnsupportedDtype,
                  std::string(kOp) + ": float64, expected float32, float16 or bfloat16");
  }
  if (args.out == nullptr)
    return Status(StatusCode::kInvalidArgument, std::string(kOp) + ": out is null");
  for (const float std : args.std) {
    if (!(std > 0 || std < 0))
      return Status(StatusCode::kInvalidArgument,
                    std::string(kOp) + ": std " + std::to_string(std) + ", expected not 0");
  }
  return {};
}

}  // namespace

Status resize_image(const ExecContext& ctx, const ResizeArgs& args) {
  constexpr const char* kOp = "resize_image";
  const ResizeJob job{args.source, args.size, args.rules, args.crop};
  LORAACCEL_RETURN_IF_ERROR(check_resize(kOp, job));
  const int64_t bytes = args.crop.size.width * args.source.channels;
  if (args.out == nullptr || args.out_row_bytes < bytes) {
    return Status(StatusCode::kInvalidArgument, std::string(kOp) + ": out is null, or its rows " +
                                                    std::to_string(args.out_row_bytes) +
                                                    " bytes apart, expected at least " +
                                                    std::to_string(bytes));
  }
  Status status;
  const ImageKernel* kernel = choose(kOp, ctx, &status);
  if (kernel == nullptr) return status;
  try {
    const auto rows = make_row_maker(job);
    const RowSink sink = [&](int64_t y, const uint8_t* row) {
      std::memcpy(args.out + y * args.out_row_bytes, row, static_cast<size_t>(bytes));
    };
    const int64_t height = args.crop.size.height;
    const int64_t bands = bands_of(height, ctx.num_threads);
    const bool done = run_all(ctx, bands, [&](int64_t i) {
      rows->make(*kernel, i * height / bands, (i + 1) * height / bands, sink);
    });
    return done ? Status() : out_of_memory(kOp);
  } catch (const std::bad_alloc&) {
    return out_of_memory(kOp);
  }
}

Status prepare_images(const ExecContext& ctx, std::span<const PrepareArgs> images) {
  constexpr const char* kOp = "prepare_images";
  for (const PrepareArgs& args : images) LORAACCEL_RETURN_IF_ERROR(check_prepare(args));
  Status status;
  const ImageKernel* kernel = choose(kOp, ctx, &status);
  if (kernel == nullptr) return status;
  const auto count = static_cast<int64_t>(images.size());
  try {
    if (count >= ctx.num_threads) {
      const bool done = run_all(ctx, count, [&](int64_t i) {
        const PrepareArgs& args = images[static_cast<size_t>(i)];
        make_row_maker(job_of(args))->make(*kernel, 0, args.crop.size.height, make_sink(args));
      });
      return done ? Status() : out_of_memory(kOp);
    }
    for (const PrepareArgs& args : images) {
      const auto rows = make_row_maker(job_of(args));
      const RowSink sink = make_sink(args);
      const int64_t height = args.crop.size.height;
      const int64_t bands = bands_of(height, ctx.num_threads);
      const bool done = run_all(ctx, bands, [&](int64_t i) {
        rows->make(*kernel, i * height / bands, (i + 1) * height / bands, sink);
      });
      if (!done) return out_of_memory(kOp);
    }
    return {};
  } catch (const std::bad_alloc&) {
    return out_of_memory(kOp);
  }
}

void flatten_over_white(const uint8_t* rgba, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i, rgba += 4, out += 3) {
    const uint32_t alpha = rgba[3];
    for (int c = 0; c < 3; ++c)
      out[c] = static_cast<uint8_t>((rgba[c] * alpha + 255 * (255 - alpha) + 127) / 255);
  }
}

}  // namespace loraaccel
