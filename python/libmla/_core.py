# SPDX-License-Identifier: Apache-2.0
"""The C++ library behind the package, loaded when it is first needed: apache-tvm-ffi imports torch where torch is, which
takes seconds that the command line need not wait for."""

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
    """The one that the wheel brought, or the one that LIBMLA_LIBRARY names."""
    named = os.environ.get("LIBMLA_LIBRARY")
    return Path(named) if named else Path(__file__).parent / "_lib" / "libmla_python.so"


@functools.cache
def _loaded() -> Any:
    """Registers the functions of the library. Kept for ever: unloading it would take them away."""
    import tvm_ffi

    tvm_ffi.register_error("libmla.UnsupportedError", UnsupportedError)
    return tvm_ffi.load_module(str(_library()))


def function(name: str) -> Callable[..., Any]:
    """The library's function of that name. The interpreter lock is released while it runs."""
    _loaded()
    from tvm_ffi import get_global_func

    found = get_global_func("libmla." + name)
    found.release_gil = True
    return found


def data(name: str, *arguments: Any) -> Any:
    """What a function that answers in JSON says."""
    return json.loads(function(name)(*arguments))


_numbers = itertools.count(1)
numbered: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()


def number(thing: object) -> int:
    """A number by which torch's graphs name a Plan or a Context while it lives."""
    chosen = next(_numbers)
    numbered[chosen] = thing
    return chosen


def version() -> str:
    """The library's version."""
    return str(function("version")())
