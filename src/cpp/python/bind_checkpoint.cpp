// Reading safetensors files: loraaccel.safetensors makes tensors and arrays of what this says and copies.
#include <pybind11/stl.h>

#include "bindings.h"
#include "loraaccel/safetensors.h"
#include "raise.h"

namespace py = pybind11;

namespace loraaccel::python {
namespace {

// A reader, and the Python object whose memory it reads where it reads memory.
struct Reader {
  SafetensorsReader file;
  py::object owner;
  Py_buffer buffer{};

  Reader() = default;
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  ~Reader() {
    if (buffer.obj != nullptr) PyBuffer_Release(&buffer);
  }

  const TensorEntry& entry(size_t index) const {
    if (index >= file.entries().size()) throw py::index_error("no tensor " + std::to_string(index));
    return file.entries()[index];
  }
};

py::str text(std::string_view view) { return {view.data(), view.size()}; }

std::unique_ptr<Reader> open_file(const std::string& path) {
  auto reader = std::make_unique<Reader>();
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = SafetensorsReader::open(path, &reader->file);
  }
  raise_if_error(status, path);
  return reader;
}

std::unique_ptr<Reader> open_memory(const py::object& data, const std::string& name) {
  auto reader = std::make_unique<Reader>();
  if (PyObject_GetBuffer(data.ptr(), &reader->buffer, PyBUF_SIMPLE) != 0)
    throw py::error_already_set();
  const Status status = SafetensorsReader::from_memory(
      reader->buffer.buf, static_cast<size_t>(reader->buffer.len), name, &reader->file);
  raise_if_error(status, name);
  return reader;
}

py::tuple describe(const TensorEntry& e) {
  py::tuple shape(e.shape.size());
  for (size_t i = 0; i < e.shape.size(); ++i) shape[i] = e.shape[i];
  return py::make_tuple(text(e.name), file_dtype_name(e.dtype), shape, e.begin, e.size_bytes());
}

void read_all(const Reader& reader, const std::vector<std::pair<size_t, uintptr_t>>& where) {
  for (const auto& [index, address] : where) reader.entry(index);
  Status status;
  {
    const py::gil_scoped_release unlocked;
    for (const auto& [index, address] : where) {
      const TensorEntry& e = reader.entry(index);
      status = reader.file.read(e, 0, e.size_bytes(), reinterpret_cast<void*>(address));
      if (!status.ok()) break;
    }
  }
  raise_if_error(status, reader.file.path());
}

void read_part(const Reader& reader, size_t index, uint64_t offset, uint64_t count,
               uintptr_t address) {
  const TensorEntry& e = reader.entry(index);
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = reader.file.read(e, offset, count, reinterpret_cast<void*>(address));
  }
  raise_if_error(status, reader.file.path());
}

}  // namespace

void register_checkpoint(py::module_& m) {
  safetensor_error() = py::reinterpret_steal<py::object>(PyErr_NewExceptionWithDoc(
      "loraaccel.safetensors.SafetensorError",
      "A file that is no safetensors file, or whose header does not fit its content.",
      PyExc_ValueError, nullptr));
  m.attr("SafetensorError") = safetensor_error();

  py::class_<Reader>(m, "SafetensorsReader", "A safetensors file, opened and checked.")
      .def(py::init(&open_file), py::arg("path"))
      .def_static("from_memory", &open_memory, py::arg("data"), py::arg("name") = "the bytes")
      .def("__len__", [](const Reader& r) { return r.file.entries().size(); })
      .def_property_readonly("path", [](const Reader& r) { return r.file.path(); })
      .def_property_readonly("file_size", [](const Reader& r) { return r.file.file_size(); })
      .def_property_readonly("data_offset", [](const Reader& r) { return r.file.data_offset(); })
      .def(
          "names",
          [](const Reader& r, bool by_offset) {
            const auto entries = r.file.entries();
            py::list names(entries.size());
            for (size_t i = 0; i < entries.size(); ++i)
              names[i] = text(entries[by_offset ? i : r.file.by_name()[i]].name);
            return names;
          },
          py::arg("by_offset") = false)
      .def("metadata",
           [](const Reader& r) -> py::object {
             if (!r.file.has_metadata()) return py::none();
             py::dict metadata;
             for (const MetadataItem& item : r.file.metadata())
               metadata[text(item.key)] = text(item.value);
             return metadata;
           })
      .def(
          "find",
          [](const Reader& r, std::string_view name) -> py::object {
            const TensorEntry* e = r.file.find(name);
            if (e == nullptr) return py::none();
            return py::int_(e - r.file.entries().data());
          },
          py::arg("name"), "Index of the tensor in the order of the file, or None.")
      .def(
          "describe", [](const Reader& r, size_t i) { return describe(r.entry(i)); },
          py::arg("index"), "(name, dtype, shape, begin, bytes)")
      .def("read", &read_part, py::arg("index"), py::arg("offset"), py::arg("count"),
           py::arg("address"), "Copies a part of a tensor's bytes to memory.")
      .def("read_all", &read_all, py::arg("where"), "Copies whole tensors: (index, address) pairs.")
      .def(
          "view",
          [](const py::object& self, size_t index) -> py::object {
            const auto& r = self.cast<const Reader&>();
            const TensorEntry& e = r.entry(index);
            void* data = nullptr;
            raise_if_error(r.file.view(e, &data), r.file.path());
            return py::int_(reinterpret_cast<uintptr_t>(data));
          },
          py::arg("index"), "Address of the tensor's bytes, as long as the reader lives.");
}

}  // namespace loraaccel::python
