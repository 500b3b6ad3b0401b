// Adapters: loraaccel.adapters makes its objects of what this says, and hands them back to be written.
#include <pybind11/stl.h>

#include <exception>

#include "bindings.h"
#include "loraaccel/adapter.h"
#include "loraaccel/adapter_convert.h"
#include "loraaccel/adapter_merge.h"
#include "loraaccel/adapter_names.h"
#include "raise.h"

namespace py = pybind11;

namespace loraaccel::python {
namespace {

// Keeps the memory that tensors are views of.
struct Keeper {
  std::shared_ptr<const void> owner;
};

py::dict describe(const AdapterTensor& t) {
  py::dict d;
  d["role"] = adapter_role_name(t.role);
  d["key"] = t.key;
  d["dtype"] = file_dtype_name(t.dtype);
  d["shape"] = py::tuple(py::cast(t.shape));
  d["address"] = reinterpret_cast<uintptr_t>(t.data);
  d["bytes"] = t.size_bytes();
  d["owner"] = py::cast(Keeper{t.owner});
  return d;
}

py::dict describe(const AdapterEntry& e) {
  py::dict d;
  d["component"] = e.component;
  d["path"] = e.path;
  py::list rows;
  for (const RowPiece& p : e.rows) rows.append(py::make_tuple(p.row, p.native_row, p.rows));
  d["rows"] = rows;
  d["native_rows"] = e.native_rows;
  d["kind"] = adapter_kind_name(e.kind);
  d["rank"] = e.rank;
  d["scale"] = e.scale.value;
  d["scale_rule"] = scale_rule_name(e.scale.rule);
  d["scale_text"] = e.scale.text;
  py::list tensors;
  for (const AdapterTensor& t : e.tensors) tensors.append(describe(t));
  d["tensors"] = tensors;
  return d;
}

py::dict describe(const Adapter& a) {
  py::dict d;
  d["base"] = a.base;
  d["also_fits"] = a.also_fits;
  d["format"] = a.format;
  d["config"] = a.config;
  py::dict metadata;
  for (const auto& [key, value] : a.metadata) metadata[py::str(key)] = value;
  d["metadata"] = metadata;
  d["unused"] = a.report.unused;
  d["missing"] = a.report.missing;
  d["notes"] = a.report.notes;
  py::list entries;
  for (const AdapterEntry& e : a.entries) entries.append(describe(e));
  d["entries"] = entries;
  return d;
}

template <class T>
T get(const py::dict& d, const char* key) {
  return d[key].cast<T>();
}

// What files may be written as. (The core knows whether it can.)
FileDType target_dtype(const std::string& name) {
  FileDType type = FileDType::kF32;
  if (parse_file_dtype(name, &type)) return type;
  throw py::value_error("there is no type " + name +
                        ", expected F64, F32, F16, BF16, F8_E4M3 or F8_E5M2");
}

AdapterTensor tensor_from(const py::dict& d) {
  AdapterTensor t;
  const auto role = get<std::string>(d, "role");
  if (!role.empty() && !parse_adapter_role(role, &t.role))
    throw py::value_error("there is no tensor role " + role);
  t.key = get<std::string>(d, "key");
  const auto dtype = get<std::string>(d, "dtype");
  if (!parse_file_dtype(dtype, &t.dtype)) throw py::value_error("there is no type " + dtype);
  t.shape = get<std::vector<int64_t>>(d, "shape");
  t.data = reinterpret_cast<const void*>(get<uintptr_t>(d, "address"));
  if (d.contains("owner") && py::isinstance<Keeper>(d["owner"]))
    t.owner = d["owner"].cast<Keeper>().owner;
  return t;
}

AdapterMetadata metadata_from(const py::dict& d) {
  AdapterMetadata metadata;
  for (const auto& [key, value] : d)
    metadata.emplace_back(key.cast<std::string>(), value.cast<std::string>());
  return metadata;
}

AdapterEntry entry_from(const py::dict& d) {
  AdapterEntry e;
  e.component = get<std::string>(d, "component");
  e.path = get<std::string>(d, "path");
  for (const auto& [row, native, rows] :
       get<std::vector<std::tuple<int64_t, int64_t, int64_t>>>(d, "rows"))
    e.rows.push_back({row, native, rows});
  for (const py::handle t : d["tensors"]) e.tensors.push_back(tensor_from(t.cast<py::dict>()));
  e.native_rows = get<int64_t>(d, "native_rows");
  e.scale.value = get<double>(d, "scale");
  e.scale.text = get<std::string>(d, "scale_text");
  raise_if_error(complete_adapter_entry(d["alpha"].cast<std::optional<double>>(), &e), e.path);
  return e;
}

Adapter adapter_from(const py::dict& d) {
  Adapter a;
  a.base = get<std::string>(d, "base");
  a.also_fits = get<std::vector<std::string>>(d, "also_fits");
  a.format = get<std::string>(d, "format");
  a.config = get<std::string>(d, "config");
  a.metadata = metadata_from(d["metadata"].cast<py::dict>());
  for (const py::handle e : d["entries"]) a.entries.push_back(entry_from(e.cast<py::dict>()));
  return a;
}

ReadAdapterOptions read_options(const py::dict& d) {
  ReadAdapterOptions options;
  options.base = get<std::string>(d, "base");
  options.component = get<std::string>(d, "component");
  options.allow_unmatched = get<bool>(d, "allow_unmatched");
  options.modules = get<std::vector<std::string>>(d, "modules");
  return options;
}

ConvertOptions convert_options(const py::dict& d) {
  ConvertOptions options;
  options.format = get<std::string>(d, "format");
  options.fold_alpha = get<bool>(d, "fold_alpha");
  options.rescue = get<bool>(d, "rescue");
  const auto dtype = get<std::string>(d, "dtype");
  if (!dtype.empty()) options.dtype = target_dtype(dtype);
  return options;
}

py::dict describe(const WriteReport& report) {
  py::dict d;
  d["paths"] = report.paths;
  d["notes"] = report.notes;
  d["model_hash"] = report.model_hash;
  return d;
}

py::dict read(const std::string& path, const py::dict& options) {
  const ReadAdapterOptions read = read_options(options);
  Adapter adapter;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = read_adapter(path, read, &adapter);
  }
  raise_if_error(status, path);
  return describe(adapter);
}

py::dict read_tensors(const std::string& name, const py::list& tensors, const py::dict& metadata,
                      const std::string& config, const py::dict& options) {
  AdapterSource source;
  source.name = name;
  source.config = config;
  source.metadata = metadata_from(metadata);
  for (const py::handle t : tensors) source.tensors.push_back(tensor_from(t.cast<py::dict>()));
  Adapter adapter;
  raise_if_error(read_adapter({source}, read_options(options), &adapter), name);
  return describe(adapter);
}

py::dict write(const py::dict& description, const std::string& path, const py::dict& options) {
  const Adapter adapter = adapter_from(description);
  const ConvertOptions convert = convert_options(options);
  WriteReport report;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = write_adapter(adapter, path, convert, &report);
  }
  raise_if_error(status, path);
  return describe(report);
}

py::tuple convert(const std::string& source, const std::string& target, const py::dict& read_dict,
                  const py::dict& options) {
  const ReadAdapterOptions read = read_options(read_dict);
  const ConvertOptions convert = convert_options(options);
  Adapter adapter;
  WriteReport report;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = convert_adapter(source, target, read, convert, &adapter, &report);
  }
  raise_if_error(status, status.message().starts_with(source) ? source : target);
  adapter.entries.clear();
  return py::make_tuple(describe(adapter), describe(report));
}

py::list spell(const py::dict& description, const py::dict& options) {
  const Adapter adapter = adapter_from(description);
  std::vector<SpelledFile> files;
  std::vector<std::string> notes;
  raise_if_error(spell_adapter(adapter, convert_options(options), &files, &notes), "");
  py::list result;
  for (const SpelledFile& file : files) {
    py::dict d;
    d["folder"] = file.folder;
    d["config"] = file.config;
    py::list tensors;
    for (const AdapterTensor& t : file.tensors) tensors.append(describe(t));
    d["tensors"] = tensors;
    result.append(d);
  }
  return result;
}

py::tuple delta(const py::dict& entry) {
  const AdapterEntry e = entry_from(entry);
  std::vector<double> values;
  int64_t rows = 0;
  int64_t columns = 0;
  raise_if_error(adapter_delta(e, &values, &rows, &columns), e.path);
  return py::make_tuple(
      rows, columns,
      py::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double)));
}

// An adapter without its tensors, for people: the norm and the dtypes of each entry.
py::dict inspect(const std::string& path, const py::dict& options, bool norms) {
  const ReadAdapterOptions read = read_options(options);
  Adapter adapter;
  Status status;
  std::vector<std::optional<double>> values;
  {
    const py::gil_scoped_release unlocked;
    status = read_adapter(path, read, &adapter);
    values.resize(adapter.entries.size());
    for (size_t i = 0; norms && status.ok() && i < values.size(); ++i)
      status = adapter_norm(adapter.entries[i], &values[i]);
  }
  raise_if_error(status, path);
  py::dict d = describe(adapter);
  const auto entries = d["entries"].cast<py::list>();
  for (size_t i = 0; i < values.size(); ++i) entries[i].cast<py::dict>()["norm"] = values[i];
  return d;
}

py::tuple hashes(const std::string& path) {
  std::string model;
  std::string legacy;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = adapter_file_hashes(path, &model, &legacy);
  }
  raise_if_error(status, path);
  return py::make_tuple(model, legacy);
}

py::dict describe(const MergeReport& report) {
  py::dict d;
  d["paths"] = report.paths;
  d["changed"] = report.changed;
  d["tensors"] = report.tensors;
  d["unused"] = report.unused;
  d["notes"] = report.notes;
  return d;
}

// Tells Python how far a merge is, and lets Ctrl-C end it. `call` may be None.
struct PythonProgress {
  py::object call;
  std::exception_ptr error;

  static Status tell(void* host, int64_t done, int64_t total) {
    auto* self = static_cast<PythonProgress*>(host);
    const py::gil_scoped_acquire locked;
    try {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (!self->call.is_none()) self->call(done, total);
    } catch (...) {  // raised again once the merge has cleaned up
      self->error = std::current_exception();
      return Status(StatusCode::kLenderFailed, "stopped");
    }
    return Status();
  }
};

// Adapters: (a path and how to read it, or an adapter's dict; strength).
py::dict merge(const std::string& base, const py::list& adapters, const std::string& target,
               const std::string& dtype, const std::string& keep, bool allow_unmatched,
               const py::object& progress) {
  std::vector<Adapter> all;
  std::vector<double> strengths;
  for (const py::handle item : adapters) {
    const auto [adapter, strength] = item.cast<std::pair<py::dict, double>>();
    all.push_back(adapter_from(adapter));
    strengths.push_back(strength);
  }
  std::vector<AdapterToMerge> list;
  list.reserve(all.size());
  for (size_t i = 0; i < all.size(); ++i) list.push_back({&all[i], strengths[i]});
  MergeOptions options;
  options.keep = keep;
  options.allow_unmatched = allow_unmatched;
  if (!dtype.empty()) options.dtype = target_dtype(dtype);
  PythonProgress told{progress, nullptr};
  options.progress = &PythonProgress::tell;
  options.progress_host = &told;
  MergeReport report;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = merge_adapters(base, list, target, options, &report);
  }
  if (told.error) std::rethrow_exception(told.error);
  raise_if_error(status, status.message().starts_with(base) ? base : target);
  return describe(report);
}

py::dict unmerge(const std::string& merged, const std::string& kept, const std::string& target) {
  MergeReport report;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = unmerge_adapters(merged, kept, target, &report);
  }
  raise_if_error(status, status.message().starts_with(kept)     ? kept
                         : status.message().starts_with(merged) ? merged
                                                                : target);
  return describe(report);
}

py::list names(const std::string& base) {
  py::list list;
  for (const AdapterName& n : adapter_names(base))
    list.append(py::make_tuple(n.component, n.native, n.kind, n.out, n.in, n.column, n.spelled,
                               n.row, n.native_row, n.rows));
  return list;
}

}  // namespace

void register_adapters(py::module_& m) {
  const py::class_<Keeper> keeper(m, "AdapterMemory", "Keeps the memory of an adapter's tensors.");
  m.def("adapter_read", &read, py::arg("path"), py::arg("options"), "The adapter as a dict.");
  m.def("adapter_read_tensors", &read_tensors, py::arg("name"), py::arg("tensors"),
        py::arg("metadata"), py::arg("config"), py::arg("options"));
  m.def("adapter_write", &write, py::arg("adapter"), py::arg("path"), py::arg("options"));
  m.def("adapter_convert", &convert, py::arg("source"), py::arg("target"), py::arg("read"),
        py::arg("options"));
  m.def("adapter_spell", &spell, py::arg("adapter"), py::arg("options"));
  m.def("adapter_delta", &delta, py::arg("entry"), "(rows, columns, float64 bytes)");
  m.def("adapter_inspect", &inspect, py::arg("path"), py::arg("options"), py::arg("norms"));
  m.def("adapter_hashes", &hashes, py::arg("path"), "kohya's two hashes of a file.");
  m.def("adapter_merge", &merge, py::arg("base"), py::arg("adapters"), py::arg("target"),
        py::arg("dtype"), py::arg("keep"), py::arg("allow_unmatched"), py::arg("progress"));
  m.def("adapter_unmerge", &unmerge, py::arg("merged"), py::arg("kept"), py::arg("target"));
  m.def("adapter_names", &names, py::arg("base"));
  m.def("adapter_bases", &adapter_bases);
  m.def("adapter_formats", &adapter_formats);
}

}  // namespace loraaccel::python
