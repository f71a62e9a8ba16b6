# The CUDA compiler, if EVENKEEL_CUDA wants it and there is one. Sets EVENKEEL_HAS_CUDA.
#
# Machine code is compiled for the architectures below, and PTX for the newest, which the driver
# compiles for GPUs that come after it.

set(EVENKEEL_HAS_CUDA OFF)
if(EVENKEEL_CUDA)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(EVENKEEL_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
                 PATHS /usr/local/cuda/bin)
    if(EVENKEEL_NVCC)
      set(CMAKE_CUDA_COMPILER ${EVENKEEL_NVCC})
    endif()
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
      message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} is of CUDA ${CMAKE_CUDA_COMPILER_VERSION}; evenkeel needs "
                          "12.8 or later. EVENKEEL_CUDA=OFF builds without it")
    endif()
    find_package(CUDAToolkit REQUIRED)
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know CUDA 13's
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    endif()
    set(EVENKEEL_HAS_CUDA ON)
  elseif(NOT EVENKEEL_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "EVENKEEL_CUDA is ${EVENKEEL_CUDA}, but there is no CUDA compiler (nvcc)")
  endif()
endif()
