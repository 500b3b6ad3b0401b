#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "bindings.h"
#include "cpu/ceilings.h"

namespace py = pybind11;

namespace loraaccel::python {

void register_ceilings(py::module_& m) {
  m.def(
      "measure_fma",
      [](const std::string& dtype, double seconds) {
        const char* isa = "";
        double gflops = 0;
        {
          py::gil_scoped_release release;
          gflops = cpu::measure_fma_gflops(dtype.c_str(), seconds, &isa);
        }
        if (gflops <= 0) {
          throw py::value_error(
              "measure_fma: dtype '" + dtype +
              "', expected 'float32', 'float64' or, on a CPU that has it, 'bfloat16'");
        }
        return py::make_tuple(gflops, isa);
      },
      py::arg("dtype"), py::arg("seconds"),
      "Rate of fused multiply-adds of one thread: (GFLOP/s, instruction set). Runs about `seconds` "
      "seconds without the GIL.");
  m.def(
      "measure_read",
      [](double mbytes, double seconds) {
        if (!(mbytes >= 0.001 && mbytes <= 1e6)) {
          throw py::value_error("measure_read: " + std::to_string(mbytes) +
                                " MB, expected 0.001 to 1000000");
        }
        const py::gil_scoped_release release;
        const auto bytes = static_cast<size_t>(mbytes * 1e6);
        const std::unique_ptr<void, void (*)(void*)> buffer(
            std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
        if (buffer == nullptr) throw std::bad_alloc();
        std::memset(buffer.get(), 1, bytes);
        // One pass tells how many fit in the time.
        const double first = cpu::measure_read_gbytes(buffer.get(), bytes, 1);
        const int passes =
            first > 0 ? std::max(1, static_cast<int>(seconds * first * 1e3 / mbytes)) : 1;
        return cpu::measure_read_gbytes(buffer.get(), bytes, passes);
      },
      py::arg("mbytes"), py::arg("seconds"),
      "Read bandwidth of one thread over a buffer of `mbytes` MB in GB/s. Runs about `seconds` "
      "seconds without the GIL.");
}

}  // namespace loraaccel::python
