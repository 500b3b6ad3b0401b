# Headers of one recent torch, of any flavour, and DT_NEEDED entries for libtorch_cpu without linking a real one.
# Searched in this order: LORAACCEL_TORCH_ROOT, CMAKE_PREFIX_PATH, the torch of the running Python (it is not imported).
find_path(LORAACCEL_TORCH_INCLUDE torch/csrc/stable/library.h HINTS "${LORAACCEL_TORCH_ROOT}/include"
                                                                    "${Torch_DIR}/../../../include")
if(NOT LORAACCEL_TORCH_INCLUDE)
  find_package(Python QUIET COMPONENTS Interpreter)
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c
              "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE _torch_package
      OUTPUT_STRIP_TRAILING_WHITESPACE)
    find_path(LORAACCEL_TORCH_INCLUDE torch/csrc/stable/library.h HINTS "${_torch_package}/include")
  endif()
endif()
if(NOT LORAACCEL_TORCH_INCLUDE)
  message(FATAL_ERROR "No torch headers (2.13 or newer): install torch and build with --no-build-isolation, "
                      "or pass -DLORAACCEL_TORCH_ROOT=<site-packages/torch or libtorch>, "
                      "or -DLORAACCEL_BUILD_TORCH=OFF for the core alone.")
endif()
file(STRINGS "${LORAACCEL_TORCH_INCLUDE}/torch/headeronly/version.h" _version REGEX "define TORCH_VERSION_M(AJOR|INOR) ")
string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" LORAACCEL_TORCH_VERSION "${_version}")
message(STATUS "torch headers ${LORAACCEL_TORCH_VERSION}: ${LORAACCEL_TORCH_INCLUDE}")
if(LORAACCEL_TORCH_VERSION VERSION_LESS 2.13)
  message(FATAL_ERROR "torch headers ${LORAACCEL_TORCH_VERSION} found, 2.13 or newer are needed to build "
                      "(the result runs with 2.10 and newer).")
endif()

add_library(loraaccel_torch_stable INTERFACE)
target_include_directories(loraaccel_torch_stable SYSTEM INTERFACE "${LORAACCEL_TORCH_INCLUDE}")
target_compile_definitions(loraaccel_torch_stable INTERFACE TORCH_STABLE_ONLY
                                                            TORCH_TARGET_VERSION=${LORAACCEL_TORCH_TARGET})

# Empty libraries with torch's names: the operators need the DT_NEEDED entry, or they cannot be loaded with RTLD_LOCAL.
function(loraaccel_torch_needed target)
  if(APPLE)
    target_link_options(${target} PRIVATE "LINKER:-undefined,dynamic_lookup")
    return()
  endif()
  foreach(_library ${ARGN})
    if(NOT TARGET loraaccel_stub_${_library})
      file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/stubs/${_library}.cpp" CONTENT "")
      add_library(loraaccel_stub_${_library} SHARED "${CMAKE_BINARY_DIR}/stubs/${_library}.cpp")
      set_target_properties(loraaccel_stub_${_library} PROPERTIES OUTPUT_NAME ${_library} LIBRARY_OUTPUT_DIRECTORY
                                                                                         "${CMAKE_BINARY_DIR}/stubs")
    endif()
    add_dependencies(${target} loraaccel_stub_${_library})
    target_link_libraries(${target} PRIVATE $<TARGET_FILE:loraaccel_stub_${_library}>)
  endforeach()
  target_link_options(${target} PRIVATE "LINKER:--no-as-needed") # the stubs define nothing, and must stay all the same
endfunction()
