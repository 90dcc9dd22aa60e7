# SPDX-License-Identifier: Apache-2.0
"""Computes the attention of one layer in one step, in tensors: what all versions of vLLM have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import libmla

from ..plans import StepPlan
from .caches import cache_of, rows_of


@dataclass(frozen=True, slots=True)
class Layer:
    """Holds what stays the same in a layer from step to step."""

    sm_scale: float
    kv_cache_dtype: str
    kv_lora_rank: int
    qk_rope_head_dim: int
    batch_invariant: bool = False
    context_parallel: tuple[int, int, int] | None = None
    """(rank, ranks, interleave) of decode context parallelism."""
    attn_sink: torch.Tensor | None = None
    """[H] f32: sinks of a sparse layer."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Describes the requests of a step that are decoded, in the memory of the device."""

    kv_len: torch.Tensor
    """[B] int32: tokens of each request on all ranks, those of the queries included."""
    block_table: torch.Tensor
    """[B, max_pages] int32: pages of this rank."""
    query_start_loc: torch.Tensor
    """[B+1] int32: first query of each request. What lies past the last one is padding."""
    max_query_len: int
    """No request has more queries."""
    plan: StepPlan

    def offsets(self, num_tokens: int) -> torch.Tensor | None:
        """Returns query_start_loc, or None where each request has one query.

        Padded requests then have one query too, and no key.
        """
        one_each = self.max_query_len == 1 and num_tokens == self.kv_len.shape[0]
        return None if one_each else self.query_start_loc


def _queries(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """Returns queries as libmla takes them, and a tensor that has their T, H and type."""
    return (rows_of(*q), q[0]) if isinstance(q, tuple) else (q, q)


def _outputs(
    like: torch.Tensor, layer: Layer, padded: bool, want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Allocates o and lse. Rows that no kernel may write, since they are padding, look like those without a key."""
    tokens, heads = like.shape[:2]
    out = like.new_empty(tokens, heads, layer.kv_lora_rank)
    lse = like.new_empty(tokens, heads, dtype=torch.float32) if want_lse else None
    if padded:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
    return out, lse


def decode(
    layer: Layer,
    requests: Requests,
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    k_scale: torch.Tensor,
    *,
    causal: bool = True,
    want_lse: bool = False,
    key: object = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes dense attention over the paged cache, in the absorbed form. Nothing is read back from a GPU.

    Args:
        layer, requests: what is decoded.
        q: [T, H, d_qk], or (q_nope [T, H, kv_lora_rank], q_pe [T, H, qk_rope_head_dim]).
        kv_cache, k_scale: the layer's cache, see :func:`cache_of`.
        causal: whether a query sees no later token of its request.
        want_lse: whether to return lse.
        key: what tells this layer from the others of the step.

    Returns:
        o [T, H, kv_lora_rank] of q's type, and lse [T, H] f32, natural logarithm, or None.
    """
    q, like = _queries(q)
    offsets = requests.offsets(like.shape[0])
    batch = {
        "kv_len": requests.kv_len,
        "block_table": requests.block_table,
        "qo_indptr": offsets,
        "causal": causal,
        "sm_scale": layer.sm_scale,
        "context_parallel": layer.context_parallel,
        "batch_invariant": layer.batch_invariant,
        "d_v": layer.kv_lora_rank,
    }
    cache = cache_of(kv_cache, layer.kv_cache_dtype, k_scale)
    plan = requests.plan.get(key, partial(libmla.Plan.decode, q, cache, **batch))
    out, lse = _outputs(like, layer, offsets is not None, want_lse)
    libmla.decode(q, cache, plan=plan, out=out, lse=lse, **batch)
    return out, lse


def decode_sparse(
    layer: Layer,
    requests: Requests,
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_indices: torch.Tensor,
    kv_cache: torch.Tensor,
    k_scale: torch.Tensor,
    *,
    want_lse: bool = False,
    key: object = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes attention of every query over the tokens that the indexer picked. Nothing is read back from a GPU.

    Args:
        topk_indices: [T, topk] int32: tokens of the query's request, counted over all ranks; negative: none.
        layer, requests, q, kv_cache, k_scale, want_lse, key: as in :func:`decode`.

    Returns:
        As :func:`decode`.
    """
    q, like = _queries(q)
    # Rows of padding are not written: no key.
    valid = torch.zeros(like.shape[0], dtype=torch.int32, device=like.device)
    slots = libmla.physical_slots(
        topk_indices,
        kv_len=requests.kv_len,
        page_size=kv_cache.shape[1],
        block_table=requests.block_table,
        qo_indptr=requests.offsets(like.shape[0]),
        context_parallel=layer.context_parallel,
        compact=True,
        valid_count=valid,
    )[0]
    batch = {
        "topk_length": valid,
        "topk_length_per": "token",
        "sm_scale": layer.sm_scale,
        "batch_invariant": layer.batch_invariant,
        "attn_sink": layer.attn_sink,
        "d_v": layer.kv_lora_rank,
    }
    cache = cache_of(kv_cache, layer.kv_cache_dtype, k_scale)
    plan = requests.plan.get(key, partial(libmla.Plan.decode_sparse, q, cache, slots, **batch))
    out, lse = _outputs(like, layer, False, want_lse)
    libmla.decode_sparse(q, cache, slots, plan=plan, out=out, lse=lse, **batch)
    return out, lse


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: float,
    causal: bool,
    batch_invariant: bool,
    want_lse: bool,
    out: torch.Tensor | None = None,
) -> Any:
    """Computes attention of a ragged batch in the up-projected form.

    Args:
        q: [T, H, d_qk].
        k: [S, H, d_qk].
        v: [S, H, d_v].
        qo_indptr, kv_indptr: [B+1] int32: first query and first key of each request.
        sm_scale: the scale of scores.
        causal: whether the last query of a request sees its last key, and earlier ones see less.
        batch_invariant: the bits of a request do not depend on the other requests.
        want_lse: whether to return lse.
        out: [T, H, d_v], where the result goes.

    Returns:
        o [T, H, d_v] of q's type, or (o, lse [H, T] f32, natural logarithm).
    """
    made = libmla.prefill(
        q,
        k,
        v,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        sm_scale=sm_scale,
        causal=causal,
        batch_invariant=batch_invariant,
        out=out,
        return_lse=want_lse,
    )
    return (made[0], made[1].t().contiguous()) if want_lse else made
