# SPDX-License-Identifier: Apache-2.0
# mla_summary(<summary> <warning>) says in one line what a build has, "CPU + sm90, sm120; emulator: sm90", and why it has
# no code for GPUs although nobody asked for that; an empty text where there is nothing to warn of.
function(mla_summary summary warning)
  set(text "CPU")
  if(MLA_CUDA_ENABLED)
    list(TRANSFORM MLA_CUDA_ARCHS PREPEND sm OUTPUT_VARIABLE archs)
    list(JOIN archs ", " archs)
    string(APPEND text " + ${archs}")
  endif()
  if(MLA_EMULATOR_ENABLED)
    list(TRANSFORM MLA_EMULATED_ARCHS PREPEND sm OUTPUT_VARIABLE archs)
    list(JOIN archs ", " archs)
    string(APPEND text "; emulator: ${archs}")
  endif()
  set(${summary} ${text} PARENT_SCOPE)
  set(${warning} "" PARENT_SCOPE)
  if(NOT MLA_CUDA_ENABLED AND MLA_CUDA STREQUAL "AUTO" AND NOT MLA_SANITIZE AND NOT CMAKE_CROSSCOMPILING)
    set(found "nvcc was not found")
    if(CMAKE_CUDA_COMPILER)
      set(found "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old")
    endif()
    set(${warning} "${found}, so that no code for GPUs was built: expected CUDA 12.9 or later, its nvcc on PATH or named by CUDACXX"
        PARENT_SCOPE)
  endif()
endfunction()

# mla_tell_at_end_of_install(<component>) prints that when the component is installed, which ends the build of a wheel. pip
# shows nothing that a build prints unless it is asked to (-v), so the lines go to the terminal itself, if there is one.
function(mla_tell_at_end_of_install component)
  mla_summary(summary warning)
  set(lines "libmla was built with: ${summary}")
  if(warning)
    string(APPEND lines "\nWARNING: libmla: ${warning}")
  endif()
  install(CODE "set(lines [==[${lines}]==])
message(\"\${lines}\")
execute_process(COMMAND sh -c [==[printf '\\n%s\\n' \"$1\" >/dev/tty]==] sh \"\${lines}\" ERROR_QUIET)" COMPONENT ${component} EXCLUDE_FROM_ALL)
endfunction()
