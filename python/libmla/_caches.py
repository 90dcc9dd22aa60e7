# SPDX-License-Identifier: Apache-2.0
"""Declares the operations that merge states and that write, read and copy caches; :mod:`libmla.ops` says what holds for
all operations."""

from __future__ import annotations

from ._operation import Output, operation
from .context import Context
from .types import Cache, DType, LseBase, Rows, Tensor


@operation(Output("out"), Output("lse"))
def merge_states(
    partial_o: Tensor,
    partial_lse: Tensor,
    *,
    lse_base: LseBase = "e",
    in_place: bool = False,
    out: Tensor | None = None,
    out_dtype: DType | None = None,
    lse: Tensor | None = None,
    context: Context | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges N partial attention states: ``lse = log(sum exp(lse_n))``, ``o = sum exp(lse_n - lse) o_n``.

    States with lse = -inf weigh nothing; if all do, o = 0 and lse = -inf.

    Args:
        partial_o: [N, T, H, d_v]; bf16, f16 or f32.
        partial_lse: [N, T, H] f32.
        lse_base: base of the logarithm in ``partial_lse`` and ``lse``.
        out: [T, H, d_v]; bf16, f16 or f32.
        out_dtype: the type of a new ``out``; None: that of ``partial_o``.
        lse: [T, H] f32.
        in_place: ``out`` and ``lse``, both given, hold one more state, which is merged too.

    Returns:
        (o, lse).
    """


@operation(written="cache")
def append(rows: Rows, slot_mapping: Tensor, cache: Cache, *, context: Context | None = None) -> None:
    """Writes each token's latent row into its cache slot, quantized as the cache's format is.

    Args:
        rows: [T, kv_lora_rank + qk_rope_head_dim], or the pair (ckv [T, kv_lora_rank], kpe [T, qk_rope_head_dim]);
            bf16, f16 or f32.
        slot_mapping: [T] int64: page * page_size + offset; a negative slot skips the token. All others must differ.
        cache: is written.
    """


@operation(Output("q_out", "q"), written="cache")
def append_rope(
    ckv: Tensor,
    kpe: Tensor,
    slot_mapping: Tensor,
    cache: Cache,
    *,
    cos_sin: Tensor,
    positions: Tensor,
    q: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = True,
    q_scale: Tensor | None = None,
    q_out: Tensor | None = None,
    q_out_dtype: DType | None = None,
    context: Context | None = None,
) -> Tensor | None:
    """Rotates the rotary parts of queries and keys, quantizes, and appends the keys, in one pass.

    Args:
        ckv: [T, kv_lora_rank]; bf16, f16 or f32.
        kpe: [T, qk_rope_head_dim], not yet rotated, of ckv's type.
        slot_mapping: [T] int64; a negative slot writes no key, the query still.
        cache: is written.
        cos_sin: [max_positions, qk_rope_head_dim] f32: cosines of all angles, then sines.
        positions: [T] int64, below max_positions.
        q: (q_nope [T, H, kv_lora_rank], q_pe [T, H, qk_rope_head_dim]); None: only keys are written.
        interleaved: pairs are channels (2i, 2i + 1), as DeepSeek's; else (i, i + qk_rope_head_dim / 2).
        q_scale: [1] f32: e4m3 queries are divided by it.
        q_out: [T, H, kv_lora_rank + qk_rope_head_dim]: bf16, f16, f32, or e4m3 with ``q_scale``.
        q_out_dtype: the type of a new ``q_out``; None: e4m3 with ``q_scale``, else that of ``q``.

    Returns:
        The rotated queries, or None without ``q``.
    """


@operation(Output("out"))
def gather(
    cache: Cache,
    *,
    kv_len: Tensor,
    out_indptr: Tensor,
    block_table: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    token_start: Tensor | None = None,
    num_rows: int | None = None,
    out: Rows | None = None,
    out_dtype: DType | None = None,
    context: Context | None = None,
) -> Rows:
    """Copies a range of every request into dense rows, dequantized.

    Tokens ``token_start[b] ...`` of request b go to rows ``out_indptr[b] ... out_indptr[b+1] - 1``.

    Args:
        cache: is read.
        kv_len, block_table, kv_indptr, kv_indices: the page table, as in :func:`decode`.
        out_indptr: [B+1] int32, first row of each request.
        token_start: [B] int32; None: 0 everywhere.
        num_rows: rows of a new ``out``, out_indptr[B]; None: looked up, if out_indptr is in the memory of the CPU.
        out: [num_rows, kv_lora_rank + qk_rope_head_dim], or a pair of the two parts; bf16, f16 or f32.
        out_dtype: the type of a new ``out``; None: that of the cache's elements, bf16 for quantized ones.

    Returns:
        ``out``.
    """


@operation(written="to_cache")
def copy_pages(
    from_cache: Cache,
    from_pages: Tensor,
    to_cache: Cache,
    to_pages: Tensor,
    *,
    context: Context | None = None,
) -> None:
    """Copies whole pages from one cache into another, whose format and page size may differ.

    The tokens of pages from_pages[0], from_pages[1], ... fill pages to_pages[0], to_pages[1], ... in order. Rows of
    equal formats are copied bit for bit, their scales too; others are quantized and dequantized. So are those of equal
    formats whose scales may be any numbers in ``from_cache`` and must be powers of two in ``to_cache``
    (``KvCache.power_of_two_scales``); the other way round, powers of two are copied as they are.

    Args:
        from_cache: is read.
        from_pages: [N] int32, pages of it.
        to_cache: is written; of the same row widths, and not overlapping the pages that are read.
        to_pages: [M] int32, pages of it, all different; M times its page size = N times that of ``from_cache``.
    """
