#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A compiler launcher: runs nvcc and keeps what ptxas says of its kernels in OBJECT.ptxas: ptxas_report.sh NVCC ARGUMENT...
object=
previous=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
if [ -z "$object" ]; then
  exec "$@"
fi
said=$object.ptxas.new
"$@" 2>"$said"
status=$?
# Anything but the report is for whoever builds.
grep -v -e '^ptxas info' -e 'bytes stack frame' -e '^$' "$said" >&2
if [ $status -eq 0 ]; then
  mv "$said" "$object.ptxas"
else
  rm -f "$said"
fi
exit $status
