# SPDX-License-Identifier: Apache-2.0
"""Chooses which keys sparse attention reads, for models that have no indexer to say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

import libmla

if TYPE_CHECKING:
    from ..integrations.transformers import LatentQuery

Selector = Callable[["LatentQuery"], torch.Tensor]
"""Returns int32 [T, topk]: for each query keys by their places in its request, -1 for none."""

_SCORES_AT_ONCE = 1 << 25


def all_keys(query: LatentQuery) -> torch.Tensor:
    """Returns every key that a query sees: what dense attention reads, the sparse way."""
    keys = torch.arange(int(query.kv_len.max()), dtype=torch.int32, device=query.positions.device)
    return torch.where(keys <= query.positions[:, None], keys, -1)


def top_keys(count: int) -> Selector:
    """Returns what selects the `count` keys of the largest true weight: softmax over the visible keys in f32, summed
    over the heads.

    An indexer learns to guess this choice; no indexer for the same cache can know better which keys weigh most.
    """
    return partial(_top_keys, count)


def _top_keys(count: int, query: LatentQuery) -> torch.Tensor:
    everything = all_keys(query)
    if everything.shape[1] <= count:
        return everything
    lengths = query.kv_len.tolist()
    starts = [0, *accumulate(lengths)]
    rows = libmla.gather(
        query.cache,
        kv_len=query.kv_len,
        block_table=query.block_table,
        out_indptr=torch.tensor(starts, dtype=torch.int32, device=query.kv_len.device),
        num_rows=starts[-1],
        out_dtype=torch.float32,
    )
    chosen = torch.full((len(everything), count), -1, dtype=torch.int32, device=everything.device)
    for request, (first, last) in enumerate(pairwise(query.qo_indptr.tolist())):
        keys = lengths[request]
        own = rows[starts[request] : starts[request + 1]]
        at_once = max(1, _SCORES_AT_ONCE // (query.q_nope.shape[1] * max(keys, 1)))
        for start in range(first, last, at_once):
            part = slice(start, min(start + at_once, last))
            chosen[part, : min(count, keys)] = _of_request(query, part, own, min(count, keys))
    return chosen


def _of_request(query: LatentQuery, part: slice, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Returns keys of one request, [queries, count] int32, ascending, -1 (for keys behind the query) last."""
    rank, rope = query.q_nope.shape[-1], query.q_pe.shape[-1]
    scores = query.q_nope[part].float() @ rows[:, :rank].T
    scores += query.q_pe[part].float() @ rows[:, rank : rank + rope].T
    hidden = torch.arange(len(rows), device=rows.device) > query.positions[part, None]
    weights = (query.sm_scale * scores).masked_fill_(hidden[:, None], -torch.inf).softmax(-1).sum(1)
    found = weights.masked_fill_(hidden, -1.0).topk(count, dim=-1).indices
    found = found.masked_fill_(hidden.gather(1, found), len(rows)).sort(dim=-1).values
    return found.masked_fill_(found == len(rows), -1).int()
