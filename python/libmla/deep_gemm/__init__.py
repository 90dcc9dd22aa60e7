# SPDX-License-Identifier: Apache-2.0
"""Offers the indexer functions of DeepGEMM over libmla: names, argument order, defaults and shapes are the peer's.

Change ``import deep_gemm`` to ``from libmla import deep_gemm``, or call ``libmla.install_as("deep_gemm")`` first in a
program that cannot be edited. docs/compatibility.md says where the two differ; what is no indexer is not here.
"""

from __future__ import annotations

from typing import get_args

import torch

from libmla._indexing import indexer_logits
from libmla.library import indexer_page_bytes
from libmla.types import IndexerFormat

#: The version of the peer whose interface this is; libmla's own is ``libmla.__version__``.
__version__ = "2.6.1"

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
]

_HEAD_DIM = 128
_SCALES = 4  # bytes of a key's scales, in all formats
_PAGE = 64  # keys of the pages that keys without pages are copied into
_PACKED_FP4 = torch.int8  # the type by which the peer names two e2m1 in a byte
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def get_num_sms() -> int:
    """Returns how many multiprocessors the current GPU has; 1 without one."""
    if not torch.cuda.is_available():
        return 1
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns [num_sms + 1, 2] int32 for the calls that want it; libmla's kernels need no schedule."""
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the logits of keys in pages, [B * next_n, max_context_len] f32.

    q: [B, next_n, H, 128] e4m3. kv_cache: bytes [blocks, block_kv, 1, 132], in each block first all keys, then all
    scales. weights: [B * next_n, H] f32. context_lens: the keys that each query sees, [B, next_n] int32, or those of
    each request, [B], of which query i sees all but next_n - 1 - i. block_table: [B, blocks of a request] int32. Logits
    of keys that a query does not see are -inf, whether ``clean_logits`` is set or not.
    """
    return fp8_fp4_paged_mqa_logits(
        (q, None),
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        clean_logits,
        indices=indices,
    )


def fp8_fp4_paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the same with logits of ``logits_dtype``, and of FP4 too.

    q: queries of e4m3 and None; or FP4: two e2m1 in a byte, int8 [B, next_n, H, 64], and four UE8M0 scales in an int32
    [B, next_n, H]. kv_cache: keys of e4m3, or of FP4 [blocks, block_kv, 1, 68]. Either goes with either.
    """
    queries = _queries(q)
    if indices is not None:
        raise ValueError("indices: expected None, got a tensor: queries of varying number are not taken")
    if queries.ndim != 4:
        raise ValueError(f"q: expected shape [B, next_n, H, {_HEAD_DIM}], got {list(queries.shape)}")
    rows = {indexer_page_bytes(1, format): format for format in get_args(IndexerFormat)}
    row = kv_cache.shape[-1]
    if kv_cache.ndim != 4 or kv_cache.shape[2] != 1 or row not in rows or kv_cache.stride(1) != row:
        shapes = " or ".join(f"[block_kv, 1, {row}]" for row in rows)
        raise ValueError(f"kv_cache: expected blocks of {shapes} in one run, got {list(kv_cache.shape)}")
    blocks, block_kv = kv_cache.shape[:2]
    more = {"kv_len": context_lens}
    if context_lens.ndim == 2:
        more = {"kv_len": context_lens.amax(1), "key_end": context_lens.reshape(-1)}
    return indexer_logits(
        queries.reshape(-1, *queries.shape[2:]),
        weights,
        kv_cache.as_strided((blocks, block_kv * row), (kv_cache.stride(0), 1)),
        page_size=block_kv,
        format=rows[row],
        block_table=block_table,
        max_kv_len=max_context_len,
        logits_dtype=logits_dtype,
        **more,
    )


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """Computes the logits of keys that stand in one row, [T, S] f32.

    q: [T, H, 128] e4m3. kv: keys [S, 128] e4m3 and their scales [S] f32. weights: [T, H] f32. Query t sees keys
    [cu_seq_len_k_start[t], cu_seq_len_k_end[t]); the logits of others are -inf, whether ``clean_logits`` is set or not.
    With ``max_seqlen_k`` a row has the logits of the keys from cu_seq_len_k_start[t] on, [T, max_seqlen_k].
    """
    return fp8_fp4_mqa_logits((q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)


def fp8_fp4_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Computes the same with logits of ``logits_dtype``, and of FP4 too.

    q: queries of e4m3 and None; or FP4: two e2m1 in a byte, int8 [T, H, 64], and four UE8M0 scales in an int32 [T, H].
    kv: keys of e4m3 with their scales; or FP4, int8 [S, 64] and int32 [S]. Either goes with either.
    """
    keys, scales = kv
    num_keys = keys.shape[0]
    pages, width = max(-(-num_keys // _PAGE), 1), max(num_keys, 1)
    logits = indexer_logits(
        _queries(q),
        weights,
        _paged(keys, scales, pages),
        page_size=_PAGE,
        format="mxfp4" if keys.dtype == _PACKED_FP4 else "fp8",
        kv_len=torch.full((1,), num_keys, dtype=torch.int32, device=keys.device),
        block_table=torch.arange(pages, dtype=torch.int32, device=keys.device)[None],
        key_begin=cu_seq_len_k_start,
        key_end=cu_seq_len_k_end,
        max_kv_len=width,
        logits_dtype=logits_dtype,
    )
    if max_seqlen_k > 0:
        columns = torch.arange(max_seqlen_k, device=keys.device) + cu_seq_len_k_start[:, None]
        inside = columns < cu_seq_len_k_end[:, None]
        return logits.gather(1, columns.clamp(0, width - 1)).masked_fill(~inside, -torch.inf)
    return logits[:, :num_keys]


def _queries(q: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    """Returns the queries as libmla takes them. Of FP4 they become bf16, which has all products with scales."""
    queries, scales = q
    if scales is None:
        return queries
    if queries.dtype != _PACKED_FP4 or scales.dtype != torch.int32 or queries.shape[-1] != _HEAD_DIM // 2:
        raise ValueError(
            f"q: expected FP4, int8 [..., {_HEAD_DIM // 2}] and int32, or e4m3 and None, "
            f"got {queries.dtype} {list(queries.shape)} and {scales.dtype}"
        )
    pairs = queries.view(torch.uint8)
    codes = torch.stack([pairs & 0xF, pairs >> 4], dim=-1).flatten(-2)  # the even channel is in the low half
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=queries.device)[codes.int()]
    exponents = scales.contiguous().view(torch.uint8).unflatten(-1, (*scales.shape[-1:], _SCALES)).int()
    factors = (exponents << 23).view(torch.float32).masked_fill(exponents == 0xFF, torch.nan)
    return (values.unflatten(-1, (_SCALES, -1)) * factors[..., None]).flatten(-2).bfloat16()


def _paged(keys: torch.Tensor, scales: torch.Tensor, pages: int) -> torch.Tensor:
    """Copies keys and scales into pages, each of which holds all its keys, then all its scales."""
    key = keys.shape[1]
    cache = torch.zeros(pages, _PAGE * (key + _SCALES), dtype=torch.uint8, device=keys.device)
    whole, rest = divmod(keys.shape[0], _PAGE)
    of_keys = cache[:, : _PAGE * key].view(pages, _PAGE, key)
    of_scales = cache[:, _PAGE * key :].view(scales.dtype)
    bytes_of_keys = keys.view(torch.uint8)
    of_keys[:whole] = bytes_of_keys[: whole * _PAGE].reshape(whole, _PAGE, key)
    of_scales[:whole] = scales[: whole * _PAGE].reshape(whole, _PAGE)
    if rest > 0:
        of_keys[whole, :rest] = bytes_of_keys[whole * _PAGE :]
        of_scales[whole, :rest] = scales[whole * _PAGE :]
    return cache
