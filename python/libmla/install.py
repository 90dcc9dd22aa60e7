# SPDX-License-Identifier: Apache-2.0
"""Puts libmla's drop-in packages where programs look for the peers."""

import importlib
import pkgutil
import sys
from types import ModuleType

_PEERS = ("flash_mla", "flashinfer", "deep_gemm")


def install_as(name: str) -> ModuleType:
    """Makes ``import <name>``, and that of its submodules, give libmla's drop-in; returns the drop-in's package.

    name: "flash_mla", "flashinfer" or "deep_gemm"; another one raises ValueError. Call it before the program imports
    the peer: afterwards RuntimeError is raised, as names that were imported from the peer would stay the peer's.
    Calling it again changes nothing.
    """
    if name not in _PEERS:
        raise ValueError(f"name: expected one of {', '.join(_PEERS)}, got {name!r}")
    own = f"libmla.{name}"
    package = importlib.import_module(own)
    if sys.modules.get(name, package) is not package:
        raise RuntimeError(
            f"{name} has already been imported from {_origin(sys.modules[name])}: install libmla's first"
        )
    # All submodules now: importlib would load one that is missing here a second time, from the package's directory.
    for found in pkgutil.walk_packages(package.__path__, f"{own}."):
        importlib.import_module(found.name)
    for module_name, module in list(sys.modules.items()):
        if module_name == own or module_name.startswith(f"{own}."):
            sys.modules[module_name.removeprefix("libmla.")] = module
    return package


def _origin(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or "an unknown place"
