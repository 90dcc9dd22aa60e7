# SPDX-License-Identifier: Apache-2.0
"""Declares the index tools and the sparse-attention indexer; :mod:`libmla.ops` says what holds for all operations."""

from __future__ import annotations

from typing import Any

from ._operation import Output, operation
from .context import Context
from .types import Tensor


@operation(Output("kv_indptr"), Output("kv_indices"))
def block_table_to_csr(
    block_table: Tensor,
    kv_len: Tensor,
    *,
    page_size: int,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    context: Context | None = None,
) -> tuple[Tensor, Tensor]:
    """Turns a padded block table into CSR.

    Args:
        block_table: [B, max_pages] int32.
        kv_len: [B] int32.
        page_size: tokens of a page.
        kv_indptr: [B+1] int32.
        kv_indices: [at least the sum of ceil(kv_len / page_size)] int32; a new one has room for B * max_pages.

    Returns:
        (kv_indptr, kv_indices).
    """


@operation(Output("slots"), Output("valid_count", "return_valid_count"))
def physical_slots(
    indices: Tensor,
    *,
    kv_len: Tensor,
    page_size: int,
    block_table: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    context_parallel: tuple[int, int, int] | None = None,
    compact: bool = False,
    slots: Tensor | None = None,
    valid_count: Tensor | None = None,
    return_valid_count: bool = False,
    context: Context | None = None,
) -> Any:
    """Turns request-local token indices into physical slots. What names no token of the request becomes -1.

    Args:
        indices: [T, topk] int32, tokens of the query's request.
        kv_len, block_table, kv_indptr, kv_indices: the page table, as in :func:`decode`.
        page_size: tokens of a page.
        topk_length: [T] int32: indices from it on count as -1.
        qo_indptr: [B+1] int32; None: T / B queries each.
        context_parallel: (rank, world, interleave): tokens of other ranks become -1.
        compact: the valid slots of a row move to its front, in order.
        slots: [T, topk] int32; may be ``indices``.
        valid_count: [T] int32, valid slots of each row.
        return_valid_count: whether to return valid_count; implied by ``valid_count``.

    Returns:
        slots, or (slots, valid_count).
    """


@operation(written=("cache",))
def append_indexer(
    k: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    *,
    page_size: int,
    power_of_two_scales: bool = True,
    context: Context | None = None,
) -> None:
    """Quantizes one indexer key per token, 128 channels with one scale, into its slot of the indexer's cache.

    Args:
        k: [T, 128]; bf16, f16 or f32.
        slot_mapping: [T] int64; negative: skipped.
        cache: bytes [num_pages, indexer_page_bytes(page_size) or more]; is written.
        page_size: tokens of a page.
        power_of_two_scales: whether scales are rounded up to powers of two.
    """


@operation(Output("logits"))
def indexer_logits(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    *,
    page_size: int,
    kv_len: Tensor,
    block_table: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    causal: bool = True,
    max_kv_len: int | None = None,
    logits: Tensor | None = None,
    context: Context | None = None,
) -> Tensor:
    """Computes the indexer's scores: ``logits[t][j] = sum_h weights[t][h] * max(0, q[t][h] . k[j]) * scale[j]``.

    Keys that query t does not see (causal as in :func:`decode`, kv_len) get -inf.

    Args:
        q: [T, H, 128]; e4m3 (also as uint8), bf16, f16 or f32. Scales of quantized queries belong into ``weights``.
        weights: [T, H] f32.
        cache: bytes [num_pages, indexer_page_bytes(page_size) or more].
        page_size: tokens of a page.
        kv_len, block_table, kv_indptr, kv_indices: its page table, as in :func:`decode`.
        qo_indptr: [B+1] int32; None: T / B queries each.
        causal: see above.
        max_kv_len: width of new ``logits``; None: what the page table has room for.
        logits: [T, N] f32, N at least the largest kv_len.

    Returns:
        ``logits``.
    """


@operation(Output("indices"))
def top_k(
    logits: Tensor,
    k: int,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    context: Context | None = None,
) -> Tensor:
    """Finds the indices of the k largest logits of every row, ascending; of equal ones the lower index wins.

    Args:
        logits: [T, N] f32. NaN counts as less than -inf.
        k: at least 1.
        lengths: [T] int32: the first lengths[t] logits count; None: all.
        indices: [T, k] int32.

    Returns:
        ``indices``; rows shorter than k end in -1.
    """


@operation(Output("logits", returned=False), Output("slots"), Output("valid_count", "return_valid_count"))
def indexer_top_k(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    k: int,
    *,
    page_size: int,
    kv_len: Tensor,
    block_table: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    causal: bool = True,
    max_kv_len: int | None = None,
    context: Context | None = None,
    latent_page_size: int | None = None,
    latent_block_table: Tensor | None = None,
    latent_kv_indptr: Tensor | None = None,
    latent_kv_indices: Tensor | None = None,
    logits: Tensor | None = None,
    slots: Tensor | None = None,
    valid_count: Tensor | None = None,
    return_valid_count: bool = False,
) -> Any:
    """Computes, from the indexer's query, the slots that sparse attention takes.

    It is :func:`indexer_logits`, :func:`top_k` and :func:`physical_slots` in one.

    Args:
        q, weights, cache, page_size: as in :func:`indexer_logits`.
        k: slots of each query.
        kv_len, block_table, kv_indptr, kv_indices: the page table of the indexer's cache.
        qo_indptr, causal: as in :func:`indexer_logits`.
        latent_page_size: tokens of a page of the latent cache; None: ``page_size``.
        latent_block_table, latent_kv_indptr, latent_kv_indices: its page table; None: that of the indexer's cache.
        max_kv_len, logits: scratch, as in :func:`indexer_logits`; -inf where a key is not seen.
        slots: [T, k] int32.
        valid_count: [T] int32, valid slots of each row.
        return_valid_count: whether to return valid_count; implied by ``valid_count``.

    Returns:
        slots, -1 behind the valid ones; or (slots, valid_count).
    """
