# SPDX-License-Identifier: Apache-2.0
"""Computes one layer's attention in the form that costs least: expanded for prompts, absorbed for what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import libmla
from libmla.types import Compute

from .latents import Latents
from .step import Step

_PREFIX_ROWS = 16384
"""Cached rows that are expanded at a time."""
_FEW_QUERIES = 32
"""Up to this many queries, weights are the left factor: as a transposed right one, torch copies bf16 ones on CPUs."""


@dataclass(frozen=True)
class LatentQuery:
    """Holds what ``select_keys`` chooses keys for: one layer's queries, absorbed, and the cache that they look into.

    T is the number of queries in the batch, without padding; B is the number of requests.
    """

    layer: int
    q_nope: torch.Tensor
    """[T, H, kv_lora_rank]: score = sm_scale * (q_nope . ckv + q_pe . kpe)."""
    q_pe: torch.Tensor
    """[T, H, qk_rope_head_dim]."""
    sm_scale: float
    positions: torch.Tensor
    """[T] int64: where the query is among its request's tokens; it sees keys 0 to this one."""
    qo_indptr: torch.Tensor
    """[B+1] int32: first query of each request."""
    kv_len: torch.Tensor
    """[B] int32: cached tokens of each request, those of the queries included."""
    block_table: torch.Tensor
    """[B, pages] int32."""
    cache: libmla.types.Cache
    """The layer's pages, with the rows of all these tokens."""
    page_size: int


SelectKeys = Callable[[LatentQuery], "torch.Tensor | None"]


@dataclass
class Settings:
    """Says how a patched model's layers attend; :func:`libmla.integrations.transformers.patch` says what each means."""

    absorb: str
    context: libmla.Context | None
    select_keys: SelectKeys | None
    compute: Compute = "default"
    projections: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    """The weights of up-projections that are no plain linear layers."""


class LayerAttention:
    """Computes one layer's attention in one forward; its new rows are in the cache, if there is one.

    Queries are [T, H, qk_nope_head_dim + qk_rope_head_dim], results [T, H, v_head_dim].

    Args:
        module: has ``kv_b_proj`` and the widths of heads.
        settings: how to attend.
        latents: new rows.
        step: the batch.
        sm_scale: the scale of scores.
        options: attn_sink, window_left, logits_soft_cap, if there are any.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        latents: Latents,
        step: Step,
        sm_scale: float,
        options: dict[str, Any],
    ) -> None:
        self._module, self._settings, self._step, self._layer = module, settings, step, latents.layer
        self._named = {"sm_scale": sm_scale, **options}
        self._nope, self._rope, self._d_v = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
        self._rank = latents.ckv.shape[-1]
        self._ckv, self._kpe = step.pack(latents.ckv[:, 0]), step.pack(latents.kpe[:, 0])
        self._cache = latents.cache
        if self._cache is None:
            return
        self._pool = self._cache.pages.pool(latents.layer, self._rank, latents.kpe.shape[-1], latents.ckv.device)
        if not latents.written:
            rows = self._stored(self._ckv, self._kpe)
            libmla.append(rows, step.slots, self._pool.cache, context=settings.context)
            latents.written = True

    @property
    def _expands(self) -> bool:
        """Returns whether new tokens alone are attended, as the model computed them."""
        return self._cache is None or (self._settings.absorb == "decode" and not any(self._step.past))

    def dense(self, q: torch.Tensor) -> torch.Tensor:
        """Computes attention in which every query sees all keys up to its own."""
        if self._expands:
            return self._prefill(q, **self._named)
        if (
            self._settings.absorb == "decode"
            and "window_left" not in self._named
            and max(self._step.q_lengths) >= self._queries_worth_expanding()
        ):
            return self._prefill_behind_prefix(q)
        step = self._step
        o = self._planned(
            "decode",
            self._stored(*self._absorbed(q)),
            self._pool.cache,
            kv_len=step.kv_len,
            block_table=step.block_table,
            qo_indptr=None if len(set(step.q_lengths)) == 1 else step.qo_indptr,
            d_v=self._rank,
            compute=self._settings.compute,
            **self._named,
        )
        return self._values(o)

    def sparse(self, q: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        """Computes attention in which every query sees the keys that ``selected`` names.

        ``selected`` is [T, topk] int32: rows of the request; -1: none.
        """
        step, context = self._step, self._settings.context
        if self._expands:
            rows = torch.cat([self._ckv, self._kpe], dim=-1)
            rows = rows.bfloat16() if rows.dtype == torch.float32 else rows
            first = step.qo_indptr[step.request][:, None]
            indices = torch.where(selected >= 0, selected + first, -1)
            q_wide = torch.cat(self._absorbed(q), dim=-1)
            o = self._planned("prefill_sparse", q_wide, rows, indices, d_v=self._rank, **self._named)
        else:
            slots = libmla.physical_slots(
                selected,
                kv_len=step.kv_len,
                block_table=step.block_table,
                page_size=step.page_size,
                qo_indptr=step.qo_indptr,
                context=context,
            )
            pair = self._stored(*self._absorbed(q))
            named = {"d_v": self._rank, "compute": self._settings.compute, **self._named}
            o = self._planned("decode_sparse", pair, self._pool.cache, slots, **named)
        return self._values(o)

    def selected(self, select_keys: SelectKeys, q: torch.Tensor) -> torch.Tensor | None:
        """Returns what ``select_keys`` selects for these queries."""
        step = self._step
        q_nope, q_pe = self._absorbed(q)
        return select_keys(
            LatentQuery(
                layer=self._layer,
                q_nope=q_nope,
                q_pe=q_pe,
                sm_scale=self._named["sm_scale"],
                positions=step.positions,
                qo_indptr=step.qo_indptr,
                kv_len=step.kv_len,
                block_table=step.block_table,
                cache=self._pool.cache,
                page_size=step.page_size,
            )
        )

    def _prefill(self, q: torch.Tensor, **named: Any) -> Any:
        """Computes attention in the expanded form, over the new tokens alone."""
        k, v = self._expanded(self._ckv, self._kpe)
        indptr = self._step.qo_indptr
        return self._planned("prefill", q, k, v, qo_indptr=indptr, kv_indptr=indptr, **named)

    def _prefill_behind_prefix(self, q: torch.Tensor) -> torch.Tensor:
        """Computes attention in the expanded form, over the new tokens and, some rows at a time, the cached ones."""
        step, context = self._step, self._settings.context
        named = dict(self._named)
        sink = named.pop("attn_sink", None)
        o, lse = self._prefill(q, return_lse=True, **named)
        at_a_time = max(_PREFIX_ROWS // step.batch, 1)
        for start in range(0, max(step.past), at_a_time):
            num_rows, indptr, first = step.slice_of_past(start, at_a_time)
            rows = libmla.gather(
                self._pool.cache,
                kv_len=step.kv_len,
                block_table=step.block_table,
                out_indptr=indptr,
                token_start=first,
                num_rows=num_rows,
                out_dtype=q.dtype,
                context=context,
            )
            k, v = self._expanded(rows[:, : self._rank], rows[:, self._rank : self._rank + self._rope])
            part = libmla.prefill(
                q,
                k,
                v,
                qo_indptr=step.qo_indptr,
                kv_indptr=indptr,
                causal=False,
                return_lse=True,
                context=context,
                **named,
            )
            libmla.merge_states(part[0][None], part[1][None], out=o, lse=lse, in_place=True, context=context)
        return o if sink is None else o * torch.sigmoid(lse - sink)[..., None].to(o.dtype)

    def _queries_worth_expanding(self) -> float:
        """Returns from how many queries of a request on it costs less to expand its prefix than to absorb.

        Costs are counted in multiply-adds of one head and key. The absorbed form needs 2 rank + rope for each query;
        the expanded one needs nope + rope + d_v for each query, and (nope + d_v) rank once.
        """
        return (self._nope + self._d_v) * self._rank / max(2 * self._rank - self._nope - self._d_v, 1)

    def _planned(self, operation: str, *tensors: Any, **named: Any) -> Any:
        """Runs the operation, which one plan serves in all layers that are alike."""
        run, context = getattr(libmla, operation), self._settings.context
        key = (operation, *map(_shape, tensors), *((name, _shape(value)) for name, value in named.items()))
        if key not in self._step.plans:
            self._step.plans[key] = getattr(libmla.Plan, operation)(*tensors, context=context, **named)
        return run(*tensors, plan=self._step.plans[key], **named)

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns W_UK [H, nope, rank] and W_UV [H, d_v, rank]."""
        up, known = self._module.kv_b_proj, self._settings.projections
        if type(up) is nn.Linear:
            weight = up.weight
        else:
            if up not in known:
                known[up] = up(torch.eye(self._rank, dtype=self._ckv.dtype, device=self._ckv.device)).T.contiguous()
            weight = known[up]
        whole = weight.view(-1, self._nope + self._d_v, self._rank)
        return whole[:, : self._nope], whole[:, self._nope :]

    def _absorbed(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q_nope [T, H, rank], with W_UK in it, and q_pe [T, H, rope]."""
        q_nope, q_pe = q.split([self._nope, self._rope], dim=-1)
        return torch.bmm(q_nope.transpose(0, 1), self._weights()[0]).transpose(0, 1), q_pe

    def _stored(self, latent: torch.Tensor, rotary: torch.Tensor) -> Any:
        """Returns rows or queries as wide as the pool's rows."""
        return (latent, self._pool.pad(rotary)) if self._rope else latent

    def _values(self, o: torch.Tensor) -> torch.Tensor:
        """Multiplies o [T, H, rank] by W_UV and returns [T, H, d_v]."""
        w_uv = self._weights()[1]
        if len(o) <= _FEW_QUERIES:
            return torch.bmm(w_uv, o.permute(1, 2, 0)).permute(2, 0, 1)
        return torch.bmm(o.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)

    def _expanded(self, ckv: torch.Tensor, kpe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns k [S, H, nope + rope] and v [S, H, d_v] of rows."""
        both = self._module.kv_b_proj(ckv).unflatten(-1, (-1, self._nope + self._d_v))
        k_nope, v = both.split([self._nope, self._d_v], dim=-1)
        return torch.cat([k_nope, kpe[:, None].expand(-1, both.shape[1], -1)], dim=-1), v


def _shape(value: Any) -> Any:
    """Returns what a plan depends on beside lengths: shapes but for the first dimension, and options."""
    if isinstance(value, torch.Tensor):
        return (value.device, value.shape[1:])
    if isinstance(value, tuple):
        return tuple(map(_shape, value))
    return None if isinstance(value, libmla.KvCache) else value
