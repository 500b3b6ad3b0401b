// The Python module loraaccel._opencv: what needs OpenCV's libraries, apart from _core so that _core does without them.
#include <opencv2/core/utility.hpp>
#include <optional>

#include "image_arrays.h"
#include "loraaccel/images_opencv.h"
#include "raise.h"
#include "scratch.h"
#include "tasks.h"

namespace py = pybind11;

namespace loraaccel::python {
namespace {

py::object decode(const py::buffer& data, bool alpha, int64_t max_pixels) {
  const py::buffer_info info = data.request();
  DecodedImage image;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = decode_image(
        {static_cast<const uint8_t*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)},
        {.alpha = alpha, .max_pixels = max_pixels}, &image);
  }
  raise_if_error(status, "");
  if (!image.declined.empty()) return py::str(image.declined);
  const ImageView& view = image.view;
  auto* pixels = new std::shared_ptr<void>(std::move(image.pixels));
  const py::capsule owner(pixels, [](void* p) { delete static_cast<std::shared_ptr<void>*>(p); });
  return Pixels({view.size.height, view.size.width, int64_t{view.channels}},
                {view.row_bytes, int64_t{view.channels}, int64_t{1}}, view.data, owner);
}

// A path, or the bytes of a file.
struct Source {
  std::string path;
  std::optional<py::buffer_info> memory;
};

struct Loaded {
  Status status;
  std::string declined;
  ImageHeader header;
};

Loaded load(const Source& source, const BatchForm& form, const Slot& slot,
            const DecodeRules& rules) {
  Loaded result;
  std::vector<uint8_t> file;
  std::span<const uint8_t> bytes;
  if (source.memory) {
    bytes = {static_cast<const uint8_t*>(source.memory->ptr),
             static_cast<size_t>(source.memory->size * source.memory->itemsize)};
  } else {
    result.status = read_whole_file(source.path, &file);
    bytes = file;
  }
  if (!result.status.ok()) return result;
  DecodedImage image;
  result.status = decode_image(bytes, rules, &image);
  result.header = image.header;
  result.declined = image.declined;
  if (!result.status.ok() || !image.declined.empty()) return result;
  PrepareArgs args = prepare_args(form, slot, image.view);
  args.bgr = true;
  ExecContext ctx = default_context();
  ctx.num_threads = 1;  // images are side by side
  result.status = prepare_images(ctx, std::span(&args, 1));
  return result;
}

py::list load_images(const py::list& sources, const std::vector<bool>& is_path,
                     const std::vector<Slot>& slots, int64_t width, int64_t height, int dtype,
                     std::array<float, 3> mean, std::array<float, 3> std, bool alpha,
                     int64_t max_pixels, int threads) {
  std::vector<Source> all(sources.size());
  if (slots.size() != all.size() || is_path.size() != all.size())
    throw py::value_error("load_images: as many slots as sources");
  for (size_t i = 0; i < all.size(); ++i) {
    if (is_path[i]) {
      all[i].path = sources[i].cast<std::string>();
    } else {
      all[i].memory = sources[i].cast<py::buffer>().request();
    }
  }
  const BatchForm form = batch_form(width, height, dtype, mean, std);
  std::vector<Loaded> loaded(all.size());
  {
    const py::gil_scoped_release unlocked;
    const Tasks tasks{static_cast<int64_t>(all.size()), [&](int64_t index) {
                        const auto i = static_cast<size_t>(index);
                        try {
                          loaded[i] = load(all[i], form, slots[i], {alpha, false, max_pixels});
                        } catch (const std::bad_alloc&) {
                          loaded[i].status = out_of_memory("load_images");
                        }
                      }};
    run_tasks(image_context(threads), std::span(&tasks, 1));
  }
  py::list results;
  for (const Loaded& one : loaded) {
    results.append(py::make_tuple(static_cast<int>(one.status.code()), one.status.error_number(),
                                  one.status.ok() ? one.declined : one.status.to_string(),
                                  one.header.orientation,
                                  one.header.size.width * one.header.size.height));
  }
  return results;
}

Pixels cubic(const py::array& image, int64_t width, int64_t height) {
  ResizeArgs args;
  args.source = image_view(image);
  args.size = {width, height};
  std::vector<py::ssize_t> shape = {std::max<int64_t>(height, 0), std::max<int64_t>(width, 0)};
  if (image.ndim() == 3) shape.push_back(args.source.channels);
  Pixels out(shape);
  args.out = out.mutable_data();
  args.out_row_bytes = width * args.source.channels;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = resize_cubic(args);
  }
  raise_if_error(status, "");
  return out;
}

}  // namespace
}  // namespace loraaccel::python

PYBIND11_MODULE(_opencv, m) {
  namespace bindings = loraaccel::python;
  cv::setNumThreads(1);  // threads are ours; OpenCV's do not survive a fork
  m.doc() = "Decoding of images by OpenCV.";
  m.def("version", &loraaccel::opencv_version, "Of OpenCV.");
  m.def("decode", &bindings::decode, py::arg("data"), py::arg("alpha"), py::arg("max_pixels"),
        "uint8 [height, width, 3 or 4]; or what kind of file it is that another decoder is for.");
  m.def("load_images", &bindings::load_images, py::arg("sources"), py::arg("is_path"),
        py::arg("slots"), py::arg("width"), py::arg("height"), py::arg("dtype"), py::arg("mean"),
        py::arg("std"), py::arg("alpha"), py::arg("max_pixels"), py::arg("threads"),
        "Files into the slots of a batch; for each (status, errno, text, orientation, pixels).");
  m.def("resize_cubic", &bindings::cubic, py::arg("image"), py::arg("width"), py::arg("height"));
}
