# SPDX-License-Identifier: Apache-2.0
"""Asks the library about itself: the rows of its tables of backends, and the sizes of its cache formats."""

from __future__ import annotations

from . import _core
from .types import CacheFormat, IndexerFormat


def backends(op: str) -> list[str]:
    """Returns the names of all backends of an operation such as ``"decode"``, best first."""
    return list(_core.data("backends", op))


def row_bytes(format: CacheFormat, d_qk: int) -> int:
    """Returns the bytes of one token's row, inline scales included. ``d_qk`` matters to the formats of any width."""
    return int(_core.function("row_bytes")(format, d_qk))


def page_bytes(format: CacheFormat, d_qk: int, page_size: int, padded: bool = False) -> int:
    """Returns the bytes of a page of ``page_size`` tokens, its footer included; with ``padded``, rounded up to the
    format's alignment."""
    return int(_core.function("page_bytes")(format, d_qk, page_size, padded))


def indexer_page_bytes(page_size: int, format: IndexerFormat = "fp8") -> int:
    """Returns the bytes of a page of ``page_size`` tokens of the indexer's cache, whose keys have this format."""
    return int(_core.function("indexer_page_bytes")(page_size, format))
