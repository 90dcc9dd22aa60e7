# SPDX-License-Identifier: Apache-2.0
# cmake -DMODULE=<MlaVersion.cmake> -P version.cmake
cmake_minimum_required(VERSION 3.25)
# With VERSION and its label this script is the build of a wheel, and prints the library's version.
include(${MODULE})
set(PROJECT_VERSION 0.2.0)
if(DEFINED VERSION)
  set(SKBUILD 2)
  set(PROJECT_IS_TOP_LEVEL ON)
  set(SKBUILD_PROJECT_VERSION_FULL ${VERSION})
  mla_full_version(full)
  message("${full}")
  return()
endif()

# expect(<pattern> [<NAME>=<value> ...]) compares what such a build prints, variables given.
function(expect pattern)
  list(TRANSFORM ARGN PREPEND -D OUTPUT_VARIABLE variables)
  execute_process(COMMAND ${CMAKE_COMMAND} -DMODULE=${MODULE} ${variables} -P ${CMAKE_CURRENT_LIST_FILE}
                  OUTPUT_VARIABLE text ERROR_VARIABLE text)
  string(REGEX REPLACE "[ \n]+" " " text "${text}")
  if(NOT text MATCHES "${pattern}")
    message(SEND_ERROR "${ARGN}: expected '${pattern}', got '${text}'")
  endif()
endfunction()

set(cuda MLA_CUDA_ENABLED=ON CMAKE_CUDA_COMPILER_VERSION=13.0.88)
set(ENV{LIBMLA_VERSION_LABEL} "")
expect("^0\\.2\\.0 $" VERSION=0.2.0)
expect("^0\\.2\\.0 $" VERSION=0.2.0 ${cuda})
set(ENV{LIBMLA_VERSION_LABEL} cpu)
expect("^0\\.2\\.0\\+cpu $" VERSION=0.2.0+cpu)
expect("LIBMLA_VERSION_LABEL: expected cu130, which is true of this build, got cpu" VERSION=0.2.0+cpu ${cuda})
set(ENV{LIBMLA_VERSION_LABEL} cu130)
expect("^0\\.2\\.0\\+cu130 $" VERSION=0.2.0+cu130 ${cuda})
expect("expected cpu, which is true of this build, got cu130" VERSION=0.2.0+cu130)
expect("expected cu129, which is true" VERSION=0.2.0+cu130 MLA_CUDA_ENABLED=ON CMAKE_CUDA_COMPILER_VERSION=12.9.41)
# A label without an entry in pyproject.toml, which gives the version none.
set(ENV{LIBMLA_VERSION_LABEL} cu131)
expect("expected a label that pyproject.toml knows, got cu131" VERSION=0.2.0)

# Without a wheel, and in that of another project, there is no label.
mla_full_version(full)
if(NOT full STREQUAL 0.2.0)
  message(SEND_ERROR "expected 0.2.0, got '${full}'")
endif()
set(SKBUILD 2)
set(SKBUILD_PROJECT_VERSION_FULL 7.1+cpu)
set(PROJECT_IS_TOP_LEVEL OFF)
mla_full_version(full)
if(NOT full STREQUAL 0.2.0)
  message(SEND_ERROR "expected 0.2.0 in another project's wheel, got '${full}'")
endif()
