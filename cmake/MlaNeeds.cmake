# SPDX-License-Identifier: Apache-2.0
# Finds the libraries that the build needs, and says in one sentence all that are missing: find_package would name one at
# a time, and the compiler Highway's headers.
find_package(fmt 9 QUIET)
find_package(nlohmann_json 3.11 QUIET)
find_path(MLA_HWY_INCLUDE_DIR hwy/highway.h)
mark_as_advanced(MLA_HWY_INCLUDE_DIR)
set(mla_needed fmt_FOUND "{fmt} 9" nlohmann_json_FOUND "nlohmann-json 3.11" MLA_HWY_INCLUDE_DIR "Highway")
if(MLA_BUILD_TOOLS OR MLA_BUILD_FUZZERS)
  find_package(CLI11 QUIET)
  find_package(yaml-cpp QUIET)
  # Not by find_package: Debian's dnnl package file asks for the OpenCL headers, which nothing here needs.
  find_path(MLA_DNNL_INCLUDE_DIR oneapi/dnnl/dnnl.hpp)
  find_library(MLA_DNNL_LIBRARY dnnl)
  mark_as_advanced(MLA_DNNL_INCLUDE_DIR MLA_DNNL_LIBRARY)
  list(APPEND mla_needed CLI11_FOUND "CLI11" yaml-cpp_FOUND "yaml-cpp" MLA_DNNL_INCLUDE_DIR "oneDNN's headers"
                         MLA_DNNL_LIBRARY "oneDNN")
endif()
set(mla_missing)
while(mla_needed)
  list(POP_FRONT mla_needed found name)
  if(NOT ${found})
    list(APPEND mla_missing "${name}")
  endif()
endwhile()
if(mla_missing)
  list(JOIN mla_missing ", " mla_missing)
  message(FATAL_ERROR "libmla needs what is not here: ${mla_missing}. scripts/setup.sh installs it on Debian 12.")
endif()
