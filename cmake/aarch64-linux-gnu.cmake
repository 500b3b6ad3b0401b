# Toolchain file for 64-bit Arm Linux (Raspberry Pi, Jetson, servers): the preset `aarch64`, or
# `cmake --toolchain <this file>` in a project of your own.
# On Debian and Ubuntu: apt install g++-aarch64-linux-gnu, and qemu-user to run what was built.
#
# What is already set, on the command line or in a file that includes this one, stays as it is:
#   CMAKE_CXX_COMPILER             another compiler
#   LORAACCEL_SYSROOT              headers and libraries of the target
#   LORAACCEL_SYSROOT_PREFIXES     more places for find_package(), such as the prefix of an installed loraaccel
#   CMAKE_CROSSCOMPILING_EMULATOR  runs a program of the target; qemu-aarch64 where it is installed
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
if(NOT DEFINED CMAKE_C_COMPILER)
  set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
endif()
if(NOT DEFINED CMAKE_CXX_COMPILER)
  set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
endif()

if(NOT DEFINED LORAACCEL_SYSROOT)
  set(LORAACCEL_SYSROOT /usr/aarch64-linux-gnu)
endif()
# CMake reads this file again for each of its test programs, which know no variables but these.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES LORAACCEL_SYSROOT LORAACCEL_SYSROOT_PREFIXES)
# A prefix has to be a root as well: libraries and packages are looked for below the roots only.
list(APPEND CMAKE_FIND_ROOT_PATH ${LORAACCEL_SYSROOT} ${LORAACCEL_SYSROOT_PREFIXES})
foreach(_kind LIBRARY INCLUDE PACKAGE)
  if(NOT DEFINED CMAKE_FIND_ROOT_PATH_MODE_${_kind})
    set(CMAKE_FIND_ROOT_PATH_MODE_${_kind} ONLY)
  endif()
endforeach()
if(NOT DEFINED CMAKE_FIND_ROOT_PATH_MODE_PROGRAM)
  set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
endif()

if(NOT DEFINED CMAKE_CROSSCOMPILING_EMULATOR)
  find_program(LORAACCEL_QEMU NAMES qemu-aarch64 qemu-aarch64-static)
  mark_as_advanced(LORAACCEL_QEMU)
  if(LORAACCEL_QEMU)
    set(CMAKE_CROSSCOMPILING_EMULATOR "${LORAACCEL_QEMU};-L;${LORAACCEL_SYSROOT}")
  endif()
endif()
