# The installed package, used as a stranger would: install into an empty folder, move that folder,
# build both examples against it with find_package and the C one with pkg-config, run them.
#
# Also looks at the library itself: it exports the ek_ functions only, and needs nothing but the
# C and C++ runtime, so that it can be carried to a machine without this project's dependencies.

function(run name)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE out ERROR_VARIABLE err)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${name} failed (${result}): ${command}\n${out}${err}")
  endif()
  message(STATUS "${name}: done")
  set(output "${out}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
run("install" ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/first)
file(RENAME ${WORK_DIR}/first ${WORK_DIR}/prefix)
set(prefix ${WORK_DIR}/prefix)

# find_package
run("configure" ${CMAKE_COMMAND} -S ${EXAMPLES_DIR} -B ${WORK_DIR}/build -G ${GENERATOR}
    -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF
    -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER})
file(STRINGS ${WORK_DIR}/build/CMakeCache.txt found REGEX "^evenkeel_DIR:")
if(NOT found MATCHES "${prefix}/")
  message(FATAL_ERROR "find_package found another evenkeel: ${found}")
endif()
run("build" ${CMAKE_COMMAND} --build ${WORK_DIR}/build)
run("C example" ${WORK_DIR}/build/layer_norm_c)
run("C++ example" ${WORK_DIR}/build/layer_norm_cpp)

# pkg-config
file(GLOB_RECURSE pc ${prefix}/evenkeel.pc)
cmake_path(GET pc PARENT_PATH pc_dir)
cmake_path(GET pc_dir PARENT_PATH lib_dir)
set(ENV{PKG_CONFIG_PATH} ${pc_dir})
run("pkg-config version" ${PKG_CONFIG} --modversion evenkeel)
string(STRIP "${output}" output)
if(NOT output STREQUAL VERSION)
  message(FATAL_ERROR "pkg-config says version '${output}', the header says '${VERSION}'")
endif()
run("pkg-config flags" ${PKG_CONFIG} --cflags --libs evenkeel)
string(STRIP "${output}" output)
separate_arguments(flags UNIX_COMMAND "${output}")
run("pkg-config build" ${C_COMPILER} ${EXAMPLES_DIR}/layer_norm.c -o ${WORK_DIR}/layer_norm
    ${flags} -lm -Wl,-rpath,${lib_dir})
run("pkg-config example" ${WORK_DIR}/layer_norm)

# The library itself
set(library ${lib_dir}/libevenkeel.so)
run("needed libraries" ${READELF} -d ${library})
string(REGEX MATCHALL "NEEDED[^\n]*\\[[^]]*\\]" needed "${output}")
foreach(line ${needed})
  if(NOT line MATCHES "\\[(libstdc\\+\\+|libc\\+\\+|libc\\+\\+abi|libm|libgcc_s|libpthread|libc|ld-linux[^]]*)\\.so")
    message(FATAL_ERROR "the installed library needs more than the C and C++ runtime: ${line}")
  endif()
endforeach()
if(NOT needed)
  message(FATAL_ERROR "readelf listed no needed libraries:\n${output}")
endif()
run("exported symbols" ${NM} --dynamic --defined-only --format=posix ${library})
string(REGEX MATCHALL "[^\n]+" symbols "${output}")
list(TRANSFORM symbols REPLACE " .*" "")
list(FILTER symbols EXCLUDE REGEX "^ek_")
if(symbols OR NOT output MATCHES "ek_forward ")
  message(FATAL_ERROR "the library must export ek_forward and nothing but ek_ names:\n${output}")
endif()
