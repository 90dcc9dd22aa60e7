# SPDX-License-Identifier: Apache-2.0
# mla_full_version(<version>) gives what the library says of its version: that of project(), and in a labelled wheel
# "0.2.0+cpu" or "0.2.0+cu130", as its file's name and metadata have it (pyproject.toml). A label that is not true of the
# build is an error before anything is compiled.
function(mla_full_version version)
  set(${version} ${PROJECT_VERSION} PARENT_SCOPE)
  if(NOT SKBUILD OR NOT PROJECT_IS_TOP_LEVEL)
    return()  # no wheel, or that of another project
  endif()
  set(label "")
  if(SKBUILD_PROJECT_VERSION_FULL MATCHES "\\+(.+)$")
    set(label ${CMAKE_MATCH_1})
    set(${version} ${PROJECT_VERSION}+${label} PARENT_SCOPE)
  endif()
  set(asked "$ENV{LIBMLA_VERSION_LABEL}")
  if(NOT asked STREQUAL label)
    message(FATAL_ERROR "LIBMLA_VERSION_LABEL: expected a label that pyproject.toml knows, got ${asked}")
  endif()
  set(fitting cpu)
  if(MLA_CUDA_ENABLED)
    string(REGEX REPLACE "^([0-9]+)\\.([0-9]+).*" "cu\\1\\2" fitting "${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
  if(label AND NOT label STREQUAL fitting)
    message(FATAL_ERROR "LIBMLA_VERSION_LABEL: expected ${fitting}, which is true of this build, got ${label}")
  endif()
endfunction()
