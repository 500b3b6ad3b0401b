# gcc 12 needs minutes for a unit with sanitizers at -O3; the presets for them say -O1.
set(LORAACCEL_KERNEL_OPTIMISATION "-O3" CACHE STRING "Optimisation of the units of one instruction set")

# Instruction-set flags of single files, and further ones given. On other processors such a file compiles to an empty
# list entry.
function(loraaccel_isa_flags file isa)
  set(_avx2 -mavx2 -mfma -mf16c)
  set(_avx512 ${_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  set(_flags ${LORAACCEL_KERNEL_OPTIMISATION} ${ARGN})
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    if(isa STREQUAL "avx2")
      list(APPEND _flags ${_avx2})
    elseif(isa STREQUAL "avx512")
      list(APPEND _flags ${_avx512})
    elseif(isa STREQUAL "avx512_bf16")
      list(APPEND _flags ${_avx512} -mavx512bf16)
    elseif(isa STREQUAL "sha_ni")
      list(APPEND _flags -msse4.1 -msha)
    endif()
  endif()
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64" AND isa STREQUAL "neon_bf16")
    list(APPEND _flags -march=armv8.2-a+bf16)
  endif()
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64" AND isa STREQUAL "armv8_sha")
    list(APPEND _flags -march=armv8-a+crypto)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # gcc 12 takes the "undefined" registers of its own intrinsics for a mistake of the caller; and vectors wider than
    # the baseline's never cross a function of another unit here.
    list(APPEND _flags -Wno-maybe-uninitialized -Wno-uninitialized -Wno-psabi)
  endif()
  set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${_flags}")
endfunction()

# A JSON file naming the instruction sets that the compiler was allowed to use everywhere.
function(loraaccel_write_build_info path)
  set(_baseline "")
  foreach(_pair "__SSE4_2__;sse4_2" "__AVX__;avx" "__AVX2__;avx2" "__FMA__;fma" "__AVX512F__;avx512f" "__AVX512BW__;avx512bw"
                "__AVX512VL__;avx512vl" "__AVX512DQ__;avx512dq")
    list(GET _pair 0 _macro)
    list(GET _pair 1 _flag)
    include(CheckCXXSymbolExists)
    check_cxx_symbol_exists(${_macro} "cstddef" LORAACCEL_BASELINE_${_macro})
    if(LORAACCEL_BASELINE_${_macro})
      list(APPEND _baseline "\"${_flag}\"")
    endif()
  endforeach()
  list(JOIN _baseline ", " _baseline)
  set(_torch "")
  if(LORAACCEL_BUILD_TORCH)
    set(_torch "${LORAACCEL_TORCH_VERSION}")
  endif()
  file(WRITE "${path}" "{\n  \"version\": \"${PROJECT_VERSION}\",\n  \"baseline_cpu_flags\": [${_baseline}],\n"
                       "  \"machine\": \"${CMAKE_SYSTEM_PROCESSOR}\",\n  \"torch_headers\": \"${_torch}\",\n"
                       "  \"torch_minimum\": \"2.10\",\n  \"opencv\": \"${LORAACCEL_OPENCV_VERSION}\"\n}\n")
endfunction()
