// The Python module loraaccel._core: what is not a tensor, such as the kernel list, files and the machine's ceilings, and the
// operators for a torch too old for libloraaccel. Nothing of torch is compiled or linked here.
#include <pybind11/pybind11.h>

#include "bindings.h"
#include "loraaccel/version.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "Native core of loraaccel, without torch.";
  m.attr("__version__") = LORAACCEL_VERSION;
  loraaccel::python::register_adapters(m);
  loraaccel::python::register_images(m);
  loraaccel::python::register_kernels(m);
  loraaccel::python::register_ceilings(m);
  loraaccel::python::register_operators(m);
  loraaccel::python::register_checkpoint(m);
  loraaccel::python::register_save(m);
}
