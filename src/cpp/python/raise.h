// A Status as the Python exception for it.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "loraaccel/status.h"

namespace loraaccel::python {

// _core.SafetensorError, a ValueError: a file whose content is not what the format says.
pybind11::object& safetensor_error();

// Nothing where it is ok. kFileError: OSError with errno and `path`; kMalformedFile: SafetensorError; kOutOfMemory:
// MemoryError; what the caller got wrong: ValueError; the rest: RuntimeError.
void raise_if_error(const Status& status, const std::string& path);

}  // namespace loraaccel::python
