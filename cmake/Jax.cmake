# The headers of XLA's foreign function interface, from the jaxlib that is installed for a Python.
#
# That Python is EVENKEEL_JAX_PYTHON; where it is empty, the one of .venv-jax, or else Python3 (for a
# wheel always Python3).
#
# Sets EVENKEEL_JAX_INCLUDE (empty where there is no jaxlib), EVENKEEL_JAX_VERSION and
# EVENKEEL_JAX_INTERPRETER.

set(EVENKEEL_JAX_INTERPRETER ${EVENKEEL_JAX_PYTHON})
if(NOT EVENKEEL_JAX_INTERPRETER)
  set(EVENKEEL_JAX_INTERPRETER ${PROJECT_SOURCE_DIR}/.venv-jax/bin/python)
  if(SKBUILD OR NOT EXISTS ${EVENKEEL_JAX_INTERPRETER})
    find_package(Python3 3.10 COMPONENTS Interpreter)
    set(EVENKEEL_JAX_INTERPRETER ${Python3_EXECUTABLE})
  endif()
endif()

set(EVENKEEL_JAX_INCLUDE "")
if(EVENKEEL_JAX_INTERPRETER)
  execute_process(
    COMMAND ${EVENKEEL_JAX_INTERPRETER} ${CMAKE_CURRENT_LIST_DIR}/find_jax.py
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(found)
    list(GET found 0 EVENKEEL_JAX_INCLUDE)
    list(GET found 1 EVENKEEL_JAX_VERSION)
  endif()
endif()
