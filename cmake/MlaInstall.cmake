# SPDX-License-Identifier: Apache-2.0
# `cmake --install` yields headers, library and a package that find_package(libmla) finds (and tools/mla adds the program).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

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
