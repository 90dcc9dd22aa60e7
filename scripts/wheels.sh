#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes a wheel that others can install, and tries it: scripts/wheels.sh cpu, or cuda13 for the kernels of all GPUs
# (MLA_CUDA_ARCHS="90" in the environment: of these). It ends up in build/wheels/cpu or build/wheels/cuda13.
set -eu
cd "$(dirname "$0")/.."
kind=$1
folder=build/wheels/$kind
case $kind in
  cpu) options='-C cmake.define.MLA_CUDA=OFF' ;;
  # The size that is downloaded matters more than the milliseconds that it takes to unpack a kernel.
  cuda13) options='-C cmake.define.MLA_CUDA=ON -C cmake.define.CMAKE_CUDA_FLAGS=--compress-mode=size' ;;
  *) echo "wheels.sh: expected cpu or cuda13, got '$kind'" >&2; exit 2 ;;
esac
if [ "$kind" = cuda13 ] && [ -n "${MLA_CUDA_ARCHS:-}" ]; then
  options="$options -C cmake.define.MLA_CUDA_ARCHS=$MLA_CUDA_ARCHS"
fi

tools=build/wheels/venv
if ! cmp -s python/wheel-requirements.txt $tools/requirements.txt; then
  python3 -m venv --clear $tools
  $tools/bin/python -m pip install --quiet --disable-pip-version-check --requirement python/wheel-requirements.txt
  cp python/wheel-requirements.txt $tools/requirements.txt
fi

rm -rf "$folder/plain" "$folder"/*.whl
# shellcheck disable=SC2086 # one word each
build/venv/bin/python -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir "$folder/plain" \
  -C build-dir="build/wheel-$kind" $options .

# libtvm_ffi.so comes with the package that the wheel depends on. The others are in it (python/bundle.cmake), and found by the
# path of the program, which auditwheel does not follow for libraries of libraries.
PATH=$PWD/$tools/bin:$PATH $tools/bin/auditwheel repair --exclude libtvm_ffi.so --exclude libgomp.so.1 --exclude libOpenCL.so.1 \
  --wheel-dir "$folder" "$folder"/plain/*.whl
rm -r "$folder/plain"
$tools/bin/auditwheel show "$folder"/*.whl
scripts/try_wheel.py "$folder"/*.whl --kind "$kind"
