# The torch that is installed for a Python, without find_package(Torch), which insists on a CUDA
# toolkit for torch builds with CUDA: the binding includes no header of CUDA.
#
# Sets EVENKEEL_TORCH_DIR (empty where there is no torch), EVENKEEL_TORCH_VERSION and, if there is
# one, the target evenkeel_torch_headers. In an isolated build the environment's own packages are
# hidden from `import`, so they are looked for by their path.

find_package(Python3 3.10 COMPONENTS Interpreter Development.Module)
set(EVENKEEL_TORCH_DIR "")
if(Python3_Development.Module_FOUND)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_torch.py
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(found)
    list(GET found 0 EVENKEEL_TORCH_DIR)
    list(GET found 1 EVENKEEL_TORCH_VERSION)
    list(GET found 2 torch_cxx11_abi)
    add_library(evenkeel_torch_headers INTERFACE)
    target_include_directories(evenkeel_torch_headers SYSTEM INTERFACE
      ${EVENKEEL_TORCH_DIR}/include
      ${EVENKEEL_TORCH_DIR}/include/torch/csrc/api/include)
    target_compile_definitions(evenkeel_torch_headers INTERFACE
      _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi})
    target_link_directories(evenkeel_torch_headers INTERFACE ${EVENKEEL_TORCH_DIR}/lib)
    target_link_libraries(evenkeel_torch_headers INTERFACE torch torch_cpu c10 torch_python)
  endif()
endif()
