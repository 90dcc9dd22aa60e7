# SPDX-License-Identifier: Apache-2.0
# Backends of GPUs, and how their kernels are compiled: once per architecture and machine, by nvcc for GPUs and by the
# host compiler for the emulator.

# mla_cuda_backend(<folder> [ARCHS <architectures>])
# A backend for these architectures and those that have their kernels (all, if none is given): a folder whose *.cpp are
# the host's and whose *.cu are kernels and what launches them. Its name is the namespace of `backend()` and `operations()`
# (src/cuda/border/backend.h). The backends of a CMakeLists.txt are compiled by its mla_add_cuda_backends.
function(mla_cuda_backend folder)
  cmake_parse_arguments(ARG "" "" "ARCHS" ${ARGN})
  cmake_path(ABSOLUTE_PATH folder)
  cmake_path(GET folder FILENAME name)
  set(mla_cuda_backends ${mla_cuda_backends} ${name} PARENT_SCOPE)
  set(mla_folder_of_${name} ${folder} PARENT_SCOPE)
  set(mla_archs_of_${name} "${ARG_ARCHS}" PARENT_SCOPE)
endfunction()

# Of GPUs. A cubin for each architecture, and sm80 as PTX too, which the drivers of GPUs to come compile. SM90 is compiled
# with its own instructions. Later architectures are compiled for their family: such a cubin has the instructions that the
# family shares, setmaxnreg among them, and runs on the later GPUs of its major number too (sm_100f on 10.0 and 10.3,
# sm_120f on 12.0 and 12.1), which no cubin of sm_100a does.
function(mla_compile_for_gpu target arch)
  set(codes_80 "code=[sm_80,compute_80]")
  set(names_90 90a)
  foreach(family 100 103 110 120 121)
    set(names_${family} ${family}f)
  endforeach()
  set(gpu ${arch})
  if(MLA_CUDA_PROFILE)
    set(gpu ${MLA_CUDA_PROFILE_GPU})
  endif()
  set(name ${gpu})
  if(DEFINED names_${gpu})
    set(name ${names_${gpu}})
  endif()
  set(code "code=sm_${name}")
  if(DEFINED codes_${gpu})
    set(code ${codes_${gpu}})
  endif()
  if(NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
  endif()
  add_library(${target} OBJECT ${ARGN})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_compile_definitions(${target} PRIVATE MLA_CUDA_ARCH=${arch} MLA_CUDA_GPU=${gpu})
  target_compile_options(${target} PRIVATE "--generate-code=arch=compute_${name},${code}" -O3 --expt-relaxed-constexpr
                                           -Xptxas=-v)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
                                             POSITION_INDEPENDENT_CODE ON CUDA_RUNTIME_LIBRARY Static)
  # ptxas reports registers and spills: kept beside each object, for tests/cuda.
  set_property(TARGET ${target} PROPERTY CUDA_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/scripts/ptxas_report.sh
                                         ${CMAKE_CUDA_COMPILER_LAUNCHER})
endfunction()

# How kernels are compiled for the emulator, those of tests too. Variables without a value hold large numbers.
if(MLA_EMULATOR_ENABLED)
  add_library(mla_emulated_kernels INTERFACE)
  target_compile_options(mla_emulated_kernels INTERFACE -Wno-unknown-pragmas -ftrivial-auto-var-init=pattern)
endif()

# Of the emulator. Each kernel file is compiled as C++ through a file that includes it.
function(mla_compile_for_emulator target arch)
  # Optimized in debug builds too: most of the time goes here. -O2 takes half as long again to compile as -O1, and tests
  # run 2 % faster, for most of that time is the emulator's (Zen 4, 2026-11-30). Under sanitizers -O2 takes twice as long
  # as -O1 and four times as long as -O0, with which few kernels may run: the tests of memory and bad input.
  set(optimization -O1)
  if(MLA_SANITIZE)
    set(optimization ${MLA_SANITIZED_KERNELS})
  endif()
  set(sources)
  foreach(file ${ARGN})
    set(top ${PROJECT_SOURCE_DIR}/src)
    cmake_path(IS_PREFIX CMAKE_CURRENT_BINARY_DIR ${file} is_generated)
    if(is_generated)
      set(top ${CMAKE_CURRENT_BINARY_DIR})
    endif()
    cmake_path(RELATIVE_PATH file BASE_DIRECTORY ${top})
    string(REPLACE "../" "" source ${file})
    set(source ${CMAKE_CURRENT_BINARY_DIR}/emulated/${source})
    cmake_path(REPLACE_EXTENSION source LAST_ONLY cpp)
    file(CONFIGURE OUTPUT ${source} @ONLY CONTENT "#include \"@file@\"  // IWYU pragma: keep\n")
    list(APPEND sources ${source})
  endforeach()
  add_library(${target} OBJECT ${sources})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src
                                               ${CMAKE_CURRENT_BINARY_DIR})
  target_compile_definitions(${target} PRIVATE MLA_CUDA_ARCH=${arch} MLA_EMULATED=1)
  target_compile_options(${target} PRIVATE ${optimization})
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_link_libraries(${target} PRIVATE mla_emulated_kernels mla_warnings)
  # Each kernel file alone: what its headers define is its own.
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON UNITY_BUILD OFF)
endfunction()

# mla_joined_kernels(<variable> <name> <files>...)
# One file that includes these, since nvcc needs two seconds for the headers of each; the files themselves with
# -DCMAKE_UNITY_BUILD=OFF.
function(mla_joined_kernels variable name)
  if(DEFINED CMAKE_UNITY_BUILD AND NOT CMAKE_UNITY_BUILD)
    set(${variable} ${ARGN} PARENT_SCOPE)
    return()
  endif()
  set(text)
  foreach(file ${ARGN})
    string(APPEND text "#include \"${file}\"  // IWYU pragma: keep\n")
  endforeach()
  set(joined ${CMAKE_CURRENT_BINARY_DIR}/${name}.cu)
  file(CONFIGURE OUTPUT ${joined} CONTENT "${text}" @ONLY)
  set(${variable} ${joined} PARENT_SCOPE)
endfunction()

# mla_add_cuda_backends(<target> [KERNELS <files>] [COMMON <files>])
# Compiles the backends of this CMakeLists.txt into the target, KERNELS with those of every architecture, COMMON with
# those of every architecture that does not call another one's (MLA_COMMON_ARCH in src/cuda/ptx/machine.h), and the list
# of all backends (src/cuda/runtime/backends.cpp): these before those that were added earlier.
function(mla_add_cuda_backends target)
  cmake_parse_arguments(ARG "" "" "KERNELS;COMMON" ${ARGN})
  set(archs_gpu)
  set(archs_emulator)
  if(MLA_CUDA_ENABLED)
    set(archs_gpu ${MLA_CUDA_ARCHS})
  endif()
  if(MLA_EMULATOR_ENABLED)
    set(archs_emulator ${MLA_EMULATED_ARCHS})
  endif()
  set(name_gpu ${target}_sm)
  set(name_emulator ${target}_emulated_sm)
  foreach(backend ${mla_cuda_backends})
    file(GLOB hosts CONFIGURE_DEPENDS ${mla_folder_of_${backend}}/*.cpp)
    file(GLOB kernels CONFIGURE_DEPENDS ${mla_folder_of_${backend}}/*.cu)
    mla_joined_kernels(kernels_of_${backend} ${backend} ${kernels})
    target_sources(${target} PRIVATE ${hosts})
    list(JOIN mla_archs_of_${backend} ", " archs)
    if(archs)
      string(PREPEND archs ", ")
    endif()
    string(APPEND list_all " X(${backend}${archs})")
  endforeach()
  foreach(machine gpu emulator)
    list(TRANSFORM archs_${machine} REPLACE "^86$" 80 OUTPUT_VARIABLE archs_of_common)
    set(archs ${archs_${machine}} ${archs_of_common})
    list(REMOVE_DUPLICATES archs)
    foreach(arch ${archs})
      set(sources)
      if(arch IN_LIST archs_of_common)
        list(APPEND sources ${ARG_COMMON})
      endif()
      set(backends)
      if(arch IN_LIST archs_${machine})
        list(APPEND sources ${ARG_KERNELS})
        set(backends ${mla_cuda_backends})
      endif()
      foreach(backend ${backends})
        set(written_for ${arch})
        if(DEFINED mla_written_for_${arch})
          set(written_for ${mla_written_for_${arch}})
        endif()
        if(NOT mla_archs_of_${backend} OR written_for IN_LIST mla_archs_of_${backend})
          list(APPEND sources ${kernels_of_${backend}})
          string(APPEND list_${machine} " X(${backend}, ${arch})")
        endif()
      endforeach()
      if(sources)
        set(objects ${name_${machine}}${arch})
        cmake_language(CALL mla_compile_for_${machine} ${objects} ${arch} ${sources})
        target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
      endif()
    endforeach()
  endforeach()
  foreach(list list_all list_gpu list_emulator)
    get_property(earlier GLOBAL PROPERTY mla_cuda_backends_${list})
    string(APPEND ${list} "${earlier}")
    set_property(GLOBAL PROPERTY mla_cuda_backends_${list} "${${list}}")
  endforeach()
  file(CONFIGURE OUTPUT include/cuda/built_backends.h @ONLY CONTENT [[
// The backends in their order with the architectures that they are for, and those that this build has them for.
#pragma once
#define MLA_FOR_EVERY_BACKEND(X)@list_all@
#define MLA_FOR_EVERY_CUDA_BACKEND(X)@list_gpu@
#define MLA_FOR_EVERY_EMULATED_BACKEND(X)@list_emulator@
]])
  set(source ${PROJECT_SOURCE_DIR}/src/cuda/runtime/backends.cpp)
  target_sources(${target} PRIVATE ${source})
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/include)
  # Alone in its object file: a program that has a list of its own leaves this one in the library.
  set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
