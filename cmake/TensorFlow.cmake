# The TensorFlow that is installed for a Python, found by its path as bindings/torch finds torch.
#
# That Python is EVENKEEL_TENSORFLOW_PYTHON; where it is empty, the one of .venv-tensorflow, or else
# Python3 (for a wheel always Python3, which the wheel is for).
#
# Sets EVENKEEL_TENSORFLOW_DIR (empty where there is no TensorFlow), EVENKEEL_TENSORFLOW_VERSION,
# EVENKEEL_TENSORFLOW_INTERPRETER and, if there is one, the target evenkeel_tensorflow_headers.

set(EVENKEEL_TENSORFLOW_INTERPRETER ${EVENKEEL_TENSORFLOW_PYTHON})
if(NOT EVENKEEL_TENSORFLOW_INTERPRETER)
  set(EVENKEEL_TENSORFLOW_INTERPRETER ${PROJECT_SOURCE_DIR}/.venv-tensorflow/bin/python)
  if(SKBUILD OR NOT EXISTS ${EVENKEEL_TENSORFLOW_INTERPRETER})
    find_package(Python3 3.10 COMPONENTS Interpreter)
    set(EVENKEEL_TENSORFLOW_INTERPRETER ${Python3_EXECUTABLE})
  endif()
endif()

set(EVENKEEL_TENSORFLOW_DIR "")
if(EVENKEEL_TENSORFLOW_INTERPRETER)
  execute_process(
    COMMAND ${EVENKEEL_TENSORFLOW_INTERPRETER} ${CMAKE_CURRENT_LIST_DIR}/find_tensorflow.py
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(found)
    list(GET found 0 EVENKEEL_TENSORFLOW_DIR)
    list(GET found 1 EVENKEEL_TENSORFLOW_VERSION)
    add_library(evenkeel_tensorflow_headers INTERFACE)
    target_include_directories(evenkeel_tensorflow_headers SYSTEM INTERFACE
      ${EVENKEEL_TENSORFLOW_DIR}/include)
    # As tf.sysconfig.get_compile_flags() has them.
    target_compile_definitions(evenkeel_tensorflow_headers INTERFACE
      _GLIBCXX_USE_CXX11_ABI=1 EIGEN_MAX_ALIGN_BYTES=64)
    target_link_libraries(evenkeel_tensorflow_headers INTERFACE
      ${EVENKEEL_TENSORFLOW_DIR}/libtensorflow_framework.so.2)
  endif()
endif()
