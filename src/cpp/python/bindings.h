// One register_* per area.
#pragma once

#include <pybind11/pybind11.h>

namespace loraaccel::python {

void register_adapters(pybind11::module_& m);
void register_images(pybind11::module_& m);
void register_kernels(pybind11::module_& m);
void register_ceilings(pybind11::module_& m);
void register_checkpoint(pybind11::module_& m);
void register_save(pybind11::module_& m);
void register_operators(pybind11::module_& m);

}  // namespace loraaccel::python
