# SPDX-License-Identifier: Apache-2.0
"""Declares the index tools and the sparse-attention indexer; :mod:`libmla.ops` says what holds for all operations."""

from __future__ import annotations

from typing import Any

from ._operation import Output, operation
from .context import Context
from .types import Compute, DType, IndexerFormat, Tensor


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
    ratio: int = 1,
    list_tokens: bool = False,
    compact: bool = False,
    slots: Tensor | None = None,
    valid_count: Tensor | None = None,
    return_valid_count: bool = False,
    context: Context | None = None,
) -> Any:
    """Turns request-local token indices into physical slots. What names no token of the request becomes -1.

    Args:
        indices: [T, topk] int32, tokens of the query's request, or groups of ``ratio`` tokens.
        kv_len, block_table, kv_indptr, kv_indices: the page table, as in :func:`decode`.
        page_size: tokens of a page.
        topk_length: [T] int32: indices from it on count as -1.
        qo_indptr: [B+1] int32; None: T / B queries each.
        context_parallel: (rank, world, interleave): tokens of other ranks become -1.
        ratio: tokens of a group; kv_len counts tokens.
        list_tokens: False: a group has one row, in a pool whose pages the page table names (DeepSeek V4). True: the
            pages are of the tokens' cache (GLM-5.3): all tokens of each group are listed, and behind those of the last
            index the tokens that the query sees (causal as in :func:`decode`) of the group that is not complete yet.
        compact: the valid slots of a row move to its front, in order.
        slots: [T, topk] int32, may be ``indices``; with ``list_tokens`` [T, at least topk * ratio + ratio - 1].
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
    format: IndexerFormat = "fp8",
    power_of_two_scales: bool = True,
    context: Context | None = None,
) -> None:
    """Quantizes one indexer key per token, 128 channels, into its slot of the indexer's cache.

    Args:
        k: [T, 128]; bf16, f16 or f32.
        slot_mapping: [T] int64; negative: skipped.
        cache: bytes [num_pages, indexer_page_bytes(page_size, format) or more]; is written.
        page_size: tokens of a page.
        format: of the keys: ``"fp8"``, 128 e4m3 with one f32 scale; or ``"mxfp4"``, 128 e2m1 with a UE8M0 scale for each
            32 channels.
        power_of_two_scales: whether scales are rounded up to powers of two; those of ``"mxfp4"`` always are.
    """


@operation(Output("logits"))
def indexer_logits(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    *,
    page_size: int,
    format: IndexerFormat = "fp8",
    kv_len: Tensor,
    block_table: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    causal: bool = True,
    ratio: int = 1,
    key_begin: Tensor | None = None,
    key_end: Tensor | None = None,
    blocks: Tensor | None = None,
    block_size: int = 1,
    compute: Compute = "default",
    max_kv_len: int | None = None,
    logits_dtype: DType | None = None,
    logits: Tensor | None = None,
    context: Context | None = None,
) -> Tensor:
    """Computes the indexer's scores: ``logits[t][j] = sum_h weights[t][h] * max(0, q[t][h] . k[j]) * scale[j]``.

    Keys that query t does not see (causal as in :func:`decode`, kv_len) get -inf. If ``blocks`` lists blocks of keys
    for each query (DeepSeek V4.1), a row has the logits of the listed keys, in the order of the list.

    Args:
        q: [T, H, 128]; e4m3 (also as uint8), bf16, f16 or f32. Scales of quantized queries belong into ``weights``.
        weights: [T, H] f32.
        cache: bytes [num_pages, indexer_page_bytes(page_size, format) or more].
        page_size: tokens of a page.
        format: of the keys, as in :func:`append_indexer`. Those of ``"mxfp4"`` have scales in k, and scale[j] is 1.
        kv_len, block_table, kv_indptr, kv_indices: its page table, as in :func:`decode`.
        qo_indptr: [B+1] int32; None: T / B queries each.
        causal: see above.
        ratio: tokens that a key stands for; kv_len counts tokens, and a query sees a key if it sees all its tokens.
        key_begin, key_end: [T] int32: query t sees keys [key_begin[t], key_end[t]) of its request, as far as it has
            them. Without ``key_begin`` they begin with key 0; without ``key_end`` ``causal`` says where they end.
        blocks: [T, M] int32: logit j of query t is that of key
            ``blocks[t][j // block_size] * block_size + j % block_size``; of a block that is negative or has no key, all
            logits are -inf.
        block_size: keys of a block.
        compute: "exact" sums ``q . k`` in f32. By default ("fp8" is the same) those of e4m3 queries may be summed as
            Hopper's tensor cores sum products of e4m3, in about 14 bits, and MXFP4 keys may become e4m3 of one scale
            each (groups with a scale 2^16 times smaller than the key's largest count as zeros). That is up to three
            times as fast there, and what DeepGEMM does; elsewhere nothing changes.
        max_kv_len: width of new ``logits``; None: what the page table has room for, or M * block_size.
        logits_dtype: the type of new ``logits``: f32, bf16 or f16; None: f32.
        logits: [T, N] f32, bf16 or f16, N at least the most keys of a request, or M * block_size. Those of 16 bits are
            rounded once, to nearest even; finite ones beyond the range of their type become its largest finite number.

    Returns:
        ``logits``.
    """


@operation(Output("indices"))
def top_k(
    logits: Tensor,
    k: int,
    *,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    blocks: Tensor | None = None,
    block_size: int = 1,
    indices: Tensor | None = None,
    context: Context | None = None,
) -> Tensor:
    """Finds the indices of the k largest logits of every row, ascending; of equal ones the lower index wins.

    Args:
        logits: [T, N] f32, bf16 or f16. NaN counts as less than -inf.
        k: at least 1.
        lengths: [T] int32: the first lengths[t] logits count; None: all.
        starts: [T] int32: of these, those before starts[t] do not count; not with blocks.
        blocks: [T, M] int32: as given to :func:`indexer_logits`. Indices are of keys then, in the order of the list;
            logits of -inf and NaN are never chosen.
        block_size: keys of a listed block. Without ``blocks``, a size above 1 chooses blocks of so many neighbouring
            logits (the candidate blocks of DeepSeek V4.1): the one that has the last logit, which is seldom whole, and
            the k - 1 others with the largest logits. Indices are of blocks then.
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
    format: IndexerFormat = "fp8",
    kv_len: Tensor,
    block_table: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    causal: bool = True,
    ratio: int = 1,
    key_begin: Tensor | None = None,
    key_end: Tensor | None = None,
    blocks: Tensor | None = None,
    block_size: int = 1,
    compute: Compute = "default",
    max_kv_len: int | None = None,
    logits_dtype: DType | None = None,
    context: Context | None = None,
    latent_page_size: int | None = None,
    latent_block_table: Tensor | None = None,
    latent_kv_indptr: Tensor | None = None,
    latent_kv_indices: Tensor | None = None,
    context_parallel: tuple[int, int, int] | None = None,
    list_tokens: bool = False,
    logits: Tensor | None = None,
    slots: Tensor | None = None,
    valid_count: Tensor | None = None,
    return_valid_count: bool = False,
) -> Any:
    """Computes, from the indexer's query, the slots that sparse attention takes.

    It is :func:`indexer_logits`, :func:`top_k` and :func:`physical_slots` in one.

    Args:
        q, weights, cache, page_size, format: as in :func:`indexer_logits`.
        k: keys that are selected for each query.
        kv_len, block_table, kv_indptr, kv_indices: the page table of the indexer's cache.
        qo_indptr, causal, ratio, key_begin, key_end, blocks, block_size, compute: as in :func:`indexer_logits`.
        latent_page_size: tokens of a page of the latent cache, or rows of a page of the pool that has one for ``ratio``
            tokens; None: ``page_size``.
        latent_block_table, latent_kv_indptr, latent_kv_indices: its page table; None: that of the indexer's cache.
        context_parallel: (rank, world, interleave): of the selected keys, the rank's own are listed. The latent cache and
            its page table hold the rank's tokens only, the indexer's cache the keys of all ranks.
        list_tokens: True: the pages are of the tokens' cache (GLM-5.3). All tokens of each selected key are listed, and
            behind them those that the query sees (causal as in :func:`decode`) of the group that is not complete yet.
        max_kv_len, logits_dtype, logits: scratch, as in :func:`indexer_logits`; -inf where a key is not seen. Logits are
            compared as they are stored: those of 16 bits have more ties, and of equal ones the lower index wins.
        slots: [T, at least k] int32; with ``list_tokens`` [T, at least k * ratio + ratio - 1].
        valid_count: [T] int32, valid slots of each row.
        return_valid_count: whether to return valid_count; implied by ``valid_count``.

    Returns:
        slots, -1 behind the valid ones; or (slots, valid_count).
    """
