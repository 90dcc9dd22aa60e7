# SPDX-License-Identifier: Apache-2.0
"""Says which rank has which tokens and heads, by arithmetic without communication.

Positions and lengths are integers, or arrays of integers of torch, numpy or JAX, and so are the results. Nothing is
looked at on the host: arrays on a GPU stay there.
"""

from __future__ import annotations

from typing import Any

from ..types import Tensor


def check_share(rank: int, world_size: int, interleave: int) -> tuple[int, int, int]:
    """Returns (rank, world_size, interleave), the ``context_parallel`` argument of libmla's operations. Raises
    ValueError if one is out of range."""
    if world_size < 1:
        raise ValueError(f"world_size: expected at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: expected 0 to {world_size - 1}, below world_size, got {rank}")
    if interleave < 1:
        raise ValueError(f"interleave: expected at least 1 token, got {interleave}")
    return rank, world_size, interleave


def local_kv_len(kv_len: Any, rank: int, world_size: int, interleave: int = 1) -> Any:
    """Returns how many of a request's first ``kv_len`` tokens a rank has.

    It is also where the token at position ``kv_len`` goes on its own rank. 0 is normal for short requests.
    """
    check_share(rank, world_size, interleave)
    round_of_all = world_size * interleave
    rest = kv_len % round_of_all - rank * interleave
    rest = rest.clip(0, interleave) if hasattr(rest, "clip") else min(max(rest, 0), interleave)
    return kv_len // round_of_all * interleave + rest


def locate(position: Any, world_size: int, interleave: int = 1) -> tuple[Any, Any]:
    """Returns (rank, local position) of the token at a position of its request: who has it, and where in its own
    order."""
    check_share(0, world_size, interleave)
    block = position // interleave
    return block % world_size, block // world_size * interleave + position % interleave


def global_position(local_position: Any, rank: int, world_size: int, interleave: int = 1) -> Any:
    """Returns the position in the request of a rank's token; the inverse of :func:`locate`."""
    check_share(rank, world_size, interleave)
    return (local_position // interleave * world_size + rank) * interleave + local_position % interleave


def shard_heads(heads: Tensor, rank: int, world_size: int, *, dim: int = -2) -> Tensor:
    """Returns a rank's equal part of the heads of all ranks, as a view.

    Args:
        heads: a tensor with the heads of all ranks, such as q [T, H, d_qk] (``dim=-2``) or a sink [H] (``dim=0``).
        rank, world_size: whose part.
        dim: where the heads are.
    """
    check_share(rank, world_size, 1)
    count = heads.shape[dim]
    if count % world_size:
        raise ValueError(
            f"heads: expected a number of heads that {world_size} ranks can share equally, got {count}; "
            "choose a world size that divides it, or pad the heads"
        )
    index = [slice(None)] * heads.ndim
    index[dim] = slice(rank * count // world_size, (rank + 1) * count // world_size)
    return heads[tuple(index)]
