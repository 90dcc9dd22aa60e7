# SPDX-License-Identifier: Apache-2.0
"""Computes Multi-head Latent Attention with kernels for CPUs and GPUs behind one interface.

Functions take tensors of any framework that speaks DLPack (torch, numpy, JAX, CuPy) without copying them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .info import Explanation, Info, explain, info
from .install import install_as
from .library import backends, indexer_page_bytes, page_bytes, row_bytes
from .types import KvCache, UnsupportedError

if TYPE_CHECKING:
    from .context import Context
    from .ops import (
        append,
        append_indexer,
        append_rope,
        block_table_to_csr,
        compress,
        copy_pages,
        decode,
        decode_sparse,
        finish_output,
        gather,
        indexer_logits,
        indexer_top_k,
        merge_states,
        physical_slots,
        prefill,
        prefill_sparse,
        top_k,
    )
    from .plan import Plan

    __version__: str

__all__ = [
    "Context",
    "Explanation",
    "Info",
    "KvCache",
    "Plan",
    "UnsupportedError",
    "__version__",
    "append",
    "append_indexer",
    "append_rope",
    "backends",
    "block_table_to_csr",
    "compress",
    "copy_pages",
    "decode",
    "decode_sparse",
    "explain",
    "finish_output",
    "gather",
    "indexer_logits",
    "indexer_page_bytes",
    "indexer_top_k",
    "info",
    "install_as",
    "merge_states",
    "page_bytes",
    "physical_slots",
    "prefill",
    "prefill_sparse",
    "row_bytes",
    "top_k",
]

_MODULES = {"Context": "context", "Plan": "plan"}


def __getattr__(name: str) -> Any:
    """Imports what needs the C++ library when it is first asked for."""
    if name == "__version__":
        value = importlib.import_module("._core", __name__).version()
    elif name in __all__:
        value = getattr(importlib.import_module(f".{_MODULES.get(name, 'ops')}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
