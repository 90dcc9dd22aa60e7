# SPDX-License-Identifier: Apache-2.0
"""Index tools and the sparse-attention indexer; :mod:`libmla.ops` says what holds for all operations."""

from __future__ import annotations

from typing import Any

from . import _core
from ._call import call, two
from .context import Context
from .frameworks import operation
from .types import Tensor

_block_table_to_csr = _core.function("block_table_to_csr")
_physical_slots = _core.function("physical_slots")
_append_indexer = _core.function("append_indexer")
_indexer_logits = _core.function("indexer_logits")
_top_k = _core.function("top_k")
_indexer_top_k = _core.function("indexer_top_k")


@operation
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
    made = call(
        _block_table_to_csr,
        "block_table_to_csr",
        context,
        None,
        (block_table, kv_len, page_size, kv_indptr, kv_indices),
    )
    return two(made, kv_indptr, kv_indices)


@operation
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
    want_count = return_valid_count or valid_count is not None
    made = call(
        _physical_slots,
        "physical_slots",
        context,
        None,
        (
            indices,
            topk_length,
            qo_indptr,
            kv_len,
            block_table,
            kv_indptr,
            kv_indices,
            page_size,
            context_parallel,
            compact,
            slots,
            want_count,
            valid_count,
        ),
    )
    if want_count:
        return two(made, slots, valid_count)
    return made if slots is None else slots


@operation
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
    call(_append_indexer, "append_indexer", context, None, (k, slot_mapping, cache, page_size, power_of_two_scales))


@operation
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
    """The indexer's scores: ``logits[t][j] = sum_h weights[t][h] * max(0, q[t][h] . k[j]) * scale[j]``.

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
    made = call(
        _indexer_logits,
        "indexer_logits",
        context,
        None,
        (
            q,
            weights,
            cache,
            page_size,
            kv_len,
            block_table,
            kv_indptr,
            kv_indices,
            qo_indptr,
            causal,
            max_kv_len,
            logits,
        ),
    )
    return made if logits is None else logits


@operation
def top_k(
    logits: Tensor,
    k: int,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    context: Context | None = None,
) -> Tensor:
    """The indices of the k largest logits of every row, ascending; of equal ones the lower index wins.

    Args:
        logits: [T, N] f32. NaN counts as less than -inf.
        k: at least 1.
        lengths: [T] int32: the first lengths[t] logits count; None: all.
        indices: [T, k] int32.

    Returns:
        ``indices``; rows shorter than k end in -1.
    """
    made = call(_top_k, "top_k", context, None, (logits, k, lengths, indices))
    return made if indices is None else indices


@operation
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
    latent_page_size: int | None = None,
    latent_block_table: Tensor | None = None,
    latent_kv_indptr: Tensor | None = None,
    latent_kv_indices: Tensor | None = None,
    max_kv_len: int | None = None,
    logits: Tensor | None = None,
    slots: Tensor | None = None,
    valid_count: Tensor | None = None,
    return_valid_count: bool = False,
    context: Context | None = None,
) -> Any:
    """From the indexer's query to the slots that sparse attention takes.

    :func:`indexer_logits`, :func:`top_k` and :func:`physical_slots` in one.

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
    want_count = return_valid_count or valid_count is not None
    made = call(
        _indexer_top_k,
        "indexer_top_k",
        context,
        None,
        (
            q,
            weights,
            cache,
            page_size,
            kv_len,
            block_table,
            kv_indptr,
            kv_indices,
            qo_indptr,
            causal,
            max_kv_len,
            logits,
            k,
            latent_block_table,
            latent_kv_indptr,
            latent_kv_indices,
            latent_page_size,
            slots,
            want_count,
            valid_count,
        ),
    )
    if want_count:
        return two(made, slots, valid_count)
    return made if slots is None else slots
