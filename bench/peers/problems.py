# SPDX-License-Identifier: Apache-2.0
"""The problems that cases describe: tensors, which libmla and its peers share, and libmla's calls.

Caches come in several copies that calls take in turns, so that they are read from memory and not from the L2 cache. Each
problem has key_tensors(), those of its keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch

import libmla

PAGE_SIZE = 64
D_QK, D_V, D_ROPE = 576, 512, 64
SM_SCALE = 192**-0.5


@dataclass(frozen=True)
class Side:
    """What is timed of libmla or a peer: calls that do the same for each copy of the cache."""

    calls: list[Callable[[], Any]]
    output_of: Callable[[Any], torch.Tensor]  #: gets what a call returned, and gives the output in libmla's shape

    def output(self) -> torch.Tensor:
        """Returns the output for the first copy."""
        return self.output_of(self.calls[0]())


def copies_past_the_cache(nbytes: int, device: torch.device) -> int:
    """Returns how many copies of so many bytes are twice as large as the L2 cache, up to eight."""
    if device.type != "cuda":
        return 1
    return max(1, min(8, math.ceil(2 * torch.cuda.get_device_properties(device).L2_cache_size / nbytes)))


def _int32(values: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=device)


def _ragged_lengths(batch: int, median: int, device: torch.device) -> torch.Tensor:
    """Returns [batch] int32, lengths as requests have them: log-normal, a third of them more than e times the median away."""
    normal = NormalDist()
    lengths = [round(median * math.exp(normal.inv_cdf((i + 0.5) / batch))) for i in range(batch)]
    return _int32(lengths, device)[torch.randperm(batch, device=device)]


def _pages_of(lengths: torch.Tensor) -> torch.Tensor:
    """Returns page tables [batch, pages of the longest request] int32 in which no page occurs twice; 0 behind a request's own."""
    pages = -(-lengths // PAGE_SIZE)
    own = torch.arange(int(pages.max()), device=lengths.device) < pages.unsqueeze(1)
    table = torch.zeros(own.shape, dtype=torch.int32, device=lengths.device)
    table[own] = torch.randperm(int(pages.sum()), device=lengths.device).to(torch.int32)
    return table


def _distinct(rows: int, count: int, below: int, device: torch.device) -> torch.Tensor:
    """Returns [rows, count] int32, each row of distinct random numbers below `below`. Many rows repeat the first 64."""
    some = torch.stack([torch.randperm(below, device=device)[:count] for _ in range(min(rows, 64))])
    return some.to(torch.int32).repeat(-(-rows // len(some)), 1)[:rows].contiguous()


class Decode:
    """Queries [T, H, 576] over paged rows of bf16, or of e4m3 with one scale (`cache` "fp8").

    All requests have kv_len keys, or, if they are ragged, that is the median.
    """

    def __init__(
        self,
        device: torch.device,
        batch: int,
        q_len: int,
        heads: int,
        kv_len: int,
        cache: str = "bf16",
        ragged: bool = False,
    ) -> None:
        self.batch, self.q_len, self.heads, self.format = batch, q_len, heads, cache
        self.causal = q_len > 1
        self.q = torch.randn(batch * q_len, heads, D_QK, device=device, dtype=torch.bfloat16)
        self.kv_lens = (
            _ragged_lengths(batch, kv_len, device)
            if ragged
            else torch.full((batch,), kv_len, dtype=torch.int32, device=device)
        )
        self.kv_len = int(self.kv_lens.max())
        self.block_table = _pages_of(self.kv_lens)
        dtype = torch.float8_e4m3fn if cache == "fp8" else torch.bfloat16
        shape = (int(self.block_table.max()) + 1, PAGE_SIZE, D_QK)
        copies = copies_past_the_cache(math.prod(shape) * dtype.itemsize, device)
        self.rows = [torch.randn(shape, device=device, dtype=torch.bfloat16).to(dtype) for _ in range(copies)]
        self.ckv_scale = torch.ones(1, device=device)

    def key_tensors(self) -> list[torch.Tensor]:
        return self.rows

    def libmla(self) -> Side:
        out = torch.empty(*self.q.shape[:2], D_V, device=self.q.device, dtype=self.q.dtype)
        lse = torch.empty(self.q.shape[:2], device=self.q.device)
        named = {"kv_len": self.kv_lens, "block_table": self.block_table, "sm_scale": SM_SCALE, "causal": self.causal}
        named |= {"out": out, "lse": lse}
        scale = {"ckv_scale": self.ckv_scale} if self.format == "fp8" else {}
        caches = [libmla.KvCache(self.format, kv=rows, **scale) for rows in self.rows]
        plan = libmla.Plan.decode(self.q, caches[0], **named)
        calls = [lambda one=one: libmla.decode(self.q, one, plan=plan, **named) for one in caches]
        return Side(calls, lambda _: out)


class DecodeSparse:
    """One query token a request, whose list names rows of a quantized pool, and perhaps of a second one."""

    POOL_TOKENS = 1 << 17

    def __init__(self, device: torch.device, batch: int, heads: int, cache: str, topk: int, extra_topk: int) -> None:
        self.batch, self.heads, self.format, self.topk, self.extra_topk = batch, heads, cache, topk, extra_topk
        self.d_qk = D_QK if cache == "fp8_ds_mla" else D_V
        self.sm_scale = self.d_qk**-0.5
        self.q = torch.randn(batch, heads, self.d_qk, device=device, dtype=torch.bfloat16)
        self.sink = torch.randn(heads, device=device) if extra_topk else None
        self.indices = _distinct(batch, topk, self.POOL_TOKENS, device)
        self.pools = [self._pool(self.POOL_TOKENS, device) for _ in range(2)]
        extra_tokens = batch * extra_topk
        self.extra_indices = _distinct(batch, extra_topk, extra_tokens, device) if extra_topk else None
        self.extra_pool = self._pool(extra_tokens, device) if extra_topk else None

    def _pool(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Returns the pages of a pool, [pages, bytes of a page], with rows that libmla quantized."""
        pages = -(-tokens // PAGE_SIZE)
        memory = torch.zeros(
            pages, libmla.page_bytes(self.format, self.d_qk, PAGE_SIZE), dtype=torch.uint8, device=device
        )
        rows = torch.randn(tokens, self.d_qk, device=device, dtype=torch.bfloat16)
        libmla.append(rows, torch.arange(tokens, device=device), self.kv_cache(memory))
        return memory

    def kv_cache(self, memory: torch.Tensor) -> libmla.KvCache:
        if self.format == "fp8_ds_mla":
            return libmla.KvCache(self.format, kv=memory.view(len(memory), PAGE_SIZE, -1))
        return libmla.KvCache(self.format, kv=memory, page_size=PAGE_SIZE)

    def key_tensors(self) -> list[torch.Tensor]:
        return self.pools + ([] if self.extra_pool is None else [self.extra_pool])

    def libmla(self) -> Side:
        out = torch.empty(self.batch, self.heads, D_V, device=self.q.device, dtype=self.q.dtype)
        lse = torch.empty(self.batch, self.heads, device=self.q.device)
        named: dict[str, Any] = {"sm_scale": self.sm_scale, "out": out, "lse": lse, "attn_sink": self.sink}
        if self.extra_pool is not None:
            named |= {"extra_cache": self.kv_cache(self.extra_pool), "extra_indices": self.extra_indices}
        caches = [self.kv_cache(pool) for pool in self.pools]
        plan = libmla.Plan.decode_sparse(self.q, caches[0], self.indices, **named)
        calls = [lambda one=one: libmla.decode_sparse(self.q, one, self.indices, plan=plan, **named) for one in caches]
        return Side(calls, lambda _: out)


class PrefillSparse:
    """The queries of a prompt, each with a list of rows of a bf16 tensor; lse and max_logits are asked for."""

    def __init__(self, device: torch.device, queries: int, keys: int, heads: int, topk: int, d_qk: int) -> None:
        self.sm_scale = d_qk**-0.5
        self.q = torch.randn(queries, heads, d_qk, device=device, dtype=torch.bfloat16)
        self.kv = torch.randn(keys, 1, d_qk, device=device, dtype=torch.bfloat16)
        self.indices = _distinct(queries, topk, keys, device)

    def key_tensors(self) -> list[torch.Tensor]:
        return [self.kv]

    def libmla(self) -> Side:
        out = torch.empty(*self.q.shape[:2], D_V, device=self.q.device, dtype=self.q.dtype)
        lse, max_logits = (torch.empty(self.q.shape[:2], device=self.q.device) for _ in range(2))
        named = {"sm_scale": self.sm_scale, "out": out, "lse": lse, "max_logits": max_logits}
        plan = libmla.Plan.prefill_sparse(self.q, self.kv[:, 0], self.indices, **named)
        call = lambda: libmla.prefill_sparse(self.q, self.kv[:, 0], self.indices, plan=plan, **named)
        return Side([call], lambda _: out)


class Prefill:
    """Causal attention of whole prompts, heads of 192 and 128 channels."""

    def __init__(self, device: torch.device, batch: int, length: int, heads: int) -> None:
        self.batch, self.length, self.heads = batch, length, heads
        tokens = batch * length
        self.q, self.k = (torch.randn(tokens, heads, 192, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.v = torch.randn(tokens, heads, 128, device=device, dtype=torch.bfloat16)
        self.indptr = _int32(range(0, tokens + 1, length), device)

    def key_tensors(self) -> list[torch.Tensor]:
        return [self.k, self.v]

    def libmla(self) -> Side:
        out = torch.empty_like(self.v)
        named = {"qo_indptr": self.indptr, "kv_indptr": self.indptr, "sm_scale": SM_SCALE, "out": out}
        plan = libmla.Plan.prefill(self.q, self.k, self.v, **named)
        call = lambda: libmla.prefill(self.q, self.k, self.v, plan=plan, **named)
        return Side([call], lambda _: out)


class IndexerLogits:
    """Scores of an indexer, e4m3 queries [T, H, 128] and a paged cache of e4m3 keys with a scale each.

    libmla multiplies e4m3 by e4m3, as DeepGEMM does, which keeps fewer bits of sums on Hopper; with
    ``compute="exact"`` it sums in f32.
    """

    def __init__(
        self, device: torch.device, batch: int, q_len: int, kv_len: int, heads: int, compute: str = "default"
    ) -> None:
        self.batch, self.q_len, self.kv_len, self.heads, self.compute = batch, q_len, kv_len, heads, compute
        pages = -(-kv_len // PAGE_SIZE)
        self.q = torch.randn(batch * q_len, heads, 128, device=device).to(torch.float8_e4m3fn)
        self.weights = torch.rand(batch * q_len, heads, device=device)
        self.kv_lens = torch.full((batch,), kv_len, dtype=torch.int32, device=device)
        self.block_table = _pages_of(self.kv_lens)
        tokens, page_bytes = batch * pages * PAGE_SIZE, libmla.indexer_page_bytes(PAGE_SIZE)
        self.caches = []
        for _ in range(copies_past_the_cache(batch * pages * page_bytes, device)):
            memory = torch.zeros(batch * pages, page_bytes, dtype=torch.uint8, device=device)
            keys = torch.randn(tokens, 128, device=device, dtype=torch.bfloat16)
            libmla.append_indexer(keys, torch.arange(tokens, device=device), memory, page_size=PAGE_SIZE)
            self.caches.append(memory)

    def key_tensors(self) -> list[torch.Tensor]:
        return self.caches

    def seen(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the keys that all queries see: what lies behind a query's own is unspecified."""
        return logits[:, : self.kv_len - self.q_len + 1]

    def libmla(self) -> Side:
        logits = torch.empty(len(self.q), self.kv_len, device=self.q.device)
        named = {"page_size": PAGE_SIZE, "kv_len": self.kv_lens, "block_table": self.block_table, "logits": logits}
        named["compute"] = self.compute
        calls = [lambda one=one: libmla.indexer_logits(self.q, self.weights, one, **named) for one in self.caches]
        return Side(calls, self.seen)


PROBLEMS = {
    "decode": Decode,
    "decode_sparse": DecodeSparse,
    "prefill_sparse": PrefillSparse,
    "prefill": Prefill,
    "indexer_logits": IndexerLogits,
}
