# SPDX-License-Identifier: Apache-2.0
# cmake -DPRESET= -DOPTIONS= -DTARGETS= -DRUN= -DBUILD= -DLAUNCHER= -P nested.cmake, from the top of the sources
cmake_policy(VERSION 3.25)

function(run folder)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${folder} RESULT_VARIABLE status OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nexit status ${status}\n${output}")
  endif()
  message("${output}")
endfunction()

cmake_path(GET CMAKE_SCRIPT_MODE_FILE PARENT_PATH source)
cmake_path(APPEND source ../..)
cmake_path(NORMAL_PATH source)
# Fresh: to another compiler CMake would go over without what the preset says, the sanitizer among it.
run(${source} ${CMAKE_COMMAND} --fresh --preset ${PRESET} -B ${BUILD} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}
    -DCMAKE_C_COMPILER_LAUNCHER=${LAUNCHER} ${OPTIONS})
run(${source} ${CMAKE_COMMAND} --build ${BUILD} --parallel 1 --target ${TARGETS})
run(${BUILD} ${RUN})
