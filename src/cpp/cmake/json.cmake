# nlohmann-json, header-only and private to the core: an installed CMake package, else the PyPI package nlohmann-json.
add_library(loraaccel_json INTERFACE)
find_package(nlohmann_json 3.10 CONFIG QUIET)
if(nlohmann_json_FOUND)
  target_link_libraries(loraaccel_json INTERFACE nlohmann_json::nlohmann_json)
  message(STATUS "nlohmann-json ${nlohmann_json_VERSION}: ${nlohmann_json_DIR}")
else()
  find_package(Python QUIET COMPONENTS Interpreter)
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c
              "import importlib.util as u; s = u.find_spec('nlohmann_json'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE _json_package
      OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  # Headers alone serve any target, so a cross build takes them although they lie outside its roots.
  find_path(
    LORAACCEL_JSON_INCLUDE nlohmann/json.hpp
    PATHS "${_json_package}/include"
    NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH)
  find_path(LORAACCEL_JSON_INCLUDE nlohmann/json.hpp)
  if(NOT LORAACCEL_JSON_INCLUDE)
    message(FATAL_ERROR "No nlohmann-json: install the Debian package nlohmann-json3-dev or `pip install nlohmann-json`.")
  endif()
  target_include_directories(loraaccel_json SYSTEM INTERFACE "${LORAACCEL_JSON_INCLUDE}")
  message(STATUS "nlohmann-json: ${LORAACCEL_JSON_INCLUDE}")
endif()
