# SPDX-License-Identifier: Apache-2.0
# cmake -DMODULE=<MlaSummary.cmake> -P summary.cmake
cmake_minimum_required(VERSION 3.25)
include(${MODULE})

function(expect text pattern)
  if(NOT text MATCHES "${pattern}")
    message(SEND_ERROR "expected '${pattern}', got '${text}'")
  endif()
endfunction()

set(MLA_CUDA AUTO)
set(MLA_CUDA_ARCHS 90 120)
set(MLA_EMULATED_ARCHS 90)
mla_summary(summary warning)
expect("${summary}" "^CPU$")
expect("${warning}" "^nvcc was not found, so that no code for GPUs was built: expected CUDA 12.9 or later")

set(CMAKE_CUDA_COMPILER /usr/bin/nvcc)
set(CMAKE_CUDA_COMPILER_VERSION 11.8.89)
mla_summary(summary warning)
expect("${warning}" "^nvcc 11.8.89 is too old, so that no code")

set(MLA_EMULATOR_ENABLED ON)
set(MLA_CUDA_ENABLED ON)
mla_summary(summary warning)
expect("${summary}" "^CPU \\+ sm90, sm120; emulator: sm90$")
expect("${warning}" "^$")

# Who asks for no GPU code gets no warning.
set(MLA_CUDA_ENABLED OFF)
set(MLA_CUDA OFF)
mla_summary(summary warning)
expect("${summary}" "^CPU; emulator: sm90$")
expect("${warning}" "^$")
