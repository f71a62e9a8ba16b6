# The installed package: headers, library, the files for find_package(evenkeel) and pkg-config.
#
# Both find the library relative to themselves, so an installed tree can be moved. Users need a C
# or C++ compiler and nothing else: every dependency of the library is private to it.

if(SKBUILD)  # a Python wheel: the library goes into the package, under one name
  install(TARGETS evenkeel LIBRARY DESTINATION evenkeel)
  # And what `python -m evenkeel build` makes operators from, for a torch that the wheel has none for.
  install(DIRECTORY bindings/torch DESTINATION evenkeel/_source/bindings FILES_MATCHING PATTERN "*.cc" PATTERN "*.h")
  install(FILES bindings/memory/pages.h DESTINATION evenkeel/_source/bindings/memory)
  install(FILES include/evenkeel/evenkeel.h DESTINATION evenkeel/_source/include/evenkeel)
  install(FILES cmake/extension.map DESTINATION evenkeel/_source/cmake)
  return()
endif()

include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/evenkeel)

install(DIRECTORY include/evenkeel DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS evenkeel EXPORT evenkeelTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT evenkeelTargets NAMESPACE evenkeel:: DESTINATION ${package_dir})

configure_package_config_file(cmake/evenkeelConfig.cmake.in evenkeelConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(evenkeelConfigVersion.cmake COMPATIBILITY SameMajorVersion)

file(RELATIVE_PATH prefix_from_pc
     ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/evenkeel.pc.in evenkeel.pc @ONLY)

install(FILES ${CMAKE_CURRENT_BINARY_DIR}/evenkeelConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/evenkeelConfigVersion.cmake
        DESTINATION ${package_dir})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/evenkeel.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
