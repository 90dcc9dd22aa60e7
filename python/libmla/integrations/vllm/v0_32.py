# SPDX-License-Identifier: Apache-2.0
"""Holds the attention backends for vLLM 0.32, which asks for less than 0.33.

Its ``do_kv_cache_update`` is called without ``skip_scale``, nothing calls ``reserve_workspace``, and its sparse base
class leaves ``forward_mqa`` to us: the classes for 0.33 serve as they are. What will differ goes here.
"""

from __future__ import annotations

from .v0_33 import (
    CustomBackend,
    DenseBackend,
    DenseBuilder,
    DenseImpl,
    PrefillBackend,
    SparseBackend,
    SparseBuilder,
    SparseImpl,
)

__all__ = [
    "CustomBackend",
    "DenseBackend",
    "DenseBuilder",
    "DenseImpl",
    "PrefillBackend",
    "SparseBackend",
    "SparseBuilder",
    "SparseImpl",
]
