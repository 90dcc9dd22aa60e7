# SPDX-License-Identifier: Apache-2.0
"""Partial results of all heads on every rank become whole results of each rank's own heads.

There are two ways over the wire, with the same results up to rounding. In both, heads stand first in what is sent, so
that each rank's part is contiguous and nothing is rearranged; kernels write their partial results there directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist

from .. import ops
from ..context import Context

Method: TypeAlias = Literal["all_to_all", "all_gather"]
Group: TypeAlias = "dist.ProcessGroup | None"

# Their names before torch 2.13.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_first(part: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns the contiguous parts of all ranks, one after the other along the first dimension."""
    whole = part.new_empty(dist.get_world_size(group) * part.shape[0], *part.shape[1:])
    _all_gather(whole, part, group=group)
    return whole


class PartialStates(Protocol):
    """Holds a rank's partial results of the heads of all ranks, in the layout in which they travel.

    Attributes:
        o: [T, H, d_v], of the type in which partial results travel; to be written.
        lse: [T, H] f32, natural logarithm; to be written.
    """

    o: torch.Tensor
    lse: torch.Tensor

    def combine(self, out: torch.Tensor, context: Context | None) -> torch.Tensor:
        """Writes the whole results of this rank's heads into ``out`` [T, H / world_size, d_v]; returns their lse.

        Leaves o and lse changed.
        """
        ...


class AllToAll:
    """Every rank sends each other rank that one's heads, o and lse in one message, and merges what it got."""

    def __init__(self, like: torch.Tensor, heads: int, d_v: int, dtype: torch.dtype, group: Group) -> None:
        self._group = group
        self._dtype = dtype
        self._width = d_v * dtype.itemsize
        # A row of bytes: o, lse, and padding that keeps rows aligned for vector loads.
        row_bytes = self._width + 16 + -self._width % 16
        self._message = like.new_empty(heads, like.shape[0], row_bytes, dtype=torch.uint8)
        self.o, self.lse = (part.transpose(0, 1) for part in self._parts(self._message))

    def _parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lse = message[..., self._width : self._width + 4]
        return message[..., : self._width].view(self._dtype), lse.view(torch.float32).squeeze(-1)

    def combine(self, out: torch.Tensor, context: Context | None) -> torch.Tensor:
        received = torch.empty_like(self._message)
        dist.all_to_all_single(received, self._message, group=self._group)
        o, lse = self._parts(received.unflatten(0, (-1, out.shape[1])))
        return ops.merge_states(o.transpose(1, 2), lse.transpose(1, 2), out=out, context=context)[1]


class AllGather:
    """All ranks learn the lse of all and weigh their partial results, which a reduce-scatter then sums."""

    def __init__(self, like: torch.Tensor, heads: int, d_v: int, dtype: torch.dtype, group: Group) -> None:
        self._group = group
        self._o = like.new_empty(heads, like.shape[0], d_v, dtype=dtype)
        self._lse = like.new_empty(heads, like.shape[0], dtype=torch.float32)
        self.o, self.lse = self._o.transpose(0, 1), self._lse.transpose(0, 1)

    def combine(self, out: torch.Tensor, context: Context | None) -> torch.Tensor:
        rank, heads = dist.get_rank(self._group), out.shape[1]
        lse_of_all = gather_first(self._lse, self._group).unflatten(0, (-1, self._lse.shape[0]))
        lse = torch.logsumexp(lse_of_all, 0)
        # A partial result without keys has lse = -inf and may hold anything.
        empty = self._lse == -math.inf
        self._o.mul_(torch.exp(self._lse - lse).unsqueeze(-1)).masked_fill_(empty.unsqueeze(-1), 0)
        mine = self._o.new_empty(heads, *self._o.shape[1:])
        _reduce_scatter(mine, self._o, group=self._group)
        out.copy_(mine.transpose(0, 1))
        return lse[rank * heads : (rank + 1) * heads].transpose(0, 1)


_METHODS: dict[str, type[AllToAll | AllGather]] = {"all_to_all": AllToAll, "all_gather": AllGather}


def check_method(method: str) -> None:
    if method not in _METHODS:
        raise ValueError(f"method: expected one of {', '.join(_METHODS)}, got {method!r}")


def check_partial_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"partial_dtype: expected torch.float32, bfloat16 or float16, got {dtype}")


def new_states(
    method: Method, like: torch.Tensor, heads: int, d_v: int, dtype: torch.dtype, group: Group
) -> PartialStates:
    """Makes room for the partial results of ``heads`` heads and as many tokens as ``like`` has, on its device."""
    return _METHODS[method](like, heads, d_v, dtype, group)


def finish(
    states: PartialStates,
    out: torch.Tensor,
    attn_sink: torch.Tensor | None,
    context: Context | None,
) -> torch.Tensor:
    """Combines the states into ``out`` [T, heads of this rank, d_v], applies the sink once, and returns lse."""
    if attn_sink is None:
        return states.combine(out, context)
    whole = torch.empty_like(out, dtype=torch.float32)
    lse = states.combine(whole, context)
    # exp(lse) / (exp(lse) + exp(sink)); rows without keys are 0 already.
    share = torch.sigmoid(lse - attn_sink).masked_fill_(attn_sink == -math.inf, 1)
    out.copy_(whole.mul_(share.unsqueeze(-1)))
    return lse


def check_sink(attn_sink: torch.Tensor | None, heads: int) -> None:
    if attn_sink is not None and tuple(attn_sink.shape) != (heads,):
        raise ValueError(f"attn_sink: expected [{heads}], a value per head of this rank, got {list(attn_sink.shape)}")


def combine(
    partial_o: torch.Tensor,
    partial_lse: torch.Tensor,
    group: Group = None,
    *,
    method: Method = "all_to_all",
    attn_sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    context: Context | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines the ranks' partial results by their lse; each rank gets those of its own heads.

    Every rank calls it with its partial results of the same queries and heads. Nothing waits for the host: on GPUs it
    may be captured in a CUDA graph.

    Args:
        partial_o: [T, H, d_v] over this rank's keys, f32, bf16 or f16, in which type it travels. H counts the heads of
            all ranks, in their order. What a row without keys holds does not matter.
        partial_lse: [T, H] f32, natural logarithm, without the sink; -inf where this rank has no key.
        group: the ranks; None: the default group.
        method: ``"all_to_all"``: one exchange, then :func:`libmla.merge_states`; ``"all_gather"``: of lse, then a
            reduce-scatter of weighted partial results.
        attn_sink: [H / world_size] f32, natural-log logits of this rank's heads. Partial results must be without it.
        out: [T, H / world_size, d_v] is written.
        out_dtype: the type of a new ``out``; None: that of ``partial_o``.
        context: a :class:`libmla.Context` for the merge.

    Returns:
        (o [T, H / world_size, d_v], lse [T, H / world_size] f32). Rows without keys on any rank: o = 0, lse = -inf.

    Raises:
        ValueError: H is no multiple of the number of ranks; the method is unknown; a shape is wrong.
    """
    check_method(method)
    check_partial_dtype(partial_o.dtype)
    if partial_o.ndim != 3 or partial_lse.shape != partial_o.shape[:2]:
        raise ValueError(
            "combine: expected partial_o [T, H, d_v] and partial_lse [T, H], got "
            f"{list(partial_o.shape)} and {list(partial_lse.shape)}"
        )
    heads, world_size = partial_o.shape[1], dist.get_world_size(group)
    if heads % world_size:
        raise ValueError(
            f"partial_o: expected a number of heads that {world_size} ranks can share equally, got {heads}; "
            "choose a group whose size divides it, or pad the heads"
        )
    check_sink(attn_sink, heads // world_size)
    states = new_states(method, partial_o, heads, partial_o.shape[2], partial_o.dtype, group)
    states.o.copy_(partial_o)
    states.lse.copy_(partial_lse)
    if out is None:
        shape = (partial_o.shape[0], heads // world_size, partial_o.shape[2])
        out = partial_o.new_empty(shape, dtype=out_dtype)
    return out, finish(states, out, attn_sink, context)
