# SPDX-License-Identifier: Apache-2.0
"""Tests the wheel, made of what the build has compiled, in an environment with nothing but its dependency and numpy."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import libmla

ROOT = Path(__file__).parents[2]
BUILD = os.environ.get("MLA_BUILD", "")
WHEELS = Path(sys.prefix) / "wheels"  # of the dependencies, see scripts/venv.sh

pytestmark = pytest.mark.skipif(not BUILD, reason="MLA_BUILD names no build")

USE = """
import sys
import numpy as np, libmla
assert "torch" not in sys.modules
rng = np.random.default_rng(0)
q, kv = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 4, 576), (4, 16, 576)))
kv_len, block_table = np.array([3, 20], np.int32), np.array([[3, 0], [1, 2]], np.int32)
o, lse = libmla.decode(q, kv, kv_len=kv_len, block_table=block_table, sm_scale=0.07, return_lse=True)
assert type(o) is np.ndarray and o.dtype == np.float16
for b in range(2):
    keys = kv[block_table[b]].reshape(-1, 576)[: kv_len[b]].astype(np.float64)
    scores = q[b].astype(np.float64) @ keys.T * 0.07
    weights = np.exp(scores)
    assert abs(lse[b] - np.log(weights.sum(-1))).max() < 1e-3
    assert abs(o[b] - weights @ keys[:, :512] / weights.sum(-1, keepdims=True)).max() < 5e-3
print(libmla.__version__, libmla.__file__)
"""


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)), env=env, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    settings = {
        "cmake.source-dir": "python/prebuilt",
        "cmake.define.MLA_BUILD": BUILD,
        "build-dir": str(folder / "build"),
    }
    # Straight from the backend: a front end would only ask it the same.
    code = f"from scikit_build_core.build import build_wheel; print(build_wheel({str(folder)!r}, {settings!r}))"
    run(sys.executable, "-c", code, cwd=ROOT)
    (made,) = folder.glob("*.whl")
    return made


def test_what_is_in_it(wheel: Path) -> None:
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
        tag = archive.read(next(name for name in names if name.endswith("/WHEEL"))).decode()
    assert {"libmla/_lib/libmla_python.so", "libmla/bin/mla", "libmla/py.typed", "libmla/ops.py"} <= set(names)
    inputs = ("bench/decode.yaml", "data/mooncake_conversation_sample.jsonl", "examples/tiny-mla/model.safetensors")
    assert {f"libmla/share/libmla/{name}" for name in inputs} <= set(names)
    assert all(name.startswith(("libmla/", "libmla-")) for name in names)
    assert not [name for name in names if "__pycache__" in name]
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert len(needed) == 1 and "apache-tvm-ffi" in needed[0]
    assert "Root-Is-Purelib: false" in tag
    for group, module in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        assert f"[{group}]\nlibmla = libmla.integrations.{module}:register\n" in entry_points + "\n"


@pytest.mark.parametrize("label", ["", "cpu", "cu129", "cu130"])
def test_labels_of_versions(label: str, tmp_path: Path) -> None:
    """A label in the environment is a part of the version; tests/package/version.cmake has what the library makes of it."""
    code = (
        "import sys; from scikit_build_core.build import prepare_metadata_for_build_wheel as p; print(p(sys.argv[1]))"
    )
    environment = {**os.environ, "LIBMLA_VERSION_LABEL": label}
    made = run(sys.executable, "-c", code, tmp_path, cwd=ROOT, env=environment).split()[-1]
    assert made == f"libmla-{libmla.__version__}{'+' if label else ''}{label}.dist-info"
    metadata = (tmp_path / made / "METADATA").read_text()
    assert f"\nVersion: {libmla.__version__}{'+' if label else ''}{label}\n" in metadata


def test_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "fresh", with_pip=False, symlinks=True)
    python = tmp_path / "fresh" / "bin" / "python"
    sources = ["--no-index", "--find-links", WHEELS] if WHEELS.is_dir() else []
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--no-compile", *sources, wheel, "numpy")
    # Nothing of this process's: no path to a compiler, no module from elsewhere, no library by its name.
    bare = {"PATH": str(python.parent), "HOME": str(tmp_path)}
    assert "torch" not in run(sys.executable, "-m", "pip", "--python", python, "list")
    version, where = run(python, "-c", USE, env=bare, cwd=tmp_path).split()
    assert where.startswith(str(tmp_path))
    assert f"libmla {version}" in run(python.parent / "libmla", "info", env=bare, cwd=tmp_path)
    assert run(python.parent / "mla", "-V", env=bare, cwd=tmp_path) == version + "\n"
    rows = run(python, "-m", "libmla", "explain", "--op", "decode", env=bare, cwd=tmp_path)
    assert "selected: cpu" in rows
    # Inputs that came with the package have the names that they have in the sources.
    assert "decode" in run(python.parent / "libmla", "bench", "bench/decode.yaml", "--list", env=bare, cwd=tmp_path)


def test_libraries_that_it_brings(wheel: Path, tmp_path: Path) -> None:
    """Whatever the program needs beyond the C and C++ runtimes lies beside it, and is found there."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(("libmla/bin/", "libmla/_lib/")):
                archive.extract(name, tmp_path)
    program = tmp_path / "libmla" / "bin" / "mla"
    program.chmod(0o755)
    found = run("ldd", program)
    assert "not found" not in found
    runtime = ("linux-vdso", "libc.so", "libm.so", "libdl.so", "librt.so", "libpthread.so", "libgcc_s", "libstdc++")
    for line in found.splitlines():
        name, _, place = line.strip().partition(" => ")
        if place and not name.startswith(runtime):
            assert str(tmp_path) in str(Path(place.split(" (")[0]).resolve()), line
