# SPDX-License-Identifier: Apache-2.0
"""Allocates memory for plans once, since CUDA graphs keep its address."""

from __future__ import annotations

from typing import Any

import torch

import libmla

from .attention import Layer
from .caches import cache_of, one_page

_MANY_TOKENS = 1 << 24


def _example(
    layer: Layer, num_heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, libmla.KvCache | torch.Tensor, dict[str, Any]]:
    """Returns a query [1, H, d_qk] and a cache as the layer's kernels see them, and the layer's options.

    The cache is one page over and over: with batch_invariant, a workspace grows with the keys that a request may have.
    """
    d_qk = layer.kv_lora_rank + layer.qk_rope_head_dim
    q = torch.empty(1, num_heads, d_qk, dtype=dtype, device=device)
    page = one_page(layer.kv_cache_dtype, d_qk, dtype, device).expand(_MANY_TOKENS, -1, -1)
    cache = cache_of(page, layer.kv_cache_dtype, torch.ones((), device=device))
    options = {"sm_scale": layer.sm_scale, "batch_invariant": layer.batch_invariant, "d_v": layer.kv_lora_rank}
    return q, cache, options


def for_decode(
    layer: Layer, *, num_heads: int, dtype: torch.dtype, device: torch.device, max_tokens: int, max_requests: int
) -> torch.Tensor | None:
    """Allocates the workspace for plans of :func:`attention.decode`, for every batch within the limits.

    Args:
        layer: one of those that share it.
        num_heads: query heads that a kernel sees.
        dtype: type of the queries.
        device: where the workspace goes; on a CPU the size depends on lengths, and None is returned.
        max_tokens: queries of a step.
        max_requests: requests of a step.
    """
    if device.type != "cuda":
        return None
    q, cache, options = _example(layer, num_heads, dtype, device)
    zeros = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)

    def needed(tokens: int, requests: int, ragged: bool) -> int:
        plan = libmla.Plan.decode(
            q.expand(tokens, -1, -1),
            cache,
            kv_len=zeros[:requests],
            block_table=zeros[:requests, None],
            qo_indptr=zeros[: requests + 1] if ragged else None,
            context_parallel=layer.context_parallel,
            **options,
        )
        return int(plan.workspace.shape[0])

    # Few requests with many queries have larger blocks, many requests have more of them.
    batches = ((max_tokens, 1, True), (max_tokens, max_requests, True), (max_requests, max_requests, False))
    return torch.empty(max(needed(*batch) for batch in batches), dtype=torch.uint8, device=device)


def for_decode_sparse(
    layer: Layer, *, num_heads: int, dtype: torch.dtype, device: torch.device, max_tokens: int, topk: int
) -> torch.Tensor | None:
    """Allocates the same for plans of :func:`attention.decode_sparse`.

    Args:
        layer, num_heads, dtype, device, max_tokens: as in :func:`for_decode`.
        topk: tokens that the indexer picks for a query.
    """
    if device.type != "cuda":
        return None
    q, cache, options = _example(layer, num_heads, dtype, device)
    zeros = torch.zeros(max(max_tokens, topk), dtype=torch.int32, device=device)
    plan = libmla.Plan.decode_sparse(
        q.expand(max_tokens, -1, -1),
        cache,
        zeros[None, :topk].expand(max_tokens, -1),
        topk_length=zeros[:max_tokens],
        topk_length_per="token",
        **options,
    )
    return torch.empty(int(plan.workspace.shape[0]), dtype=torch.uint8, device=device)
