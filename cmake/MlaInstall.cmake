# SPDX-License-Identifier: Apache-2.0
# `cmake --install` yields headers, library, a package that find_package(libmla) finds and one that pkg-config finds (and
# tools/mla adds the program). They are the component `development`, which the wheel has too.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME development)
set(mla_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/libmla)

install(TARGETS mla EXPORT libmlaTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/mla DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT libmlaTargets NAMESPACE libmla:: DESTINATION ${mla_package_dir})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/libmlaConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/libmlaConfig.cmake INSTALL_DESTINATION ${mla_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/libmlaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/libmlaConfig.cmake ${PROJECT_BINARY_DIR}/libmlaConfigVersion.cmake
        DESTINATION ${mla_package_dir})

# Found from where the file lies, so that the installation may be moved.
set(mla_pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH mla_prefix_from_pc /${mla_pc_dir} /)
string(REGEX REPLACE "/$" "" mla_prefix_from_pc "${mla_prefix_from_pc}")
# What the CUDA runtime, which libmla holds, takes from the system.
set(mla_system_libs "")
if(MLA_CUDA_ENABLED)
  set(mla_system_libs " -ldl -lrt")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/libmla.pc.in ${PROJECT_BINARY_DIR}/libmla.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/libmla.pc DESTINATION ${mla_pc_dir})
