# SPDX-License-Identifier: Apache-2.0
# While installing: copies the shared libraries that `program` needs into _lib, under the names by which they are asked
# for, but for libmla, which has its place, and those that every Linux with a C++ runtime has. Their licenses come along
# where Debian's packages lie.
file(GET_RUNTIME_DEPENDENCIES EXECUTABLES ${program} RESOLVED_DEPENDENCIES_VAR libraries
     PRE_EXCLUDE_REGEXES "^lib(c|m|dl|rt|pthread|gcc_s|stdc\\+\\+|mla)\\.so" "^ld-linux")
set(folder "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/_lib")
file(MAKE_DIRECTORY ${folder})
find_program(dpkg_query dpkg-query)
foreach(library ${libraries})
  get_filename_component(name ${library} NAME)
  file(REAL_PATH ${library} real)
  file(COPY_FILE ${real} ${folder}/${name} ONLY_IF_DIFFERENT)
  set(owner "")
  if(dpkg_query)
    execute_process(COMMAND ${dpkg_query} --search ${real} OUTPUT_VARIABLE owner ERROR_QUIET)
  endif()
  string(REGEX MATCH "^[^:, ]+" package "${owner}")
  if(package AND EXISTS /usr/share/doc/${package}/copyright)
    configure_file(/usr/share/doc/${package}/copyright ${folder}/licenses/${package}.txt COPYONLY)
  endif()
endforeach()
