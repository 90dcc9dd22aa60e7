# SPDX-License-Identifier: Apache-2.0
"""Computes attention over a cache that the ranks of a group share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import ops
from ..context import Context
from ..plan import Plan
from ..types import Cache, KvCache, Rows
from .combine import Group, Method, check_method, check_partial_dtype, check_sink, finish, gather_first, new_states
from .shares import check_share, local_kv_len

Pages = torch.Tensor | None


class ContextParallel:
    """Appends to a cache that is dealt out to ranks, and attends to it.

    Each rank has the heads that tensor parallelism gives it, a cache of the tokens that are its own, and a page table
    for them, whose pages count local tokens. (Ranks may share one table, if pages of the same number belong to the same
    request in all their caches.) ``kv_len`` is global everywhere: tokens of all ranks. Every rank calls the same
    methods in the same order, with the same batch and its own heads; otherwise the group hangs, as in any collective.

    Calls neither wait nor copy to the host. With NCCL, a CUDA graph may capture them.

    Args:
        group: the ranks; None: the default group of torch.distributed.
        interleave: tokens in a row on one rank before the next one's turn.
        method: how partial results are combined, see :func:`combine`.
        partial_dtype: the type in which partial results travel: f32, or that of the queries' results (bf16 for e4m3
            queries), which halves the bytes and costs a rounding.
        context: a :class:`libmla.Context` for all calls.

    Raises:
        ValueError: interleave is below 1; the method is unknown.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        interleave: int = 1,
        method: Method = "all_to_all",
        partial_dtype: torch.dtype = torch.float32,
        context: Context | None = None,
    ) -> None:
        check_method(method)
        check_partial_dtype(partial_dtype)
        self.group = group
        self.method = method
        self.partial_dtype = partial_dtype
        self.context = context
        self.share = check_share(dist.get_rank(group), dist.get_world_size(group), interleave)

    @property
    def rank(self) -> int:
        return self.share[0]

    @property
    def world_size(self) -> int:
        return self.share[1]

    @property
    def interleave(self) -> int:
        return self.share[2]

    def local_kv_len(self, kv_len: Any) -> Any:
        """Returns how many of a request's ``kv_len`` tokens this rank has: an integer, or a tensor of them."""
        return local_kv_len(kv_len, *self.share)

    def slot_mapping(
        self,
        num_tokens: int,
        *,
        kv_len: torch.Tensor,
        page_size: int,
        block_table: Pages = None,
        kv_indptr: Pages = None,
        kv_indices: Pages = None,
        qo_indptr: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns where new tokens go in this rank's cache, as :func:`libmla.append` wants it; -1 for those of other
        ranks.

        Args:
            num_tokens: T, new tokens of all requests: the last ones of each.
            kv_len: [B] int32, tokens of each request, the new ones included.
            page_size: tokens of a page.
            block_table, kv_indptr, kv_indices: this rank's page table.
            qo_indptr: [B+1] int32, first new token of each request; None: T / B each.

        Returns:
            [T] int64.
        """
        if qo_indptr is None:
            if num_tokens and (kv_len.shape[0] == 0 or num_tokens % kv_len.shape[0]):
                raise ValueError(
                    f"qo_indptr: expected one, as {kv_len.shape[0]} requests cannot have the same number of "
                    f"{num_tokens} tokens, got None"
                )
            each = num_tokens // max(kv_len.shape[0], 1)
            qo_indptr = torch.arange(kv_len.shape[0] + 1, dtype=torch.int32, device=kv_len.device) * each
        token = torch.arange(num_tokens, dtype=qo_indptr.dtype, device=kv_len.device)
        # Padding beyond the last request counts as its, past kv_len: it gets -1.
        request = (torch.searchsorted(qo_indptr, token, right=True) - 1).clamp(max=kv_len.shape[0] - 1)
        position = kv_len[request] - qo_indptr[request + 1] + token
        slots = ops.physical_slots(
            position.to(torch.int32).unsqueeze(1),
            kv_len=kv_len,
            page_size=page_size,
            block_table=block_table,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            qo_indptr=qo_indptr,
            context_parallel=self.share,
            context=self.context,
        )
        return slots.squeeze(1).long()

    def append(self, rows: Rows, cache: Cache, **batch: Any) -> None:
        """Writes those of the new tokens' latent rows that are this rank's.

        Args:
            rows: [T, d_qk] of all new tokens, or a pair, as in :func:`libmla.append`; the same on every rank.
            cache: this rank's; is written.
            **batch: ``kv_len``, this rank's page table and ``qo_indptr``, as in :meth:`slot_mapping`.
        """
        num_tokens = (rows[0] if isinstance(rows, tuple) else rows).shape[0]
        slots = self.slot_mapping(num_tokens, page_size=_page_size(cache), **batch)
        ops.append(rows, slots, cache, context=self.context)

    def plan(self, q: Rows, cache: Cache, **batch: Any) -> Plan:
        """Makes a plan for :meth:`decode` with these arguments, which all layers of a model may share."""
        first = q[0] if isinstance(q, tuple) else q
        width = sum(part.shape[-1] for part in q) if isinstance(q, tuple) else first.shape[-1]
        all_heads = first.new_empty(first.shape[1] * self.world_size, first.shape[0], width).transpose(0, 1)
        return Plan.decode(
            all_heads,
            cache,
            out_dtype=self.partial_dtype,
            context_parallel=self.share,
            context=self.context,
            **batch,
        )

    def decode(
        self,
        q: Rows,
        cache: Cache,
        *,
        attn_sink: torch.Tensor | None = None,
        d_v: int | None = None,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
        **batch: Any,
    ) -> Any:
        """Computes the attention of this rank's heads over the tokens of all ranks, like :func:`libmla.decode`.

        Causality and windows are in global positions, also for several queries of a request.

        Args:
            q: [T, H, d_qk] or a pair, of this rank's heads.
            cache: this rank's.
            attn_sink: [H] f32, of this rank's heads.
            d_v: as in :func:`libmla.decode`.
            out: [T, H, d_v]; bf16, f16 or f32.
            out_dtype: the type of a new ``out``; None: q's, or bf16 for e4m3 queries.
            return_lse: whether to return lse.
            **batch: ``kv_len``, ``sm_scale``, this rank's page table, and any of the options ``qo_indptr``, ``causal``,
                ``window_left``, ``logits_soft_cap``, ``compute``, ``q_scale``, ``tree_mask``, ``tree_parents``,
                ``batch_invariant`` and ``plan`` (from :meth:`plan`), as in :func:`libmla.decode`. ``alibi_slopes`` are
                those of all ranks' heads.

        Returns:
            o [T, H, d_v], or (o, lse [T, H] f32, natural logarithm).
        """

        def attend(q_all: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
            ops.decode(
                q_all,
                cache,
                out=o,
                lse=lse,
                lse_base="e",
                lse_inf_without_keys=False,
                context_parallel=self.share,
                context=self.context,
                **batch,
            )

        return self._attend(attend, q, cache, attn_sink, d_v, out, out_dtype, return_lse)

    def decode_sparse(
        self,
        q: Rows,
        cache: Cache,
        indices: torch.Tensor,
        *,
        sm_scale: float,
        kv_len: torch.Tensor,
        block_table: Pages = None,
        kv_indptr: Pages = None,
        kv_indices: Pages = None,
        qo_indptr: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        d_v: int | None = None,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """Computes the attention of this rank's heads over the tokens that indices name, wherever they are.

        Args:
            q, cache, attn_sink, d_v, out, out_dtype, return_lse: as in :meth:`decode`.
            indices: [T, topk] tokens of the query's request, by their global positions, the same on every rank; -1 and
                positions beyond kv_len are skipped.
            sm_scale: as in :func:`libmla.decode`.
            kv_len, block_table, kv_indptr, kv_indices, qo_indptr: as in :meth:`decode`.
            topk_length: [T] int32: indices from it on are skipped.
            **options: ``q_scale``, ``logits_soft_cap``, ``compute`` and ``batch_invariant``, as in
                :func:`libmla.decode_sparse`.

        Returns:
            o [T, H, d_v], or (o, lse [T, H] f32, natural logarithm).
        """
        slots, count = ops.physical_slots(
            indices,
            kv_len=kv_len,
            page_size=_page_size(cache),
            block_table=block_table,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            topk_length=topk_length,
            qo_indptr=qo_indptr,
            context_parallel=self.share,
            compact=True,
            return_valid_count=True,
            context=self.context,
        )

        def attend(q_all: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
            ops.decode_sparse(
                q_all,
                cache,
                slots,
                topk_length=count,
                topk_length_per="token",
                sm_scale=sm_scale,
                out=o,
                lse=lse,
                lse_base="e",
                lse_inf_without_keys=False,
                context=self.context,
                **options,
            )

        return self._attend(attend, q, cache, attn_sink, d_v, out, out_dtype, return_lse)

    def _attend(
        self,
        attend: Any,
        q: Rows,
        cache: Cache,
        attn_sink: torch.Tensor | None,
        d_v: int | None,
        out: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        return_lse: bool,
    ) -> Any:
        """Gathers the heads, lets `attend` write the partial results, and combines them."""
        parts = q if isinstance(q, tuple) else (q,)
        if any(part.ndim != 3 for part in parts):
            raise ValueError(f"q: expected [T, H, d_qk], or a pair of such parts, got {[list(p.shape) for p in parts]}")
        tokens, heads = parts[0].shape[:2]
        check_sink(attn_sink, heads)
        width = _value_width(parts, cache, d_v)
        natural = torch.bfloat16 if parts[0].dtype.itemsize == 1 else parts[0].dtype
        if self.partial_dtype not in (torch.float32, natural):
            raise TypeError(
                f"partial_dtype: expected torch.float32 or {natural}, as for queries of {parts[0].dtype}, "
                f"got {self.partial_dtype}"
            )
        if out is None:
            out = parts[0].new_empty(tokens, heads, width, dtype=out_dtype or natural)
        elif tuple(out.shape) != (tokens, heads, width):
            raise ValueError(f"out: expected [{tokens}, {heads}, {width}], got {list(out.shape)}")

        # Bytes, since not every group moves every type; heads first, as partial results are.
        mine = torch.cat([part.view(torch.uint8).transpose(0, 1) for part in parts], -1)
        q_all = gather_first(mine, self.group).view(parts[0].dtype).transpose(0, 1)
        states = new_states(self.method, parts[0], heads * self.world_size, width, self.partial_dtype, self.group)
        attend(q_all, states.o, states.lse)
        lse = finish(states, out, attn_sink, self.context)
        return (out, lse) if return_lse else out


def _page_size(cache: Cache) -> int:
    if isinstance(cache, KvCache):
        return cache.page_size or (cache.ckv if cache.kv is None else cache.kv).shape[1]
    return (cache[0] if isinstance(cache, tuple) else cache).shape[1]


def _value_width(q: tuple[torch.Tensor, ...], cache: Cache, d_v: int | None) -> int:
    """Returns the width of the value, found as :func:`libmla.decode` finds it."""
    if d_v is not None:
        return d_v
    if isinstance(cache, KvCache) and cache.format == "fp8_dsv4":
        return sum(part.shape[-1] for part in q)
    ckv = cache.ckv if isinstance(cache, KvCache) else cache[0] if isinstance(cache, tuple) else None
    if len(q) == 2 or ckv is not None:
        return (q[0] if len(q) == 2 else ckv).shape[-1]
    return 1 << q[0].shape[-1].bit_length() - 1
