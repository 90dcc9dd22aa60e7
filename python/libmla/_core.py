# SPDX-License-Identifier: Apache-2.0
"""Loads the C++ library behind the package when it is first needed: apache-tvm-ffi imports torch where torch is
installed, which takes seconds that the command line need not wait for."""

from __future__ import annotations

import functools
import itertools
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .types import UnsupportedError


def _library() -> Path:
    """Returns the path of the library that LIBMLA_LIBRARY names, else of the one that the wheel brought."""
    named = os.environ.get("LIBMLA_LIBRARY")
    return Path(named) if named else Path(__file__).parent / "_lib" / "libmla_python.so"


@functools.cache
def _loaded() -> Any:
    """Loads the library and registers its functions. It is kept for ever: unloading it would take them away."""
    import tvm_ffi

    tvm_ffi.register_error("libmla.UnsupportedError", UnsupportedError)
    return tvm_ffi.load_module(str(_library()))


def function(name: str) -> Callable[..., Any]:
    """Returns the library's function of that name. The interpreter lock is released while it runs."""
    _loaded()
    from tvm_ffi import get_global_func

    found = get_global_func("libmla." + name)
    found.release_gil = True
    return found


def data(name: str, *arguments: Any) -> Any:
    """Calls a function of the library that answers in JSON, and returns the parsed answer."""
    return json.loads(function(name)(*arguments))


_numbers = itertools.count(1)
_numbered: dict[int, weakref.ref[Any]] = {}
_NUMBERS_BETWEEN_SWEEPS = 1024


def number(thing: object) -> int:
    """Returns a new number, by which torch's graphs name a Plan, a Context or a FlashMLASchedMeta while it lives."""
    chosen = next(_numbers)
    # A WeakValueDictionary does the same but takes 0.6 us longer (Zen 4, 2026-11-30), which a call may take for each.
    _numbered[chosen] = weakref.ref(thing)
    if chosen % _NUMBERS_BETWEEN_SWEEPS == 0:
        for old in [old for old, reference in list(_numbered.items()) if reference() is None]:
            _numbered.pop(old, None)
    return chosen


def numbered(chosen: int) -> Any:
    """Returns what has that number, or None if it lives no more."""
    reference = _numbered.get(chosen)
    return None if reference is None else reference()


def version() -> str:
    """Returns the library's version."""
    return str(function("version")())
