// Buckets, headers, resizing and batches: loraaccel.data gives them names.
#include <array>

#include "bindings.h"
#include "image_arrays.h"
#include "raise.h"

namespace py = pybind11;

namespace loraaccel::python {
namespace {

using Size = std::pair<int64_t, int64_t>;

ImageSize to_size(const Size& size) { return {size.first, size.second}; }
py::tuple to_tuple(ImageSize size) { return py::make_tuple(size.width, size.height); }

py::list bucket_list(const Size& max_reso, int64_t min_size, int64_t max_size, int64_t step) {
  std::vector<ImageSize> sizes;
  raise_if_error(bucket_resolutions(to_size(max_reso), min_size, max_size, step, &sizes), "");
  py::list list;
  for (const ImageSize& size : sizes) list.append(to_tuple(size));
  return list;
}

py::tuple choose_buckets(const py::array_t<int64_t, py::array::c_style>& sizes,
                         const std::vector<Size>& resolutions, const Size& max_reso, int64_t step,
                         bool no_upscale) {
  if (sizes.ndim() != 2 || sizes.shape(1) != 2) {
    throw py::value_error("select_bucket: sizes of shape " +
                          std::string(py::str(sizes.attr("shape"))) + ", expected [n, 2]");
  }
  const py::ssize_t count = sizes.shape(0);
  py::array_t<int64_t> buckets({count, py::ssize_t{2}});
  py::array_t<int64_t> resized({count, py::ssize_t{2}});
  py::array_t<double> errors(count);
  std::vector<ImageSize> known;
  known.reserve(resolutions.size());
  for (const Size& size : resolutions) known.push_back(to_size(size));
  const int64_t* in = sizes.data();
  int64_t* bucket = buckets.mutable_data();
  int64_t* size = resized.mutable_data();
  double* error = errors.mutable_data();
  Status status;
  {
    const py::gil_scoped_release unlocked;
    for (py::ssize_t i = 0; i < count && status.ok(); ++i) {
      BucketChoice choice;
      const ImageSize image{in[2 * i], in[2 * i + 1]};
      status = no_upscale ? choose_bucket_without_enlarging(image, to_size(max_reso), step, &choice)
                          : choose_bucket(image, known, &choice);
      bucket[2 * i] = choice.bucket.width;
      bucket[2 * i + 1] = choice.bucket.height;
      size[2 * i] = choice.resized.width;
      size[2 * i + 1] = choice.resized.height;
      error[i] = choice.ratio_error;
    }
  }
  raise_if_error(status, "");
  return py::make_tuple(buckets, resized, errors);
}

py::tuple header(const py::buffer& data) {
  const py::buffer_info info = data.request();
  ImageHeader result;
  const Status status = read_image_header(
      {static_cast<const uint8_t*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)},
      &result);
  static const char* const names[] = {"", "png", "jpeg", "webp", "bmp"};
  return py::make_tuple(names[static_cast<int>(result.format)], status.ok() ? result.size.width : 0,
                        status.ok() ? result.size.height : 0, result.orientation);
}

Pixels resize(const py::array& image, const Size& size, const Rules& rules,
              const std::array<int64_t, 4>& crop, int threads) {
  ResizeArgs args;
  args.source = image_view(image);
  args.size = to_size(size);
  args.rules = resize_rules(rules, args.source.size, args.size);
  args.crop = {crop[0], crop[1], {crop[2], crop[3]}};
  const bool possible = crop[2] > 0 && crop[3] > 0 && crop[2] <= size.first &&
                        crop[3] <= size.second && args.source.channels <= 4;
  std::vector<py::ssize_t> shape = {possible ? crop[3] : 0, possible ? crop[2] : 0};
  if (image.ndim() == 3) shape.push_back(args.source.channels);
  Pixels out(shape);
  args.out = out.mutable_data();
  args.out_row_bytes = args.crop.size.width * args.source.channels;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = resize_image(image_context(threads), args);
  }
  raise_if_error(status, "");
  return out;
}

void prepare(const std::vector<py::array>& images, const std::vector<Slot>& slots, int64_t width,
             int64_t height, int dtype, std::array<float, 3> mean, std::array<float, 3> std,
             int threads) {
  if (images.size() != slots.size())
    throw py::value_error("prepare: " + std::to_string(images.size()) + " images, " +
                          std::to_string(slots.size()) + " slots, expected as many");
  std::vector<PrepareArgs> all;
  const BatchForm form = batch_form(width, height, dtype, mean, std);
  all.reserve(images.size());
  for (size_t i = 0; i < images.size(); ++i) {
    all.push_back(prepare_args(form, slots[i], image_view(images[i])));
  }
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = prepare_images(image_context(threads), all);
  }
  raise_if_error(status, "");
}

}  // namespace

void register_images(py::module_& m) {
  m.def("bucket_resolutions", &bucket_list, py::arg("max_reso"), py::arg("min_size"),
        py::arg("max_size"), py::arg("step"), "Sorted list of (width, height).");
  m.def("choose_buckets", &choose_buckets, py::arg("sizes"), py::arg("resolutions"),
        py::arg("max_reso"), py::arg("step"), py::arg("no_upscale"),
        "int64 [n, 2] to buckets [n, 2], resized sizes [n, 2], errors of ratios [n].");
  m.def(
      "bucket_crop_box",
      [](const Size& bucket, const Size& image) {
        CropBox box;
        raise_if_error(bucket_crop_box(to_size(bucket), to_size(image), &box), "");
        return py::make_tuple(box.left, box.top, box.right, box.bottom);
      },
      py::arg("bucket"), py::arg("image"), "(left, top, right, bottom)");
  m.def("image_header", &header, py::arg("data"),
        "(format, width, height, orientation); '' for an unknown format, 0 for an unknown size.");
  m.def("resize_image", &resize, py::arg("image"), py::arg("size"), py::arg("rules"),
        py::arg("crop"), py::arg("threads") = 0,
        "The crop (x, y, width, height) of a resized image.");
  m.def("prepare_images", &prepare, py::arg("images"), py::arg("slots"), py::arg("width"),
        py::arg("height"), py::arg("dtype"), py::arg("mean"), py::arg("std"),
        py::arg("threads") = 0, "Images into the slots of a batch.");
  m.def(
      "flatten_over_white",
      [](const Pixels& image) {
        if (image.ndim() != 3 || image.shape(2) != 4)
          throw py::value_error("flatten_over_white: expected [height, width, 4]");
        Pixels out({image.shape(0), image.shape(1), py::ssize_t{3}});
        flatten_over_white(image.data(), image.shape(0) * image.shape(1), out.mutable_data());
        return out;
      },
      py::arg("image"), "RGBA over white.");
}

}  // namespace loraaccel::python
