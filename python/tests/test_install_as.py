# SPDX-License-Identifier: Apache-2.0
"""Tests libmla.install_as and `python -m libmla.run_as`: the drop-ins under the peers' names."""

import shutil
import sys
from types import ModuleType

import pytest

import libmla
from libmla import run_as
from processes import python_path, python_with_torch

pytest.importorskip("torch")


def run(*arguments, cwd=None, path=None):
    """Runs a process of its own, whose modules the test may change; packages in the folder ``path`` are installed."""
    installed = {} if path is None else {"PYTHONPATH": python_path(path)}
    return python_with_torch(*arguments, cwd=cwd, **installed)


def python(program, path=None):
    done = run("-c", program, path=path)
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


PEER = {
    "__init__": """
from .cascade import merge_state
from .activation import silu_and_mul
from . import mla
__version__ = "0.0.1"
""",
    "cascade": """
from .utils import LOADED
def merge_state(): return "the peer's merge_state"
def merge_tree(): return "the peer's merge_tree, " + merge_state()
_private = "the peer's"
""",
    "activation": """
def silu_and_mul(): return "the peer's silu_and_mul"
""",
    "utils": "LOADED = []",
    "mla/__init__": """
from flashinfer.utils import LOADED
from ._core import MODULE
MLAPlanMetadata = "the peer's"
def later():
    from ..cascade import merge_tree
    from .extra import late
    return merge_tree() + ", " + late()
""",
    "mla/_core": "MODULE = __name__",
    "mla/extra": """
from . import _core, MLAPlanMetadata
def late(): return "the peer's late, " + _core.MODULE
""",
    "comm/__init__": """
from flashinfer.utils import LOADED
LOADED.append("comm")
""",
}


@pytest.fixture
def peer(tmp_path):
    """A folder with a package flashinfer: some names are libmla's too, some are not."""
    for name, text in PEER.items():
        file = tmp_path / "flashinfer" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_fallback_takes_other_names_from_the_peer(peer):
    python(
        """
import importlib.util, libmla, libmla.flashinfer
before = dict(vars(libmla.flashinfer.cascade))
package = libmla.install_as("flashinfer", fallback=True)
assert libmla.install_as("flashinfer", fallback=True) is package
import flashinfer
import flashinfer.cascade as cascade
from flashinfer import merge_state, silu_and_mul
from flashinfer.cascade import merge_states, merge_tree
from flashinfer.activation import silu_and_mul as again
assert flashinfer is package and flashinfer.cascade is cascade
# Of names that both have, libmla's.
assert merge_state is cascade.merge_state is libmla.flashinfer.cascade.merge_state
assert merge_states is libmla.flashinfer.cascade.merge_states
assert flashinfer.BatchMLAPagedAttentionWrapper is libmla.flashinfer.BatchMLAPagedAttentionWrapper
assert flashinfer.mla.MLAPlanMetadata is libmla.flashinfer.mla.MLAPlanMetadata
assert flashinfer.page.get_seq_lens is libmla.flashinfer.page.get_seq_lens  # a module that the peer does not have
assert flashinfer.__version__ == libmla.flashinfer.__version__
# Of others, the peer's, whose own calls stay its own.
assert silu_and_mul is again and silu_and_mul() == "the peer's silu_and_mul"
assert merge_tree() == "the peer's merge_tree, the peer's merge_state"
assert cascade._private == "the peer's"
assert flashinfer.utils.LOADED == []
import flashinfer.comm
from flashinfer.mla import extra
assert flashinfer.utils.LOADED == ["comm"]
assert flashinfer.mla.later() == "the peer's merge_tree, the peer's merge_state, the peer's late, flashinfer.mla._core"
assert importlib.util.find_spec("flashinfer") and importlib.util.find_spec("flashinfer.comm")
assert importlib.util.find_spec("flashinfer.nothing") is None
assert {"merge_state", "silu_and_mul"} <= set(dir(flashinfer)) and {"merge_tree", "merge_states"} <= set(dir(cascade))
names = {}
exec("from flashinfer.cascade import *", names)
assert names["merge_tree"] is merge_tree and names["merge_state"] is merge_state
# The package that libmla brings is as it was.
assert not hasattr(libmla.flashinfer, "silu_and_mul") and dict(vars(libmla.flashinfer.cascade)) == before
""",
        peer,
    )


def test_fallback_names_what_neither_has(peer):
    python(
        """
import libmla
libmla.install_as("flashinfer", fallback=True)
import flashinfer.page
assert not hasattr(flashinfer, "nothing") and not hasattr(flashinfer.page, "nothing")
for statement, message in (
    ("flashinfer.nothing", "module 'flashinfer' has no attribute 'nothing'"),
    ("from flashinfer import nothing", "cannot import name 'nothing' from 'flashinfer'"),
    ("import flashinfer.nothing", "No module named 'flashinfer.nothing'"),
    ("from flashinfer.page import nothing",
     "flashinfer.page.nothing: libmla has none, and the installed flashinfer has no module flashinfer.page"),
):
    try:
        exec(statement)
    except (AttributeError, ImportError) as error:
        assert message in str(error), error
    else:
        raise AssertionError(statement)
""",
        peer,
    )


@pytest.mark.parametrize(
    ("peer_text", "reason"),
    [
        (None, "no flashinfer (flashinfer-python) is installed that it could come from"),
        (
            "from . import utils; raise RuntimeError('no driver')",
            "the installed flashinfer could not be imported: RuntimeError('no driver')",
        ),
        (
            "import a_package_that_it_needs",
            "the installed flashinfer could not be imported: ModuleNotFoundError",
        ),
    ],
)
def test_fallback_without_a_peer_names_what_lacks(peer, peer_text, reason):
    if peer_text is None:
        shutil.rmtree(peer / "flashinfer")
    else:
        (peer / "flashinfer" / "__init__.py").write_text(peer_text)
    python(
        f"""
import importlib.util, libmla, sys
libmla.install_as("flashinfer", fallback=True)
import flashinfer, flashinfer.cascade
from flashinfer import merge_state
assert merge_state is libmla.flashinfer.merge_state
assert "flashinfer.utils" not in sys.modules
assert not hasattr(flashinfer, "silu_and_mul")
assert importlib.util.find_spec("flashinfer.comm") is None
for statement, name in (
    ("flashinfer.silu_and_mul", "flashinfer.silu_and_mul"),
    ("from flashinfer import silu_and_mul", "flashinfer.silu_and_mul"),
    ("flashinfer.cascade.merge_tree", "flashinfer.cascade.merge_tree"),
    ("from flashinfer.cascade import merge_tree", "flashinfer.cascade.merge_tree"),
):
    try:
        exec(statement)
    except (AttributeError, ImportError) as error:
        assert str(error).startswith(name + ": libmla has none, and " + {reason!r}), error
    else:
        raise AssertionError(statement)
try:
    import flashinfer.comm
except ModuleNotFoundError as error:
    assert str(error) == "No module named 'flashinfer.comm'"
names = {{}}
exec("from flashinfer.cascade import *", names)
assert "merge_state" in names and "merge_tree" not in names
""",
        peer,
    )


@pytest.mark.parametrize("name", ["flash_mla", "deep_gemm"])
def test_fallback_of_the_other_peers(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("def more(): return __name__\nfrom .utils import bench\n")
    (tmp_path / name / "utils.py").write_text("def bench(): return __name__\n")
    python(
        f"""
import libmla
libmla.install_as("{name}", fallback=True)
import {name}
from {name}.utils import bench
own = libmla.{name}
assert {name}.more() == "{name}" and bench() == "{name}.utils"
assert all(getattr({name}, public) is getattr(own, public) for public in own.__all__ if callable(getattr(own, public)))
""",
        tmp_path,
    )


def test_fallback_is_asked_for_once():
    python("""
import libmla
for name, fallback in (("flash_mla", False), ("flashinfer", True)):
    package = libmla.install_as(name, fallback=fallback)
    try:
        libmla.install_as(name, fallback=not fallback)
    except RuntimeError as error:
        assert str(error) == f"{name} has already been installed with fallback={fallback}: ask for it once"
    else:
        raise AssertionError(name)
    assert libmla.install_as(name, fallback=fallback) is package
""")


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


def test_run_as_with_fallback(programs, peer):
    (programs / "program.py").write_text("import flashinfer; print(flashinfer.silu_and_mul(), flashinfer.merge_state)")
    done = run("-m", "libmla.run_as", "--fallback", "flashinfer", str(programs / "program.py"), path=peer)
    assert done.stdout.startswith("the peer's silu_and_mul <function merge_state at"), done.stderr


@pytest.mark.parametrize("arguments", [[], ["flash_mla"], ["flash_mla", "-m"], ["--fallback", "flash_mla"]])
def test_run_as_without_a_program(arguments):
    with pytest.raises(SystemExit, match=r"usage: python -m libmla.run_as \[--fallback\] NAME"):
        run_as.main(arguments)
