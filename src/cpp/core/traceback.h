// The native call stack as text, for error messages.
#pragma once

#include <string>

namespace loraaccel {

// True when the environment variable LORAACCEL_TRACEBACK is set to anything but "" and "0".
bool traceback_wanted();

// One line per frame, innermost first: "#0 function at file:line (library)". `skip` leaves out that many
// frames above this function. Function names need a symbol table, file and line need debug information (-g1)
// and a build that found libbacktrace; what is missing is left out of the line.
std::string capture_traceback(int skip);

}  // namespace loraaccel
