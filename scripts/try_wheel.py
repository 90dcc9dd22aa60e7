#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs a wheel into an environment of its own, outside the checkout, and uses all that it brings.

    try_wheel.py WHEEL

It prints a line for each thing that works, and the first one that does not is an error; so is a version whose label, +cpu
or +cu130, is not true. Nothing is downloaded: what the wheel depends on comes from build/venv/wheels, torch and transformers
from build/venv (scripts/venv.sh).
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import venv

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT_VENV = ROOT / "build/venv"
MOST_MEGABYTES = 100  # that the Python Package Index takes


def run(*command, cwd, env=None, expect="", timeout=600):
    """Runs a command, expects exit status 0 and a pattern in what it prints, and returns that."""
    words = [*map(str, command)]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    output = done.stdout + done.stderr
    if done.returncode != 0 or not re.search(expect, output):
        wanted = f" and '{expect}'" if expect else ""
        sys.exit(f"{' '.join(words)}\nexpected exit status 0{wanted}, got {done.returncode} and\n{output}")
    return done.stdout


def readme_example():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.search(r"<!-- python example:[^\n]*-->\n```python\n(.*?)```", text, re.DOTALL).group(1)


def version_of_sources():
    return re.search(r"project\(libmla VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)


def check_file(wheel):
    """Returns the version that the file's name has."""
    found = re.fullmatch(r"libmla-([0-9.]+\+(cpu|cu\d+))-py3-none-manylinux_\d+_\d+_x86_64\.whl", wheel.name)
    assert found and found[1] == f"{version_of_sources()}+{found[2]}", wheel.name
    megabytes = wheel.stat().st_size / 1e6
    assert megabytes < MOST_MEGABYTES, f"{wheel.name}: expected at most {MOST_MEGABYTES} MB, got {megabytes:.0f}"
    print(f"{wheel.name}: {megabytes:.1f} MB")
    return found[1]


def install(wheel, folder):
    """Returns the Python of a new environment with the wheel, its dependency and numpy."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin/python"
    sources = ("--no-index", "--find-links", PROJECT_VENV / "wheels")
    pip = (PROJECT_VENV / "bin/python", "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", *sources, wheel, "numpy", cwd=folder)
    return python


def check_commands(python, bare, cwd, version):
    """Tries the command line where neither compilers nor modules of other environments are in sight."""
    mla = python.parent / "libmla"
    info = json.loads(run(mla, "info", "--json", cwd=cwd, env=bare))
    code = info["cuda"]["archs"]
    tell = "print(libmla.__version__, importlib.metadata.version('libmla'), libmla.info().cuda_runtime)"
    *versions, cuda = run(python, "-c", f"import importlib.metadata, libmla; {tell}", cwd=cwd, env=bare).split()
    versions += [info["version"], run(mla, "--version", cwd=cwd, env=bare).strip()]
    assert set(versions) == {version}, versions
    built_with = f"cu{int(cuda) // 1000}{int(cuda) % 1000 // 10}" if code else "cpu"
    assert version.endswith(f"+{built_with}"), (version, built_with)
    print(f"libmla info: version {version}, kernels for {', '.join(code) or 'CPUs'}")
    run(mla, "check", "--quick", "--op", "decode", cwd=cwd, env=bare)
    print("libmla check --quick --op decode: nothing failed")
    trace = "data/mooncake_conversation_sample.jsonl"
    run(mla, "replay", trace, "--requests", 1, "--time-budget", 20, "--as-fast-as-possible", cwd=cwd, env=bare)
    print(f"libmla replay {trace}: served a request")
    run(mla, "bench", "bench/decode.yaml", "--list", cwd=cwd, env=bare)
    print("libmla bench bench/decode.yaml: found")


def check_torch(python, bare, cwd):
    """Runs the example of README, and a model, with torch and transformers of the project's own environment."""
    (site,) = (PROJECT_VENV / "lib").glob("python3*/site-packages")
    with_torch = {**bare, "PYTHONPATH": str(site)}
    run(python, "-c", readme_example(), cwd=cwd, env=with_torch, expect=r"torch\.Size\(\[1, 16, 512\]\)")
    print("Python: the example of README runs")
    model = ("--model", "examples/tiny-mla", "--bytes", 2048, "--formats", "bf16,fp8_ds_mla", "--backends", "cpu_avx2")
    run(python, "-m", "libmla", "eval", *model, "--limit", 100, cwd=cwd, env=with_torch, expect="fp8_ds_mla")
    print("libmla eval --model examples/tiny-mla: measured")


def check_development(python, bare, cwd):
    """Builds the examples in C++ and C against the installed wheel, and runs them."""
    package = pathlib.Path(run(python, "-c", "import libmla; print(libmla.__path__[0])", cwd=cwd, env=bare).strip())
    for example, expect in (("find_package", r"o = 0\.500, lse = 7\.203"), ("c", "equal to attention in double")):
        build = cwd / example
        where = f"-Dlibmla_DIR={package / 'lib/cmake/libmla'}"
        run("cmake", "-G", "Ninja", "-S", ROOT / "examples" / example, "-B", build, where, cwd=cwd)
        run("cmake", "--build", build, cwd=cwd)
        run(build / "decode", cwd=cwd, env=bare, expect=expect)
        print(f"CMake: examples/{example} is built with the wheel's libmla, and right")
    source = ROOT / "examples/find_package/decode.cpp"
    paths = dict(os.environ, PKG_CONFIG_PATH=str(package / "lib/pkgconfig"))
    flags = run("pkg-config", "--cflags", "--libs", "libmla", cwd=cwd, env=paths).split()
    run("c++", "-std=c++20", source, "-o", cwd / "decode", *flags, cwd=cwd)
    run(cwd / "decode", cwd=cwd, env={**bare, "LD_LIBRARY_PATH": str(package / "lib")}, expect=r"o = 0\.500")
    print("pkg-config: so it is without CMake")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=pathlib.Path)
    wheel = parser.parse_args().wheel.resolve()
    version = check_file(wheel)
    with tempfile.TemporaryDirectory() as folder:
        outside = pathlib.Path(folder)
        python = install(wheel, outside / "environment")
        bare = {"PATH": str(python.parent), "HOME": folder}
        check_commands(python, bare, outside, version)
        check_torch(python, bare, outside)
        check_development(python, bare, outside)
    print(f"{wheel.name}: works")


if __name__ == "__main__":
    main()
