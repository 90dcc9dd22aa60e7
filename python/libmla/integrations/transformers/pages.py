# SPDX-License-Identifier: Apache-2.0
"""Keeps pages of latent rows, which requests own, alone or together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import get_args

import torch

import libmla
from libmla.types import Cache, CacheFormat, Compute

_ROTARY_CHANNELS = 64
"""Rotary parts are stored in multiples of this, zeros behind: kernels of GPUs take no others."""

_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "fp8": torch.uint8}
"""These formats have rows of any width, of this type."""

_OF_WIDTHS = {
    (512, 64): ("fp8_ds_mla", "nvfp4_ds_mla", "nvfp4_ds_mla_416", "nvfp4_ds_mla_368"),
    (448, 64): ("fp8_dsv4", "fp8_dsv41", "fp4_dsv41", "fp8_nope", "nvfp4_dsv4", "mxfp4_dsv4"),
}
"""These have rows of so many latent and rotary channels. Outer scales are 1: nothing calibrates them here."""

_PAGES_OF_BYTES = ("fp8_dsv4", "fp8_dsv41", "fp4_dsv41", "nvfp4_dsv4")
"""Pages of these have their scales behind the rows; of other packed formats a row is apart."""


def check_format(cache_format: str, rank: int, rope: int, name: str = "cache_format") -> None:
    """Raises ValueError unless rows of ``rank`` latent and ``rope`` rotary channels fit into the format."""
    fitting = [*_DTYPES, *_OF_WIDTHS.get((rank, rope), ())]
    if cache_format in fitting:
        return
    known = cache_format in get_args(CacheFormat)
    what = {
        **{other: f"{other}, whose rows have 512 latent and 64 rotary channels" for other in _OF_WIDTHS[512, 64]},
        "fp8_dsv4": "fp8_dsv4, whose rows are DeepSeek V4's: 448 + 64 channels, all of them values too",
        "fp8_dsv41": "fp8_dsv41, whose rows are those of DeepSeek V4.1's window: 512 channels, all of them values",
        "fp4_dsv41": "fp4_dsv41, whose rows are those of DeepSeek V4.1's compressed pool: 512 channels, all of them values",
        "fp8_nope": "fp8_nope, whose rows have 512 latent channels and no rotary ones",
        "nvfp4_dsv4": "nvfp4_dsv4, whose rows are DeepSeek V4's: 448 + 64 channels, all of them values too",
        "mxfp4_dsv4": "mxfp4_dsv4, whose rows are DeepSeek V4's: 448 + 64 channels, all of them values too",
    }.get(cache_format, cache_format)
    raise ValueError(
        f"{name}: expected one of {', '.join(fitting)} for this model's rows of {rank} latent and {rope} rotary "
        f"channels, got {what if known else repr(cache_format)}"
    )


def check_compute(compute: Compute, cache_format: str) -> None:
    """Raises ValueError unless caches of the format can be computed with in that way."""
    if compute not in get_args(Compute):
        raise ValueError(f'compute: expected "default", "fp8" or "exact", got "{compute}"')
    if compute == "fp8" and cache_format in ("bf16", "f16"):
        raise ValueError(f"compute: expected default, since {cache_format} caches are not quantized, got fp8")


class Pool:
    """Holds one layer's pages."""

    def __init__(self, cache_format: str, page_size: int, rank: int, rope: int, device: torch.device) -> None:
        check_format(cache_format, rank, rope)
        self.rank, self.rope, self.device = rank, rope, device
        self.rope_pad = -rope % _ROTARY_CHANNELS
        width = rank + rope + self.rope_pad
        self._format = cache_format
        if cache_format in _DTYPES:
            shape, dtype = (page_size, width), _DTYPES[cache_format]
        elif cache_format in _PAGES_OF_BYTES:
            shape, dtype = (libmla.page_bytes(cache_format, width, page_size),), torch.uint8
        else:
            shape, dtype = (page_size, libmla.row_bytes(cache_format, width)), torch.uint8
        self.data = torch.empty((0, *shape), dtype=dtype, device=device)
        self._page_size = page_size if cache_format in _PAGES_OF_BYTES else 0
        self._scale = torch.ones(1, device=device) if cache_format == "fp8" else None

    def reserve(self, num_pages: int) -> None:
        """Makes room for ``num_pages`` pages; new ones hold anything."""
        more = num_pages - len(self.data)
        if more > 0:
            self.data = torch.cat([self.data, self.data.new_empty((more, *self.data.shape[1:]))])

    @property
    def cache(self) -> Cache:
        """Returns the cache as libmla's functions take it."""
        if self._format in ("bf16", "f16"):
            return self.data
        return libmla.KvCache(self._format, kv=self.data, ckv_scale=self._scale, page_size=self._page_size)

    def pad(self, rotary: torch.Tensor) -> torch.Tensor:
        """Pads rotary channels [..., rope] to the width in which they are stored."""
        return torch.nn.functional.pad(rotary, (0, self.rope_pad)) if self.rope_pad else rotary


class Pages:
    """Holds the pages that the caches forked from one another share: who owns them, and every layer's pool.

    Args:
        cache_format: a name of libmla.KvCache.
        page_size: tokens of a page.
        limit: how many pages there are; None: as many as needed, the pools double when they are full.
    """

    def __init__(self, cache_format: str, page_size: int, limit: int | None) -> None:
        self.cache_format, self.page_size, self.limit = cache_format, page_size, limit
        self.count = limit or 0
        self.pools: dict[int, Pool] = {}
        self._owners: Counter[int] = Counter()
        self._free = list(range(self.count))[::-1]

    def pool(self, layer: int, rank: int, rope: int, device: torch.device) -> Pool:
        """Returns the layer's pool, with room for all pages; makes it when first asked for."""
        if layer not in self.pools:
            self.pools[layer] = Pool(self.cache_format, self.page_size, rank, rope, device)
        pool = self.pools[layer]
        pool.reserve(self.count)
        return pool

    def take(self, number: int) -> list[int]:
        """Takes pages that nobody owns; raises ValueError, and takes none, if there are too few."""
        missing = number - len(self._free)
        if missing > 0:
            if self.limit is not None:
                raise ValueError(
                    f"num_pages: expected at least {self.limit + missing} pages of {self.page_size} tokens for these "
                    f"requests, got {self.limit}: make the cache with more, or with num_pages=None, or drop forks of it"
                )
            more = max(missing, self.count)
            self._free[:0] = range(self.count, self.count + more)[::-1]
            self.count += more
        taken = [self._free.pop() for _ in range(number)]
        self._owners.update(taken)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Counts one more owner of each."""
        self._owners.update(pages)

    def is_shared(self, page: int) -> bool:
        return self._owners[page] > 1

    def release(self, pages: Iterable[int]) -> None:
        """Counts one owner less of each; what has none is free."""
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                del self._owners[page]
                self._free.append(page)

    @torch.inference_mode()
    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies pages (from, to) in every pool."""
        if not pairs:
            return
        sources, targets = zip(*pairs, strict=True)
        for pool in self.pools.values():
            pool.reserve(self.count)
            pool.data[list(targets)] = pool.data[list(sources)]

    @property
    def num_free(self) -> int:
        return len(self._free)
