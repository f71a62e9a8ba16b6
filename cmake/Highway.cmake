# Highway, the SIMD library that src/cpu is written with, as the target evenkeel_highway.
#
# Only its headers are used: the CPU backend picks the instruction set itself. The linker is told
# to record libhwy only if a symbol of it is needed, which is the case in unoptimized and sanitized
# builds (Highway's own debug assertions) and never in an installed package; a test holds that.

find_package(hwy 1.0.3 CONFIG QUIET)
if(NOT hwy_FOUND)  # Ubuntu 22.04 has an older one, other systems may have none
  message(STATUS "Highway 1.0.3 or later is not installed: fetching its source")
  include(FetchContent)
  set(HWY_ENABLE_TESTS OFF CACHE BOOL "" FORCE)
  set(HWY_ENABLE_EXAMPLES OFF CACHE BOOL "" FORCE)
  set(HWY_ENABLE_CONTRIB OFF CACHE BOOL "" FORCE)
  set(HWY_ENABLE_INSTALL OFF CACHE BOOL "" FORCE)
  FetchContent_Declare(highway
    GIT_REPOSITORY https://github.com/google/highway.git
    GIT_TAG ba0900a4957b929390ab73827235557959234fea)  # 1.0.7
  FetchContent_MakeAvailable(highway)
  set(hwy_VERSION 1.0.7)
  set_target_properties(hwy PROPERTIES POSITION_INDEPENDENT_CODE ON)
  add_library(hwy::hwy ALIAS hwy)
endif()

# One copy of the CPU code is compiled for each instruction set that is left: on x86 the baseline,
# AVX2 and AVX3 (AVX-512). The ones in between would cost build time and size for processors that
# nobody runs norms on any more; the later ones add nothing that a norm uses. Elsewhere: all.
set(disabled_targets HWY_SSSE3 HWY_SSE4 HWY_AVX3_DL)
if(hwy_VERSION VERSION_GREATER_EQUAL 1.0.4)
  list(APPEND disabled_targets HWY_AVX3_ZEN4)
endif()
if(hwy_VERSION VERSION_GREATER_EQUAL 1.0.5)
  list(APPEND disabled_targets HWY_AVX3_SPR)
endif()
if(hwy_VERSION VERSION_GREATER_EQUAL 1.3.0)
  list(APPEND disabled_targets HWY_AVX10_2)
endif()
list(JOIN disabled_targets "|" disabled_targets)

add_library(evenkeel_highway INTERFACE)
target_link_libraries(evenkeel_highway INTERFACE hwy::hwy)
target_compile_definitions(evenkeel_highway INTERFACE "HWY_DISABLED_TARGETS=(${disabled_targets})")

# Their names, for the tests. Which baseline Highway has depends on its version and on the compiler.
# Left empty elsewhere than on x86: the tests then run on the machine's best only.
set(EVENKEEL_CPU_TARGETS "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  include(CheckCXXSourceCompiles)
  get_target_property(CMAKE_REQUIRED_INCLUDES hwy::hwy INTERFACE_INCLUDE_DIRECTORIES)
  string(REGEX REPLACE "\\$<BUILD_INTERFACE:([^>]*)>" "\\1" CMAKE_REQUIRED_INCLUDES
         "${CMAKE_REQUIRED_INCLUDES}")
  foreach(baseline SSE2 EMU128 SCALAR)
    check_cxx_source_compiles("#define HWY_DISABLED_TARGETS (${disabled_targets})
      #include <hwy/detect_targets.h>
      #if HWY_STATIC_TARGET != HWY_${baseline}
      #error
      #endif
      int main() { return 0; }" EVENKEEL_BASELINE_IS_${baseline})
    if(EVENKEEL_BASELINE_IS_${baseline})
      set(EVENKEEL_CPU_TARGETS AVX3 AVX2 ${baseline})
      break()
    endif()
  endforeach()
  unset(CMAKE_REQUIRED_INCLUDES)
endif()

# Sanitized code takes long to compile, so it is made for one instruction set: what the sanitizers
# watch is written once for all of them. Tracking the scope of every temporary of the inlined kernels
# would cost five times as much again. Any alignment is allowed, so that is not watched; null pointers
# trap anyway, and accesses past an object are what the address sanitizer is for.
if(EVENKEEL_SANITIZE)
  target_compile_options(evenkeel_highway INTERFACE
    -fno-sanitize-address-use-after-scope -fno-sanitize=alignment,null,object-size)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    target_compile_options(evenkeel_highway INTERFACE -march=x86-64-v3 -maes -mpclmul)
    target_compile_definitions(evenkeel_highway INTERFACE HWY_COMPILE_ONLY_STATIC)
    set(EVENKEEL_CPU_TARGETS AVX2)
  endif()
endif()
