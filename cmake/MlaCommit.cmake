# SPDX-License-Identifier: Apache-2.0
# cmake -DSOURCE=<tree> -DHEADER=<file> -P MlaCommit.cmake
# Writes which commit the tree is of, so that a build can say it; nothing where the tree is no checkout of its own, as out
# of an archive. The header keeps its time if nothing changed.
cmake_minimum_required(VERSION 3.25)
find_program(git git)
set(commit "")
if(git)
  execute_process(COMMAND ${git} -C ${SOURCE} rev-parse --show-toplevel
                  OUTPUT_VARIABLE top OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  file(REAL_PATH ${SOURCE} source)
  if(top STREQUAL source)
    execute_process(COMMAND ${git} -C ${SOURCE} describe --always --exclude=* --abbrev=12 --dirty=-changed
                    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()
file(CONFIGURE OUTPUT ${HEADER} CONTENT "// SPDX-License-Identifier: Apache-2.0\n#define MLA_BUILD_COMMIT \"@commit@\"\n" @ONLY)
