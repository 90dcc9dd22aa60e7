#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the project's own Python environment, or brings it up to date with python/requirements.txt: scripts/venv.sh FOLDER
# FOLDER/wheels holds what a fresh environment needs to use the package, so that a test can make one.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$1
requirements=$root/python/requirements.txt

if cmp -s "$requirements" "$folder/requirements.txt"; then
  exit 0
fi
python3 -m venv --clear "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }
# Bytecode of all modules would take as long to write as the rest takes; Python writes that of what is imported.
pip install --quiet --no-compile --requirement "$requirements"
# shellcheck disable=SC2046 # one word each
pip download --quiet --dest "$folder/wheels" $(grep -E '^(apache-tvm-ffi|numpy)==' "$requirements")
cp "$requirements" "$folder/requirements.txt"
