#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Style, lint, layering and links of everything: scripts/lint.sh BUILD_FOLDER (configured; nothing need be built).
set -eu
cd "$(dirname "$0")/.."
build=$1
status=0

echo '== layering'
scripts/check_layering.py || status=1

echo '== docs'
scripts/check_docs.py || status=1

echo '== clang-format'
sources=$(find include src tools tests examples python -name '*.h' -o -name '*.cpp' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh' | sort)
# shellcheck disable=SC2086 # the project's paths have no spaces
clang-format-14 --dry-run --Werror $sources || status=1

echo '== clang-tidy'
# The files that the host's compiler compiles, kernels for the emulator among them: fuzzers and example have builds of
# their own.
sed -n 's/^ *"file": "\(.*\)",*$/\1/p' "$build/compile_commands.json" | grep -v '\.cu$' | sort -u |
  xargs -P "$(nproc)" -n 1 clang-tidy-14 -p "$build" --quiet 2>/dev/null || status=1

echo '== ruff'
build/venv/bin/ruff check python bench scripts examples || status=1

exit $status
