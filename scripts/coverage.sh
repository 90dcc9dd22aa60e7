#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the tests of a coverage build and holds each part of the library to its share of lines: scripts/coverage.sh BUILD_FOLDER
set -eu
cd "$(dirname "$0")/.."
build=$1
least=90

find "$build" -name '*.gcda' -delete
ctest --test-dir "$build" --output-on-failure --parallel 2 --label-exclude nested
gcovr --root . --object-directory "$build" --filter 'src/' --exclude-throw-branches --json "$build/coverage.json"

status=0
for part in core plan dispatch cpu; do
  echo "== src/$part"
  gcovr --root . --add-tracefile "$build/coverage.json" --filter "src/$part/" --fail-under-line $least || status=1
done
exit $status
