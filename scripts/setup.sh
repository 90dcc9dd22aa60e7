#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages that the named groups need and this machine lacks: scripts/setup.sh GROUP...
# Groups: build (if none is named), test, lint, coverage, wheels, docs, aarch64.
set -eu

build='g++ cmake ninja-build libfmt-dev libcli11-dev nlohmann-json3-dev libyaml-cpp-dev libdnnl-dev libhwy-dev libboost-context-dev'
test='git libgtest-dev libgmock-dev libdlpack-dev clang-14 libclang-rt-14-dev python3 python3-venv chromium libopenmpi-dev openmpi-bin'
lint='clang-format-14 clang-tidy-14'
coverage='gcovr'
wheels='git pkgconf python3 python3-venv'
docs='doxygen python3 python3-venv'
aarch64='g++-aarch64-linux-gnu qemu-user googletest git python3'

wanted=
for group in "${@:-build}"; do
  case $group in
    build) wanted="$wanted $build" ;;
    test) wanted="$wanted $build $test" ;;
    lint) wanted="$wanted $build $test $lint" ;;
    coverage) wanted="$wanted $build $test $coverage" ;;
    wheels) wanted="$wanted $build $wheels" ;;
    docs) wanted="$wanted $docs" ;;
    aarch64) wanted="$wanted $build $aarch64" ;;
    *) echo "setup.sh: expected build, test, lint, coverage, wheels, docs or aarch64, got '$group'" >&2; exit 2 ;;
  esac
done

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "setup.sh: this is not a Debian machine; install the equivalents of:$wanted" >&2
  exit 1
fi

missing=
for package in $wanted; do
  case " $missing " in *" $package "*) continue ;; esac
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || status=absent
  [ "$status" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

as_root=
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "setup.sh: not root and no sudo here; have an administrator run: apt-get install$missing" >&2
    exit 1
  fi
  as_root=sudo
fi

echo "setup.sh: installing$missing" >&2
install() {
  # shellcheck disable=SC2086 # the lists are meant to be split
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" $missing
}
# Fresh images come without package lists and old lists name packages that are gone: refresh them if need be.
if ! install --download-only >/dev/null 2>&1; then
  $as_root apt-get update
fi
install
