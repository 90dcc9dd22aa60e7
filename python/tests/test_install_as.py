# SPDX-License-Identifier: Apache-2.0
"""Tests libmla.install_as and `python -m libmla.run_as`: the drop-ins under the peers' names."""

import subprocess
import sys
from types import ModuleType

import pytest

import libmla
from libmla import run_as

pytest.importorskip("torch")


def run(*arguments, cwd=None):
    """Runs a process of its own, whose modules the test may change."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)


def python(program):
    done = run("-c", program)
    assert done.returncode == 0, done.stderr


def test_flash_mla():
    python("""
import importlib.util, libmla, sys
assert "flash_mla" not in sys.modules and "flashinfer" not in sys.modules
package = libmla.install_as("flash_mla")
import flash_mla
import flash_mla.flash_mla_interface as interface
from flash_mla import get_mla_metadata
from flash_mla.flash_mla_interface import FlashMLASchedMeta
assert flash_mla is package is libmla.flash_mla
assert interface is libmla.flash_mla.flash_mla_interface
assert isinstance(get_mla_metadata()[0], FlashMLASchedMeta)
assert importlib.util.find_spec("flash_mla") is not None
assert libmla.install_as("flash_mla") is package
""")


def test_flashinfer():
    python("""
import libmla, sys
package = libmla.install_as("flashinfer")
import flashinfer
import flashinfer.mla
from flashinfer.cascade import merge_state
from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla
import libmla.flashinfer.cascade
assert flashinfer is package is libmla.flashinfer
assert flashinfer.mla is libmla.flashinfer.mla
assert merge_state is libmla.flashinfer.cascade.merge_state
own = {n.removeprefix("libmla."): m for n, m in sys.modules.items() if n.startswith("libmla.flashinfer")}
assert len(own) > 5 and all(sys.modules[n] is m for n, m in own.items())
assert "flash_mla" not in sys.modules
""")


def test_an_unknown_peer_is_refused():
    with pytest.raises(ValueError, match="name: expected one of flash_mla, flashinfer, deep_gemm, got 'flash_attn'"):
        libmla.install_as("flash_attn")


def test_a_peer_that_is_imported_already_is_refused(monkeypatch):
    peer = ModuleType("flash_mla")
    peer.__file__ = "/somewhere/flash_mla/__init__.py"
    monkeypatch.setitem(sys.modules, "flash_mla", peer)
    with pytest.raises(RuntimeError, match="flash_mla has already been imported from /somewhere/flash_mla/"):
        libmla.install_as("flash_mla")
    assert sys.modules["flash_mla"] is peer
    assert "flash_mla.flash_mla_interface" not in sys.modules


PROGRAM = """
import sys, flash_mla, helper
print(__name__, flash_mla.__name__, helper.NAME, sys.argv[1:])
"""


@pytest.fixture
def programs(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("NAME = 'beside'\n")
    return tmp_path


def test_run_as_runs_a_program(programs):
    done = run("-m", "libmla.run_as", "flash_mla", str(programs / "program.py"), "--rows", "3")
    assert done.stdout == "__main__ libmla.flash_mla beside ['--rows', '3']\n", done.stderr
    assert done.stderr == ""


def test_run_as_runs_a_module(programs):
    done = run("-m", "libmla.run_as", "flash_mla,flashinfer", "-m", "program", "x", cwd=programs)
    assert done.stdout == "__main__ libmla.flash_mla beside ['x']\n", done.stderr


@pytest.mark.parametrize("arguments", [[], ["flash_mla"], ["flash_mla", "-m"]])
def test_run_as_without_a_program(arguments):
    with pytest.raises(SystemExit, match="usage: python -m libmla.run_as NAME"):
        run_as.main(arguments)
