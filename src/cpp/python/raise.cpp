#include "raise.h"

namespace py = pybind11;

namespace loraaccel::python {

py::object& safetensor_error() {
  static py::object* type = new py::object();  // the interpreter ends before statics do
  return *type;
}

void raise_if_error(const Status& status, const std::string& path) {
  if (status.ok()) return;
  std::string text = status.to_string();
  if (status.code() == StatusCode::kFileError) {
    if (text.starts_with(path + ": ")) text.erase(0, path.size() + 2);
    const py::object name = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
    const py::tuple arguments = py::make_tuple(status.error_number(), text, name);
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
    throw py::error_already_set();
  }
  PyObject* type = PyExc_RuntimeError;
  if (status.code() == StatusCode::kMalformedFile) type = safetensor_error().ptr();
  if (status.code() == StatusCode::kOutOfMemory) type = PyExc_MemoryError;
  if (status.code() == StatusCode::kInvalidArgument ||
      status.code() == StatusCode::kUnsupportedDtype || status.code() == StatusCode::kShapeMismatch)
    type = PyExc_ValueError;
  PyErr_SetString(type, text.c_str());
  throw py::error_already_set();
}

}  // namespace loraaccel::python
