#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tries the plug-ins against the real packages of the engines: scripts/engines.sh [ENGINE==VERSION]...
# Without arguments: all supported releases. Every release has an environment of its own, build/engines/ENGINE-VERSION,
# made once (python/engine_tests/environment.py). The library is LIBMLA_LIBRARY, or that of build/default. Exits with 1 if
# anything failed.
set -u
cd "$(dirname "$0")/.." || exit 2
root=$(pwd)
folder=$root/build/engines
python=$root/build/venv/bin/python
[ $# -gt 0 ] || set -- vllm==0.33.0 vllm==0.32.0 sglang==0.5.23 sglang==0.5.22

LIBMLA_LIBRARY=${LIBMLA_LIBRARY:-$root/build/default/python/libmla/_lib/libmla_python.so}
LIBMLA_TOOL=${LIBMLA_TOOL:-$root/build/default/bin/mla}
PYTHONDONTWRITEBYTECODE=1
export LIBMLA_LIBRARY LIBMLA_TOOL PYTHONDONTWRITEBYTECODE
for needed in "$LIBMLA_LIBRARY" "$python"; do
  [ -e "$needed" ] || { echo "engines.sh: there is no $needed: run make test-engines" >&2; exit 2; }
done
mkdir -p "$folder/wheels"

summary=
status=0
note() { # RELEASE WHAT RESULT
  summary="$summary$(printf '%-16s %-14s %s' "$1" "$2" "$3")
"
}

# Runs pytest in the environment of a release, on the rest of the arguments.
try() { # RELEASE ENVIRONMENT WHAT FILES...
  release=$1 environment=$2 what=$3
  shift 3
  log=$environment/$what.log
  echo "== $release: $what"
  if "$environment/bin/python" -m pytest --verbose "$@" >"$log" 2>&1 && grep -q ' passed' "$log"; then
    result=ok
  else
    result=FAILED
    status=1
    grep -m 1 -A 9 'Fatal Python error' "$log"  # a crash, with the test; its trace fills the rest
    tail -n 40 "$log"
  fi
  result="$result: $(grep -E '(passed|failed|error|ran).* in [0-9.]+s' "$log" | tail -n 1), $log"
  note "$release" "$what" "$result"
}

for release; do
  engine=${release%%==*}
  environment=$folder/$engine-${release#*==}
  if ! [ -d "python/engine_tests/$engine" ]; then
    echo "engines.sh: expected vllm==VERSION or sglang==VERSION, got '$release'" >&2
    exit 2
  fi
  if ! "$python" python/engine_tests/environment.py "$environment" "$release"; then
    note "$release" environment FAILED
    status=1
    continue
  fi
  try "$release" "$environment" plug-in "python/engine_tests/$engine" python/engine_tests/test_*.py
  # The transformers that the engine wants is older than ours.
  try "$release" "$environment" transformers python/tests/test_transformers*.py
done

printf '\n%s' "$summary"
exit $status
