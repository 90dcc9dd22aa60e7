# SPDX-License-Identifier: Apache-2.0
# cmake -DBUILD= -DEXAMPLES= -DSCRATCH= -DCXX_COMPILER= -DC_COMPILER= -DFLAGS= -P find_package.cmake
cmake_policy(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nexit status ${status}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${SCRATCH})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${SCRATCH}/prefix)

# The user of the library has none of its build-time dependencies.
foreach(example find_package c)
  run(${CMAKE_COMMAND} -G Ninja -S ${EXAMPLES}/${example} -B ${SCRATCH}/${example} -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix
      -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_BUILD_TYPE=Release
      "-DCMAKE_CXX_FLAGS=${FLAGS}" "-DCMAKE_C_FLAGS=${FLAGS}"
      -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON)
  file(STRINGS ${SCRATCH}/${example}/CMakeCache.txt found REGEX "^libmla_DIR:")
  if(NOT found MATCHES "${SCRATCH}/prefix")
    message(FATAL_ERROR "expected the package of ${SCRATCH}/prefix, got ${found}")
  endif()
  run(${CMAKE_COMMAND} --build ${SCRATCH}/${example})
endforeach()

# Every cached row holds 0.5; the score is 576 * 0.125 * 0.5 / sqrt(192), and log(100) tokens share it.
function(run_example)
  run(${ARGN})
  if(NOT output MATCHES "o = 0\\.500, lse = 7\\.203")
    message(FATAL_ERROR "${ARGN}: expected 'o = 0.500, lse = 7.203', got: ${output}")
  endif()
endfunction()
run_example(${SCRATCH}/find_package/decode)

run(${SCRATCH}/c/decode)
if(NOT output MATCHES "equal to attention in double")
  message(FATAL_ERROR "expected the example in C to find its result right, got: ${output}")
endif()

# Without CMake, from an installation that was moved.
find_program(pkg_config NAMES pkgconf pkg-config)
if(pkg_config)
  file(RENAME ${SCRATCH}/prefix ${SCRATCH}/moved)
  file(GLOB_RECURSE pc ${SCRATCH}/moved/libmla.pc)
  get_filename_component(folder "${pc}" DIRECTORY)
  run(${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${folder} ${pkg_config} --cflags --libs libmla)
  separate_arguments(flags UNIX_COMMAND "${output}")
  run(${CXX_COMPILER} -std=c++20 ${EXAMPLES}/find_package/decode.cpp -o ${SCRATCH}/decode ${flags})
  run_example(${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${folder}/.. ${SCRATCH}/decode)
  file(RENAME ${SCRATCH}/moved ${SCRATCH}/prefix)
else()
  message(STATUS "no pkg-config: libmla.pc is not tried")
endif()

# Both names of the program are installed.
foreach(name mla libmla)
  run(${SCRATCH}/prefix/bin/${name} --version)
endforeach()

# A version this package cannot serve is refused.
file(WRITE ${SCRATCH}/newer/CMakeLists.txt
     "cmake_minimum_required(VERSION 3.25)\nproject(newer LANGUAGES CXX)\nfind_package(libmla 99 REQUIRED)\n")
execute_process(COMMAND ${CMAKE_COMMAND} -G Ninja -S ${SCRATCH}/newer -B ${SCRATCH}/newer/build
                        -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
                RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE output)
if(status EQUAL 0 OR NOT output MATCHES "requested version \"99\"")
  message(FATAL_ERROR "expected find_package(libmla 99) to be refused, got status ${status}: ${output}")
endif()
