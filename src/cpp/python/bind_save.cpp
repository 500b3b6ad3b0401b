// Writing safetensors files. Tensors arrive as (name, dtype, shape, address, fetch): addresses of dense memory, or a
// function (offset, bytes) -> address.
#include <pybind11/stl.h>

#include <exception>

#include "bindings.h"
#include "loraaccel/safetensors.h"
#include "raise.h"

namespace py = pybind11;

namespace loraaccel::python {
namespace {

using TensorTuple =
    std::tuple<std::string, std::string, std::vector<int64_t>, uintptr_t, py::object>;

struct Fetcher {
  py::object function;
  std::exception_ptr* error;  // of the save: what the function raised
};

Status fetch(void* host, uint64_t offset, size_t bytes, const void** data) {
  const auto& fetcher = *static_cast<Fetcher*>(host);
  const py::gil_scoped_acquire locked;
  try {
    *data = reinterpret_cast<const void*>(fetcher.function(offset, bytes).cast<uintptr_t>());
    return {};
  } catch (...) {
    *fetcher.error = std::current_exception();
    return {StatusCode::kLenderFailed, "a tensor's bytes could not be had"};
  }
}

struct Request {
  std::vector<TensorToSave> tensors;
  std::vector<Fetcher> fetchers;
  std::exception_ptr error;
  std::optional<SaveMetadata> metadata;
  SaveOptions options;

  Request(const std::vector<TensorTuple>& tuples,
          const std::optional<std::map<std::string, std::string>>& given,
          const std::optional<std::string>& float_dtype, bool hashes, bool hashes_in_metadata,
          bool sync) {
    fetchers.reserve(tuples.size());
    for (const auto& [name, dtype, shape, address, function] : tuples) {
      TensorToSave tensor;
      tensor.name = name;
      tensor.dtype = parse(dtype, "tensor '" + name + "'");
      tensor.shape = shape;
      tensor.data = reinterpret_cast<const void*>(address);
      if (!function.is_none()) {
        fetchers.push_back({function, &error});
        tensor.fetch = fetch;
        tensor.fetch_host = &fetchers.back();
      }
      tensors.push_back(std::move(tensor));
    }
    if (given) metadata.emplace(given->begin(), given->end());
    if (float_dtype) options.float_dtype = parse(*float_dtype, "float_dtype");
    options.hashes = hashes;
    options.hashes_in_metadata = hashes_in_metadata;
    options.sync = sync;
  }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;
  ~Request() = default;

  const SaveMetadata* metadata_or_null() const { return metadata ? &*metadata : nullptr; }

  void finish(const Status& status, const std::string& path) const {
    if (error) std::rethrow_exception(error);
    raise_if_error(status, path);
  }

 private:
  static FileDType parse(const std::string& name, const std::string& what) {
    FileDType dtype;
    if (!parse_file_dtype(name, &dtype))
      throw py::value_error(what + ": unknown dtype '" + name + "'");
    return dtype;
  }
};

py::tuple as_tuple(const SaveReport& report) {
  py::list losses;
  for (const CastLoss& loss : report.losses)
    losses.append(py::make_tuple(loss.name, loss.flushed_to_zero, loss.became_infinite));
  return py::make_tuple(report.file_size, report.model_hash, report.legacy_hash, losses);
}

using Metadata = std::optional<std::map<std::string, std::string>>;

py::tuple save(const std::string& path, const std::vector<TensorTuple>& tensors,
               const Metadata& metadata, const std::optional<std::string>& float_dtype, bool hashes,
               bool hashes_in_metadata, bool sync) {
  const Request request(tensors, metadata, float_dtype, hashes, hashes_in_metadata, sync);
  SaveReport report;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = save_safetensors(path, request.tensors, request.metadata_or_null(), request.options,
                              &report);
  }
  request.finish(status, path);
  return as_tuple(report);
}

py::tuple serialize(const std::vector<TensorTuple>& tensors, const Metadata& metadata,
                    const std::optional<std::string>& float_dtype, bool hashes,
                    bool hashes_in_metadata) {
  const Request request(tensors, metadata, float_dtype, hashes, hashes_in_metadata, true);
  py::object bytes;
  const auto allocate = [](void* host, size_t size) -> void* {
    const py::gil_scoped_acquire locked;
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
    if (made == nullptr) {
      PyErr_Clear();
      return nullptr;
    }
    *static_cast<py::object*>(host) = py::reinterpret_steal<py::object>(made);
    return PyBytes_AS_STRING(made);
  };
  SaveReport report;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = serialize_safetensors(request.tensors, request.metadata_or_null(), request.options,
                                   allocate, &bytes, &report);
  }
  request.finish(status, "");
  return py::make_tuple(bytes, as_tuple(report));
}

struct Pending {
  std::string path;
  PendingSave save;
};

std::unique_ptr<Pending> save_async(const std::string& path,
                                    const std::vector<TensorTuple>& tensors,
                                    const Metadata& metadata,
                                    const std::optional<std::string>& float_dtype, bool hashes,
                                    bool hashes_in_metadata, bool sync) {
  const Request request(tensors, metadata, float_dtype, hashes, hashes_in_metadata, sync);
  auto pending = std::make_unique<Pending>();
  pending->path = path;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = save_safetensors_async(path, request.tensors, request.metadata_or_null(),
                                    request.options, &pending->save);
  }
  request.finish(status, path);
  return pending;
}

}  // namespace

void register_save(py::module_& m) {
  m.def("save_safetensors", &save, py::arg("path"), py::arg("tensors"), py::arg("metadata"),
        py::arg("float_dtype"), py::arg("hashes"), py::arg("hashes_in_metadata"), py::arg("sync"),
        "(file_size, model_hash, legacy_hash, [(name, flushed_to_zero, became_infinite)])");
  m.def("serialize_safetensors", &serialize, py::arg("tensors"), py::arg("metadata"),
        py::arg("float_dtype"), py::arg("hashes"), py::arg("hashes_in_metadata"),
        "(bytes, what save_safetensors returns)");
  m.def("save_safetensors_async", &save_async, py::arg("path"), py::arg("tensors"),
        py::arg("metadata"), py::arg("float_dtype"), py::arg("hashes"),
        py::arg("hashes_in_metadata"), py::arg("sync"));
  py::class_<Pending>(m, "PendingSave", "A save that goes on by itself.")
      .def("done", [](const Pending& p) { return p.save.done(); })
      .def("wait", [](Pending& p) {
        SaveReport report;
        Status status;
        {
          const py::gil_scoped_release unlocked;
          status = p.save.wait(&report);
        }
        raise_if_error(status, p.path);
        return as_tuple(report);
      });
}

}  // namespace loraaccel::python
