// Arrays of pixels between Python and the functions of images.h: for _core, and for _opencv.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "loraaccel/images.h"

namespace loraaccel::python {

using Pixels = pybind11::array_t<uint8_t, pybind11::array::c_style>;

// A C-contiguous uint8 array [height, width] or [height, width, channels]; ValueError for another. No copy.
inline ImageView image_view(const pybind11::array& array) {
  namespace py = pybind11;
  if (!py::isinstance<Pixels>(array) || (array.ndim() != 2 && array.ndim() != 3)) {
    throw py::value_error("an image: an array of " + std::string(py::str(array.dtype())) + " " +
                          std::string(py::str(array.attr("shape"))) +
                          ", expected contiguous uint8 [height, width, channels]");
  }
  ImageView view;
  view.data = static_cast<const uint8_t*>(array.data());
  view.size = {array.shape(1), array.shape(0)};
  view.channels = array.ndim() == 3 ? static_cast<int>(array.shape(2)) : 1;
  view.row_bytes = view.size.width * view.channels;
  return view;
}

// A ResizeMethod, or -1 for usual_method(), -2 for that of sd-scripts 0.9.1; Pillow 13's order of passes; OpenCV 5's nearest.
using Rules = std::tuple<int, bool, bool>;

inline ResizeRules resize_rules(const Rules& rules, ImageSize from, ImageSize to) {
  const int method = std::get<0>(rules);
  return {method < 0 ? usual_method(from, to, method == -2) : static_cast<ResizeMethod>(method),
          std::get<1>(rules), std::get<2>(rules)};
}

inline ExecContext image_context(int threads) {
  ExecContext ctx = default_context();
  if (threads > 0) ctx.num_threads = threads;
  return ctx;
}

// What a batch has in common: width, height, dtype, mean, std.
struct BatchForm {
  ImageSize size;
  DType dtype = DType::kFloat32;
  std::array<float, 3> mean{};
  std::array<float, 3> std{};
};

// resized width and height, x and y of the crop, flip, rules, address of the image's slot, of its mask or 0.
using Slot = std::tuple<int64_t, int64_t, int64_t, int64_t, bool, Rules, uintptr_t, uintptr_t>;

inline PrepareArgs prepare_args(const BatchForm& form, const Slot& slot, const ImageView& source) {
  const auto& [width, height, x, y, flip, rules, out, mask] = slot;
  PrepareArgs args;
  args.source = source;
  args.size = {width, height};
  args.rules = resize_rules(rules, source.size, args.size);
  args.crop = {x, y, form.size};
  args.flip = flip;
  for (int c = 0; c < 3; ++c) {
    args.mean[c] = form.mean[static_cast<size_t>(c)];
    args.std[c] = form.std[static_cast<size_t>(c)];
  }
  args.dtype = form.dtype;
  args.out = reinterpret_cast<void*>(out);
  args.mask = reinterpret_cast<float*>(mask);
  return args;
}

inline BatchForm batch_form(int64_t width, int64_t height, int dtype, std::array<float, 3> mean,
                            std::array<float, 3> std) {
  return {{width, height}, static_cast<DType>(dtype), mean, std};
}

}  // namespace loraaccel::python
