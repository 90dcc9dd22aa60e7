# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for compiled packages that SGLang's modules import and these tests never call.

A module of a stand-in has every attribute that is asked of it; calling one is an error that names it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

COMPILED = ("torchvision", "sgl_kernel", "flash_mla", "flashinfer", "deep_gemm", "tilelang", "vllm")


def install() -> list[str]:
    """Puts stand-ins where a package of ``COMPILED`` is not installed, and returns their names."""
    missing = [name for name in COMPILED if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(missing))
    return missing


class _Missing:
    """An attribute of a stand-in: may be named, subclassed and decorated with, not called for a result."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **named: Any) -> Any:
        raise RuntimeError(f"{self._name} is compiled code that is not installed here")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()


class _Module(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: list[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
