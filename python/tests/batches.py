# SPDX-License-Identifier: Apache-2.0
"""Makes random paged batches. Pages that no request owns, and what lies past the end of a request, hold NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


@dataclass
class Paged:
    """Holds the pages of some requests, in an order of their own."""

    kv_len: list[int]
    page_size: int
    tables: list[list[int]]
    num_pages: int

    def pages(self, form: str = "block_table") -> dict[str, torch.Tensor]:
        """Returns kv_len and a page table as the operations take them. Entries past the last page name no page."""
        kv_len = ints(self.kv_len)
        if form == "csr":
            counts = [len(table) for table in self.tables]
            indptr = ints([sum(counts[:b]) for b in range(len(counts) + 1)])
            return {
                "kv_len": kv_len,
                "kv_indptr": indptr,
                "kv_indices": ints([page for table in self.tables for page in table]),
            }
        table = torch.full((len(self.kv_len), max([1, *map(len, self.tables)])), 2147483647, dtype=torch.int32)
        for b, pages in enumerate(self.tables):
            table[b, : len(pages)] = ints(pages)
        return {"kv_len": kv_len, "block_table": table}

    def slots(self, b: int) -> list[int]:
        """Returns the slots in which the tokens of a request lie."""
        return [
            self.tables[b][j // self.page_size] * self.page_size + j % self.page_size for j in range(self.kv_len[b])
        ]

    def all_slots(self) -> list[int]:
        return [slot for b in range(len(self.kv_len)) for slot in self.slots(b)]

    def poison(self, cache: torch.Tensor) -> torch.Tensor:
        """Writes NaN wherever no token lies."""
        owned = torch.zeros(self.num_pages * self.page_size).bool()
        owned[self.all_slots()] = True
        cache.view(-1, cache.shape[-1])[~owned] = math.nan
        return cache


def paged(kv_len: Sequence[int], page_size: int) -> Paged:
    counts = [-(-length // page_size) for length in kv_len]
    num_pages = sum(counts) + 2
    order = torch.randperm(num_pages).tolist()
    tables = [order[sum(counts[:b]) : sum(counts[: b + 1])] for b in range(len(counts))]
    return Paged(list(kv_len), page_size, tables, num_pages)


def random_cache(batch: Paged, width: int = 576, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return batch.poison(torch.randn(batch.num_pages, batch.page_size, width).to(dtype))


def indptr(lengths: Sequence[int]) -> torch.Tensor:
    return ints([sum(lengths[:b]) for b in range(len(lengths) + 1)])


def packed_cache(format: str, batch: Paged, rows: torch.Tensor) -> Any:
    """Returns a cache of that format, filled by libmla.append with the rows of all requests in order."""
    import libmla

    if format in ("fp8_dsv4", "fp8_dsv41", "fp4_dsv41", "nvfp4_dsv4"):
        bytes_per_page = libmla.page_bytes(format, 512, batch.page_size, padded=True)
        kv = torch.full((batch.num_pages, bytes_per_page), 0xFF, dtype=torch.uint8)
        cache = libmla.KvCache(format, kv, page_size=batch.page_size)
    elif format != "fp8":
        row = libmla.row_bytes(format, 576)
        kv = torch.full((batch.num_pages, batch.page_size, row), 0xFF, dtype=torch.uint8)
        outer = torch.tensor([0.0037]) if format in ("nvfp4_ds_mla_416", "nvfp4_ds_mla_368") else None
        cache = libmla.KvCache(format, kv, ckv_scale=outer)
    else:
        kv = torch.full((batch.num_pages, batch.page_size, rows.shape[-1]), 0xFF, dtype=torch.uint8)
        cache = libmla.KvCache(format, kv.view(torch.float8_e4m3fn), ckv_scale=torch.tensor([0.02]))
    libmla.append(rows, torch.tensor(batch.all_slots(), dtype=torch.int64), cache)
    return cache
