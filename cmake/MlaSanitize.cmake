# SPDX-License-Identifier: Apache-2.0
# Applies MLA_SANITIZE to every target that follows.
if(NOT MLA_SANITIZE)
  return()
endif()

set(MLA_SANITIZED_KERNELS -O1 CACHE STRING "How kernels of the emulator are optimized under sanitizers")
add_compile_options(-fsanitize=${MLA_SANITIZE} -fno-omit-frame-pointer -g1)
add_link_options(-fsanitize=${MLA_SANITIZE})
if(MLA_SANITIZE MATCHES "undefined")
  add_compile_options(-fno-sanitize-recover=undefined)
endif()

if(MLA_BUILD_FUZZERS)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

# The shadow maps of GCC 12's and clang 14's sanitizers collide with the address ranges that kernels with more than 28
# random bits hand out: their programs then die at start. Switch the randomization off where the kernel lets us.
if(EXISTS /proc/sys/vm/mmap_rnd_bits AND NOT CMAKE_CROSSCOMPILING)
  file(READ /proc/sys/vm/mmap_rnd_bits mla_random_bits)
  find_program(MLA_SETARCH setarch)
  if(mla_random_bits GREATER 28 AND MLA_SETARCH)
    execute_process(COMMAND ${MLA_SETARCH} -R true RESULT_VARIABLE mla_setarch_status OUTPUT_QUIET ERROR_QUIET)
    if(mla_setarch_status EQUAL 0)
      set(CMAKE_CROSSCOMPILING_EMULATOR "${MLA_SETARCH};-R")
    endif()
  endif()
endif()
