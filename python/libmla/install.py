# SPDX-License-Identifier: Apache-2.0
"""Puts libmla's drop-in packages where programs look for the peers."""

from __future__ import annotations

import importlib
import importlib.machinery
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_PEERS = {"flash_mla": "FlashMLA", "flashinfer": "flashinfer-python", "deep_gemm": "DeepGEMM"}


def install_as(name: str, *, fallback: bool = False) -> ModuleType:
    """Makes ``import <name>``, and that of its submodules, give libmla's drop-in; returns the drop-in's package.

    name: "flash_mla", "flashinfer" or "deep_gemm"; another one raises ValueError. Call it before the program imports
    the peer: afterwards RuntimeError is raised, as names that were imported from the peer would stay the peer's.
    Calling it again changes nothing; with another ``fallback`` it raises RuntimeError.

    fallback: names and submodules that libmla does not have come from the installed peer, which is imported now. Where
    none is installed, or it cannot be imported, using such a name is an AttributeError or ImportError that says so.
    The package that is returned, and that the program imports, is then one of its own beside ``libmla.<name>``.
    """
    if name not in _PEERS:
        raise ValueError(f"name: expected one of {', '.join(_PEERS)}, got {name!r}")
    own = f"libmla.{name}"
    package = importlib.import_module(own)
    there = sys.modules.get(name)
    if there is package or isinstance(there, _Joined):
        if isinstance(there, _Joined) != fallback:
            raise RuntimeError(f"{name} has already been installed with fallback={not fallback}: ask for it once")
        return there
    if there is not None:
        raise RuntimeError(f"{name} has already been imported from {_origin(there)}: install libmla's first")
    # All submodules now: importlib would load one that is missing here a second time, from the package's directory.
    for found in pkgutil.walk_packages(package.__path__, f"{own}."):
        importlib.import_module(found.name)
    modules = {
        module_name.removeprefix("libmla."): module
        for module_name, module in list(sys.modules.items())
        if module_name == own or module_name.startswith(f"{own}.")
    }
    sys.modules.update(_joined_with_peer(modules) if fallback else modules)
    return sys.modules[name]


class _Joined(ModuleType):
    """Has the public names of a module of libmla's, and behind them those of the peer's module of this name.

    The peer's own modules see each other as ever: they were imported before this one took their place.
    """

    def __init__(self, name: str, own: ModuleType, peer: ModuleType | None, why_no_peer: str) -> None:
        super().__init__(name, own.__doc__)
        like = peer or own
        self.__file__ = like.__file__
        self.__spec__ = like.__spec__
        # Submodules that libmla does not have are found in the peer's folder. A path, even of no folder, is also what
        # has Python look for a submodule when `from ... import` meets an unknown name: see _Absent.
        self.__path__ = list(getattr(peer, "__path__", ()))
        self.__dict__.update({public: getattr(own, public) for public in own.__all__})
        if hasattr(own, "__version__"):
            self.__version__ = own.__version__
        self._libmla_names = list(own.__all__)
        self._libmla_peer = peer
        self._libmla_why_no_peer = why_no_peer

    def __getattr__(self, name: str) -> Any:
        peer = self.__dict__["_libmla_peer"]
        if name == "__all__":
            return sorted({*self._libmla_names, *getattr(peer, "__all__", _public(peer))})
        if peer is not None:
            return getattr(peer, name)
        if not name.startswith("__"):
            _Absent.reason = (f"{self.__name__}.{name}", f"{self.__name__}.{name}: {self._libmla_why_no_peer}")
        raise AttributeError(f"{self.__name__}.{name}: {self._libmla_why_no_peer}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._libmla_peer)})


class _Absent:
    """Says why ``from flashinfer import name`` fails where no peer has it: Python itself drops the reason.

    For an unknown name, Python asks the module for an attribute, then finders for a submodule of that name. So the
    finder knows by the attribute that was last refused that it is asked because of such a statement.
    """

    reason = ("", "")

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        (refused, message), cls.reason = cls.reason, ("", "")
        if refused == fullname:
            raise ModuleNotFoundError(message, name=fullname.partition(".")[0])


def _joined_with_peer(modules: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """Returns what takes the places of the peer's modules: for each public module of libmla's, it and the peer's."""
    root = next(iter(modules)).partition(".")[0]
    public = {name: module for name, module in modules.items() if "._" not in name and hasattr(module, "__all__")}
    peers: dict[str, ModuleType] = {}
    missing = f"libmla has none, and no {root} ({_PEERS[root]}) is installed that it could come from"
    try:
        peers[root] = importlib.import_module(root)
        for name in sorted(public):
            if name != root and name.rpartition(".")[0] in peers:
                try:
                    peers[name] = importlib.import_module(name)
                except ModuleNotFoundError as error:
                    if error.name != name:
                        raise
    except Exception as error:  # noqa: BLE001  # whatever the peer raises where it cannot run
        if not (isinstance(error, ModuleNotFoundError) and error.name == root):
            missing = f"libmla has none, and the installed {root} could not be imported: {error!r}"
        peers.clear()
        for name in [name for name in sys.modules if name == root or name.startswith(f"{root}.")]:
            del sys.modules[name]
    if _Absent not in sys.meta_path:
        sys.meta_path.insert(0, _Absent)

    joined: dict[str, ModuleType] = {}
    for name, module in public.items():
        lacking = f"libmla has none, and the installed {root} has no module {name}" if peers else missing
        joined[name] = _Joined(name, module, peers.get(name), lacking)
    for name, module in joined.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(joined[parent], child, module)
    return joined


def _public(module: ModuleType | None) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")] if module is not None else []


def _origin(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or "an unknown place"
