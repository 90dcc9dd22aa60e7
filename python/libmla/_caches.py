# SPDX-License-Identifier: Apache-2.0
"""Declares the operations that merge states and finish outputs, and those that write, read and copy caches; :mod:`libmla.ops` says what holds for
all operations."""

from __future__ import annotations

from ._operation import Output, operation
from .context import Context
from .types import Arguments, Cache, DType, IndexerFormat, LseBase, Rows, Tensor


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

    States with lse = -inf weigh nothing; if all do, o = 0 and lse = -inf. States that have lse = +inf by
    ``lse_inf_without_keys`` cannot be merged.

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


@operation(written=("cache",))
def append(rows: Rows, slot_mapping: Tensor, cache: Cache, *, context: Context | None = None) -> None:
    """Writes each token's latent row into its cache slot, quantized as the cache's format is.

    Args:
        rows: [T, kv_lora_rank + qk_rope_head_dim], or the pair (ckv [T, kv_lora_rank], kpe [T, qk_rope_head_dim]);
            bf16, f16 or f32.
        slot_mapping: [T] int64: page * page_size + offset; a negative slot skips the token. All others must differ.
        cache: is written.
    """


@operation(Output("q_out", "q"), written=("cache",))
def append_rope(
    ckv: Tensor,
    kpe: Tensor | None,
    slot_mapping: Tensor,
    cache: Cache,
    *,
    cos_sin: Tensor | None = None,
    positions: Tensor | None = None,
    q: tuple[Tensor, Tensor | None] | None = None,
    interleaved: bool = True,
    q_norm: bool = False,
    q_norm_weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    q_scale: Tensor | None = None,
    q_out: Tensor | None = None,
    q_out_dtype: DType | None = None,
    context: Context | None = None,
) -> Tensor | None:
    """Normalizes queries and keys, rotates their rotary parts, quantizes, and appends the keys, in one pass.

    Where a norm is asked for, ``x / sqrt(mean(x^2) + norm_eps) * weight``, in f32, is what is rotated. Rows without
    rotary channels (GLM-5.3-Flash, Kimi K3) have None for ``kpe``, ``cos_sin``, ``positions`` and the second of ``q``:
    nothing turns, and all else is done.

    Args:
        ckv: [T, kv_lora_rank]; bf16, f16 or f32.
        kpe: [T, qk_rope_head_dim], not yet rotated, of ckv's type; None: rows have no rotary channels.
        slot_mapping: [T] int64; a negative slot writes no key, the query still.
        cache: is written.
        cos_sin: [max_positions, qk_rope_head_dim] f32: cosines of all angles, then sines; with ``kpe``.
        positions: [T] int64, below max_positions; with ``kpe``.
        q: (q_nope [T, H, kv_lora_rank], q_pe [T, H, qk_rope_head_dim], None without ``kpe``); None: only keys are written.
        interleaved: pairs are channels (2i, 2i + 1), as DeepSeek's; else (i, i + qk_rope_head_dim / 2).
        q_norm: whether [q_nope | q_pe] of each token and head is normalized, as DeepSeek V4's.
        q_norm_weight: [kv_lora_rank + qk_rope_head_dim], with ``q_norm``; bf16, f16 or f32; None: 1.
        norm_weight: [kv_lora_rank + qk_rope_head_dim] where keys are normalized as whole rows (V4), [kv_lora_rank]
            where their latent part is (V3.2); bf16, f16 or f32; None: keys are as they come.
        norm_eps: of both norms.
        q_scale: [1] f32: e4m3 queries are divided by it.
        q_out: [T, H, kv_lora_rank + qk_rope_head_dim]: bf16, f16, f32, or e4m3 with ``q_scale``.
        q_out_dtype: the type of a new ``q_out``; None: e4m3 with ``q_scale``, else that of ``q``.

    Returns:
        The rotated queries, or None without ``q``.
    """


@operation(Output("out"), Output("scale", "return_scale"))
def finish_output(
    attention_out: Tensor,
    *,
    cos_sin: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = True,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: DType | None = None,
    scale: Tensor | None = None,
    return_scale: bool = False,
    channels_per_scale: int = 128,
    power_of_two_scales: bool = True,
    context: Context | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Makes of attention's output what the output projection multiplies, in one pass.

    It turns the rotary channels of the values back (DeepSeek V4's outputs still have the rotation), multiplies by a
    gate, ``attention_out / (1 + exp(-gate))``, and quantizes groups of channels to e4m3.

    Args:
        attention_out: [T, H, d_v]; bf16, f16 or f32.
        cos_sin: [max_positions, rotary channels] f32, as in :func:`append_rope`: of the last channels of
            ``attention_out``; None: nothing turns.
        positions: [T] int64, below max_positions; with ``cos_sin``.
        interleaved: pairs are channels (2i, 2i + 1), as DeepSeek's; else (i, i + rotary channels / 2).
        gate: [T, H, d_v], or [T, H, 1] with one gate for a head; bf16, f16 or f32.
        out: [T, H, d_v], or [T, G, H / G, d_v] where groups of heads lie apart; bf16, f16, f32, or e4m3 with scales.
        out_dtype: the type of a new ``out``; None: e4m3 with scales, else that of
            ``attention_out``.
        scale: [T, H, S] with one scale for each 32, 64 or 128 channels, or [T, G, H / G, S] as ``out``, with any
            strides: f32; uint8, the exponents of powers of two (UE8M0); or int32 [.., S / 4], four of these each.
        return_scale: whether to quantize and to return the scales; implied by ``scale``.
        channels_per_scale: those of a new ``scale``, which is f32.
        power_of_two_scales: whether f32 scales are rounded up to powers of two; the others always are.

    Returns:
        out, or (out, scale).

    Example:
        DeepSeek V4: queries turned by their positions, attention, and what wo_a multiplies::

            o = libmla.decode_sparse(q, window, indices, sm_scale=512**-0.5)
            out, scale = libmla.finish_output(o, cos_sin=cos_sin, positions=positions, return_scale=True)
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


@operation(written=("to_cache",))
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


@operation(Output("latent"), written=("state", "cache", "indexer_cache", "append"), parts={"append": "append_rope"})
def compress(
    kv: Tensor,
    score: Tensor | None = None,
    *,
    kv_len: Tensor,
    ratio: int = 1,
    overlap: bool = False,
    state: Tensor | None = None,
    state_table: Tensor | None = None,
    position_bias: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    slot_mapping: Tensor | None = None,
    cache: Cache | None = None,
    indexer_cache: Tensor | None = None,
    indexer_page_size: int = 0,
    indexer_format: IndexerFormat = "fp8",
    cos_sin: Tensor | None = None,
    interleaved: bool = True,
    power_of_two_scales: bool = True,
    append: Arguments | None = None,
    latent: Tensor | None = None,
    latent_dtype: DType | None = None,
    context: Context | None = None,
) -> Tensor:
    """Pools every ``ratio`` tokens of a request into one latent, and appends it to a compressed pool or an indexer's.

    For each channel c of the group that ends with a new token, in f32::

        weight[p][c] = softmax over the group's tokens p of score[p][c] + position_bias[p % ratio][c]
        latent[c]    = norm(sum_p weight[p][c] * kv[p][c]),  norm(x) = x / sqrt(mean(x^2) + norm_eps) * norm_weight

    The last token of the group has the latent's row of ``latent`` and its slot of ``slot_mapping``; a group whose last
    token is still to come writes nothing yet. With ``overlap`` a latent is pooled from 2 ratio tokens: channels 0 to
    D - 1 of the group before, where there is one, and D to 2 D - 1 of its own. With a ratio of 1 nothing is pooled: a
    token's latent is its norm.

    What later calls need of the new tokens is kept in ``state``: that of position p in row p % block_size of block
    state_table[b][p // block_size % C]. So results do not depend, bit by bit, on how a prompt is divided into calls. A
    request whose last j tokens were rejected goes on with kv_len reduced by j, if there is room for j + ratio - 1
    tokens (with overlap j + 2 ratio - 1).

    Args:
        kv: [T, W], W = D, with overlap 2 D; bf16, f16 or f32.
        score: [T, W], of kv's type; None where ratio is 1.
        kv_len: [B] int32, tokens of each request, the new ones included. Where it is less than their number, the first
            of them are padding.
        ratio: tokens of a group, from 1 to 65536.
        overlap: whether the group before is pooled too.
        state: [num_blocks, block_size, 2 W] f32, is read and written: kv, then score + position_bias; None where ratio
            is 1. What is in it before a request's first token does not matter.
        state_table: [B, C] int32, blocks of ``state``: with C = 1 a ring for each request, with as many columns as a
            request has blocks paged as a cache is. Room for ratio - 1 tokens, with overlap 2 ratio - 1, or more. A
            negative entry keeps nothing, and tokens without state count as absent.
        position_bias: [ratio, W] f32; None: zeros.
        qo_indptr: [B+1] int32, first new token of each request; None: T / B tokens each.
        norm_weight: [D]; bf16, f16 or f32; None: latents are not normalized.
        norm_eps: see above.
        slot_mapping: [T] int64, slots of ``cache`` or ``indexer_cache``, of tokens that end a group; negative: the
            latent is in ``latent`` only. None: that holds for all.
        cache: is written; its rows have D channels.
        indexer_cache: bytes [num_pages, indexer_page_bytes(indexer_page_size, indexer_format) or more]; is written in
            place of ``cache``; D is 128.
        indexer_page_size: tokens of a page of ``indexer_cache``.
        indexer_format: of its keys, as in :func:`append_indexer`.
        cos_sin: [max_positions, rotary channels] f32: cosines of all angles, then sines. The last channels of what
            is appended (not of ``latent``) are turned by the angles of the group's first position. None: nothing turns.
        interleaved: pairs are channels (2i, 2i + 1), as DeepSeek's; else (i, i + rotary channels / 2).
        power_of_two_scales: whether scales of the indexer's keys are rounded up to powers of two, as in
            :func:`append_indexer`.
        append: arguments of :func:`append_rope`, by name, which is done in the same call for the same T tokens, to a
            cache of its own (the window of V4); with ``q`` also ``q_out``. The bits are those of two calls; on a GPU
            keys of bf16 that become e4m3 need no launch of their own.
        latent: [T, D]; bf16, f16 or f32. Rows of tokens that end no group are not written: in a new one they hold
            anything. What is appended is the latent as rounded here.
        latent_dtype: the type of a new ``latent``; None: that of ``kv``.

    Returns:
        ``latent``.

    Raises:
        ValueError: an argument does not fit the others, as ``score`` with a ratio of 1, or a state without room for a
            group; nothing is written then.

    Example:
        V4's ratio of 4: a prompt of 10 tokens gives two latents, of 8 and 9 something is kept, and the third comes with
        token 11::

            pool = torch.zeros(1, 64, 512, dtype=torch.bfloat16)
            layer = {"ratio": 4, "overlap": True, "position_bias": torch.zeros(4, 1024), "norm_weight": torch.ones(512)}
            kept = {"state": torch.empty(1, 8, 2048), "state_table": torch.zeros(1, 1, dtype=torch.int32)}
            for kv_len, new in ((10, 10), (12, 2)):
                kv, score = torch.randn(2, new, 1024)
                ends = torch.arange(kv_len - new + 1, kv_len + 1)
                slots = torch.where(ends % 4 == 0, ends // 4 - 1, -1)  # of a request that has the pool's first pages
                kv_len = torch.tensor([kv_len], dtype=torch.int32)
                libmla.compress(kv, score, kv_len=kv_len, slot_mapping=slots, cache=pool, **layer, **kept)
    """
