# SPDX-License-Identifier: Apache-2.0
"""Computes the MLA part of flashinfer-python (0.7) by libmla: change the import, and the program runs.

Modules mla, decode, prefill, cascade, page, topk, rope and concat_ops hold the functions and classes of their
namesakes: the same names, arguments, defaults, result shapes, base of lse (2) and values of rows without keys
(0, -inf). Tensors may lie on the CPU or on a GPU. What flashinfer restricts (head counts, page sizes, formats) is
restricted by libmla alone; what libmla does not have is refused with libmla.UnsupportedError, which says why.
"""

from typing import NoReturn

from libmla.flashinfer import cascade, concat_ops, decode, mla, page, prefill, rope, topk
from libmla.flashinfer.cascade import merge_state, merge_state_in_place, merge_states
from libmla.flashinfer.mla import BatchMLAPagedAttentionWrapper
from libmla.flashinfer.page import append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens
from libmla.flashinfer.prefill import (
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from libmla.flashinfer.topk import TopKTieBreak, top_k, top_k_page_table_transform, top_k_ragged_transform

__version__ = "0.7.2"
"""The version of flashinfer-python whose interface this is: programs compare it."""


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"libmla.flashinfer has no {name}: it stands for the MLA part of flashinfer only")


__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "TopKTieBreak",
    "append_paged_mla_kv_cache",
    "cascade",
    "concat_ops",
    "decode",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
    "page",
    "prefill",
    "rope",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "topk",
]
