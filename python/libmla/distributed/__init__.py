# SPDX-License-Identifier: Apache-2.0
"""Computes decode with context parallelism: the cached tokens of every request are dealt out to the ranks of a group.

Token i of a request lives on rank ``(i // interleave) % world_size``. Each rank keeps its own cache and page table of
the tokens that it has, and attends to them with the heads of all ranks; the partial results are combined by their lse.

:class:`ContextParallel` does that over torch.distributed, with gloo on CPUs and NCCL on GPUs. :func:`combine` is its
last step, for partial results from elsewhere. The other functions are arithmetic on integers or arrays, for programs
with collectives of their own.
"""

from __future__ import annotations

from .combine import combine
from .context_parallel import ContextParallel
from .shares import global_position, local_kv_len, locate, shard_heads

__all__ = ["ContextParallel", "combine", "global_position", "local_kv_len", "locate", "shard_heads"]
