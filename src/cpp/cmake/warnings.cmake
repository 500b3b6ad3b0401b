option(LORAACCEL_LINE_TABLES "Keep function names and lines for native stacks in error messages" ON)
option(LORAACCEL_WERROR "Warnings are errors (for developers)" OFF)

# Warnings of our own targets; users who build a wheel see them but do not fail on them.
function(loraaccel_warnings target)
  if(LORAACCEL_LINE_TABLES)
    target_compile_options(${target} PRIVATE -g1 "-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=")
  endif()
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wnon-virtual-dtor)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE -Wno-restrict) # false alarms on std::string + in gcc 12
  endif()
  if(LORAACCEL_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
