# SPDX-License-Identifier: Apache-2.0
"""Computes the attention of a forward pass in terms of tensors and libmla's operations; knows nothing of SGLang."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import libmla

from ..plans import StepPlan, StepPlans


@dataclass
class Batch:
    """Holds what the layers of one forward pass attend to. All tensors stay where they are while a graph holds them."""

    block_table: torch.Tensor
    """i32 [B, max_pages]"""
    kv_len: torch.Tensor
    """i32 [B] tokens of each request, those of the queries included"""
    num_queries: int
    """T; a layer's queries beyond these are padding"""
    qo_indptr: torch.Tensor | None = None
    """i32 [B+1]; None: T / B queries each"""
    tree_mask: torch.Tensor | None = None
    """bool [T, T / B]: which of its request's drafts a query sees; None: those before it"""
    kv_indptr: torch.Tensor | None = None
    """i32 [B+1] first token of each request when all tokens are laid end to end; only in prefill"""
    plan: libmla.Plan | None = None
    planned: tuple[Any, ...] = ()
    """heads and type of the queries that the plan is for"""

    def table(self) -> dict[str, Any]:
        """Returns the arguments in which libmla's operations take the batch."""
        return {
            "kv_len": self.kv_len,
            "block_table": self.block_table,
            "qo_indptr": self.qo_indptr,
            "tree_mask": self.tree_mask,
        }


@dataclass(frozen=True)
class Scores:
    """Says how a layer scores keys."""

    scale: float
    soft_cap: float = 0.0
    window_left: int = -1
    sink: torch.Tensor | None = None
    """f32 [H]"""

    def options(self) -> dict[str, Any]:
        """Returns the arguments in which libmla's operations take these settings."""
        return {
            "sm_scale": self.scale,
            "logits_soft_cap": self.soft_cap,
            "window_left": self.window_left,
            "attn_sink": self.sink,
        }


class Planner:
    """Plans batches for queries of one shape and type, in workspaces that grow and are shared by plans in turn.

    Args:
        num_heads, kv_lora_rank, rope_dim: heads, latent and rotary channels of the queries.
        dtype: type of the queries.
        device: where the queries lie.
    """

    def __init__(self, num_heads: int, kv_lora_rank: int, rope_dim: int, dtype: torch.dtype, device: Any) -> None:
        nothing = torch.empty(1, 1, kv_lora_rank + rope_dim, dtype=dtype, device=device)
        self._q = split(nothing.expand(1, num_heads, -1), kv_lora_rank)
        self._key = (num_heads, dtype)
        self._workspace: Any = None

    def plan(self, batch: Batch, cache: Any) -> None:
        """Gives the batch a plan, in the workspace that the last such plan had where that is large enough."""
        arguments = {"cache": cache, "sm_scale": 1.0, **batch.table()}
        q = self._queries(batch)
        if self._workspace is not None:
            try:
                batch.plan = libmla.Plan.decode(q, workspace=self._workspace, **arguments)
            except ValueError:  # too small, or a fault that the next call will name
                self._workspace = None
        if self._workspace is None:
            batch.plan = libmla.Plan.decode(q, **arguments)
            self._workspace = batch.plan.workspace
        batch.planned = self._key

    def replan(self, batch: Batch, cache: Any) -> None:
        """Plans the batch again for its present lengths; on a GPU, a kernel does so."""
        assert batch.plan is not None
        batch.plan.update(self._queries(batch), cache, sm_scale=1.0, **batch.table())

    def fits(self, batch: Batch, q: torch.Tensor, scores: Scores) -> bool:
        """Returns whether the batch's plan is for these queries and scores."""
        return (
            batch.plan is not None
            and scores.window_left < 0
            and len(q) == batch.num_queries
            and batch.planned == (q.shape[1], q.dtype)
        )

    def _queries(self, batch: Batch) -> Any:
        return tuple(part.expand(batch.num_queries, -1, -1) for part in self._q)


def split(q: torch.Tensor, kv_lora_rank: int) -> tuple[torch.Tensor, ...]:
    """Splits q [T, H, d_qk] into (q_nope, q_pe), or (q_nope,) where nothing is rotary."""
    return q.split([kv_lora_rank, q.shape[-1] - kv_lora_rank], -1) if q.shape[-1] > kv_lora_rank else (q,)


def absorbed(q: tuple[torch.Tensor, ...], cache: Any, batch: Batch, scores: Scores, planner: Planner) -> torch.Tensor:
    """Computes attention of absorbed queries over a paged cache.

    It serves decode, verify, draft extend, and prefill over a prefix.

    Args:
        q: (q_nope [T, H, kv_lora_rank], q_pe [T, H, rope]), or q_nope alone; T may exceed the batch's queries.

    Returns:
        [T, H, kv_lora_rank]; rows past the batch's queries are zero.
    """
    nope, *rope = q
    rows = min(len(nope), batch.num_queries)
    out = torch.empty(nope.shape, dtype=nope.dtype, device=nope.device)
    if rows < len(nope):
        out[rows:].zero_()
    head = (nope[:rows], *(part[:rows] for part in rope))
    libmla.decode(
        head if rope else head[0],
        cache,
        **batch.table(),
        **scores.options(),
        plan=batch.plan if planner.fits(batch, head[0], scores) else None,
        out=out[:rows],
    )
    return out


def up_projected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    causal: bool,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention in the up-projected form.

    The keys are those of the new tokens (causal), of all tokens (causal) or of a chunk of the prefix.

    Args:
        q: [T, H, d_qk]; k [S, H, d_qk]; v [S, H, d_v].
        qo_indptr, kv_indptr: i32 [B+1].

    Returns:
        (o [T, H, d_v], lse [T, H] f32, natural logarithm).
    """
    return libmla.prefill(
        q,
        k.to(q.dtype),
        v.to(q.dtype),
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        causal=causal,
        return_lse=True,
        **scores.options(),
    )


@dataclass(frozen=True)
class Layer:
    """Says which layer of which step attends, for layers to share a plan."""

    plans: StepPlans
    step: object
    number: int

    def plan(self, kind: Hashable) -> StepPlan:
        """Returns the plan of the layers of this kind in the step."""
        return self.plans.of(self.step, kind)


def sparse(
    q: torch.Tensor,
    cache: Any,
    indices: torch.Tensor,
    length: torch.Tensor | None,
    *,
    scores: Scores,
    layer: Layer,
    second: tuple[Any, torch.Tensor, torch.Tensor | None] | None = None,
    num_heads: int | None = None,
    d_v: int | None = None,
) -> torch.Tensor:
    """Computes attention over the slots that indices name, in one pool or two under one softmax.

    Args:
        q: [T, H, d_qk].
        indices: i32 [N, topk] slots, N >= T; negative ones are skipped.
        length: i32 [N] valid indices of each row, or None; layers that share a plan have the same.
        scores: how the layer scores keys.
        layer: the layer.
        second: another pool, its indices and lengths.
        num_heads: how many heads there really are, where the rest are padding.
        d_v: width of the value; None: as the cache says.

    Returns:
        [T, H, d_v], of which the heads that are padding are not written.
    """
    tokens, heads = q.shape[:2]
    real = heads if num_heads is None else min(heads, num_heads)
    out = torch.empty(tokens, heads, d_v or q.shape[-1], dtype=q.dtype, device=q.device)
    rows = min(tokens, len(indices))
    if rows < tokens:
        out[rows:].zero_()
    named: dict[str, Any] = {}
    if second is not None:
        extra_cache, extra_indices, extra_length = second
        named = {
            "extra_cache": extra_cache,
            "extra_indices": extra_indices[:rows],
            "extra_topk_length": None if extra_length is None else extra_length[:rows],
            "extra_topk_length_per": "token",
        }
    arguments = {
        "topk_length": None if length is None else length[:rows],
        "topk_length_per": "token",
        "sm_scale": scores.scale,
        "logits_soft_cap": scores.soft_cap,
        "attn_sink": None if scores.sink is None else scores.sink[:real],
        **named,
    }
    queries, slots = q[:rows, :real], indices[:rows]
    lengths = [_place(length)] if second is None else [_place(length), second[1].shape[1], _place(second[2])]
    plan = layer.plan((rows, real, q.dtype, slots.shape[1], *lengths)).get(
        layer.number, partial(libmla.Plan.decode_sparse, queries, cache, slots, **arguments)
    )
    libmla.decode_sparse(queries, cache, slots, plan=plan, out=out[:rows, :real], **arguments)
    return out


def _place(lengths: torch.Tensor | None) -> int | None:
    """Returns what tells lengths from others of the same step."""
    return None if lengths is None else lengths.data_ptr()
