# libbacktrace turns addresses into file and line (Debian's gcc brings it). The core refers to it weakly, so that a
# program that links the core without it gets native stacks with names only; our own libraries link it where it is.
add_library(loraaccel_libbacktrace INTERFACE)
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_LIBRARIES backtrace)
set(CMAKE_REQUIRED_FLAGS -fPIC)
check_cxx_source_compiles("#include <backtrace.h>\nint main() { return backtrace_create_state(0, 1, 0, 0) == 0; }"
                          LORAACCEL_FOUND_LIBBACKTRACE)
unset(CMAKE_REQUIRED_LIBRARIES)
unset(CMAKE_REQUIRED_FLAGS)
if(LORAACCEL_FOUND_LIBBACKTRACE)
  target_link_options(loraaccel_libbacktrace INTERFACE "LINKER:-u,backtrace_create_state" "LINKER:-u,backtrace_pcinfo"
                      "LINKER:--exclude-libs,libbacktrace.a")
  target_link_libraries(loraaccel_libbacktrace INTERFACE backtrace)
endif()
