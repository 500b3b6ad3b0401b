#include <pybind11/stl.h>

#include "bindings.h"
#include "loraaccel/exec_context.h"
#include "loraaccel/kernels.h"
#include "loraaccel/pack.h"

namespace py = pybind11;

namespace loraaccel::python {

void register_kernels(py::module_& m) {
  m.def(
      "kernels",
      [](bool host_lends_gemm) {
        py::list list;
        for (const KernelInfo& k : list_kernels(host_lends_gemm)) {
          py::dict entry;
          entry["op"] = k.op;
          entry["name"] = k.name;
          entry["available"] = k.available;
          entry["reason"] = k.reason;
          list.append(entry);
        }
        return list;
      },
      py::arg("host_lends_gemm") = false,
      "Kernels in order of choice: dicts with op, name, available, reason (why not; empty where "
      "available).");
  m.def("cpu_features", &cpu_features, "Instruction sets of this CPU that the kernels know.");
  m.def("describe_json", &describe_json, "A JSON object for bug reports.");
  m.def(
      "packed_weight_bytes",
      [](int64_t rows, int64_t cols, const std::string& dtype, bool for_input_gradient) -> size_t {
        for (const DType known : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
          if (dtype != dtype_name(known)) continue;
          return packed_weight_bytes(
              TensorView::matrix(nullptr, known, rows, cols),
              for_input_gradient ? WeightUse::kInputGradient : WeightUse::kForward);
        }
        return 0;
      },
      py::arg("rows"), py::arg("cols"), py::arg("dtype"), py::arg("for_input_gradient"),
      "Bytes of a packed weight [rows, cols]; 0 for a type that is not packed.");
  m.def("num_threads", &num_threads, "Threads of the core's own pool.");
  m.def(
      "set_num_threads",
      [](int n) {
        if (n < 0)
          throw py::value_error("set_num_threads: " + std::to_string(n) +
                                " threads, expected 0 (default) or more");
        set_num_threads(n);
      },
      py::arg("n"), "Size of the core's own pool; 0 returns to the default.");
}

}  // namespace loraaccel::python
