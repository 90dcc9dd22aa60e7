#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes a wheel that others can install, and tries it: scripts/wheels.sh cpu, or cu130 for the kernels of all GPUs
# (MLA_CUDA_ARCHS="90" in the environment: of these) by nvcc 13.0. Its version has that label (pyproject.toml):
# build/wheels/libmla-0.2.0+cpu-py3-none-manylinux_2_35_x86_64.whl.
set -eu
cd "$(dirname "$0")/.."
label=$1
folder=build/wheels
case $label in
  cpu) options='-C cmake.define.MLA_CUDA=OFF' ;;
  # The size that is downloaded matters more than the milliseconds that it takes to unpack a kernel.
  cu130) options='-C cmake.define.MLA_CUDA=ON -C cmake.define.CMAKE_CUDA_FLAGS=--compress-mode=size' ;;
  *) echo "wheels.sh: expected cpu or cu130, got '$label'" >&2; exit 2 ;;
esac
if [ "$label" = cu130 ] && [ -n "${MLA_CUDA_ARCHS:-}" ]; then
  options="$options -C cmake.define.MLA_CUDA_ARCHS=$MLA_CUDA_ARCHS"
fi

tools=build/wheels/venv
if ! cmp -s python/wheel-requirements.txt $tools/requirements.txt; then
  python3 -m venv --clear $tools
  $tools/bin/python -m pip install --quiet --disable-pip-version-check --requirement python/wheel-requirements.txt
  cp python/wheel-requirements.txt $tools/requirements.txt
fi

rm -rf "$folder/plain" "$folder"/libmla-*+"$label"-*.whl
# shellcheck disable=SC2086 # one word each
LIBMLA_VERSION_LABEL=$label build/venv/bin/python -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps \
  --wheel-dir "$folder/plain" -C build-dir="build/wheel-$label" $options .

# libtvm_ffi.so comes with the package that the wheel depends on. The others are in it (python/bundle.cmake), and found by the
# path of the program, which auditwheel does not follow for libraries of libraries.
PATH=$PWD/$tools/bin:$PATH $tools/bin/auditwheel repair --exclude libtvm_ffi.so --exclude libgomp.so.1 --exclude libOpenCL.so.1 \
  --wheel-dir "$folder" "$folder"/plain/*.whl
rm -r "$folder/plain"
$tools/bin/auditwheel show "$folder"/libmla-*+"$label"-*.whl
scripts/try_wheel.py "$folder"/libmla-*+"$label"-*.whl
