# SPDX-License-Identifier: Apache-2.0
"""Declares the attention operations; :mod:`libmla.ops` says what holds for all operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._operation import Output, operation
from .context import Context
from .types import Cache, Compute, DType, LengthPer, LseBase, Rows, Tensor

if TYPE_CHECKING:
    from .plan import Plan


@operation(Output("out"), Output("lse", "return_lse"))
def decode(
    q: Rows,
    cache: Cache,
    *,
    kv_len: Tensor,
    sm_scale: float,
    block_table: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    tree_mask: Tensor | None = None,
    tree_parents: Tensor | None = None,
    context_parallel: tuple[int, int, int] | None = None,
    causal: bool = True,
    window_left: int = -1,
    alibi_slopes: Tensor | None = None,
    attn_sink: Tensor | None = None,
    logits_soft_cap: float = 0.0,
    compute: Compute = "default",
    lse_base: LseBase = "e",
    lse_inf_without_keys: bool = False,
    batch_invariant: bool = False,
    shared_prefix: bool = False,
    d_v: int | None = None,
    q_scale: Tensor | None = None,
    o_scale: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: DType | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    plan: Plan | None = None,
    context: Context | None = None,
) -> Any:
    """Computes the attention of a batch over its paged latent cache, in the absorbed form.

    ``o = softmax(sm_scale * (q_nope . ckv + q_pe . kpe)) . ckv``, with one KV head for all query heads. Query i of a
    request with q_len queries sees key j iff ``j <= kv_len - q_len + i`` (causal), or every key. A query without a
    visible key gets o = 0 and lse = -inf (see ``lse_inf_without_keys``). What lies past kv_len is never read.

    Args:
        q: [T, H, d_qk], or the pair (q_nope [T, H, kv_lora_rank], q_pe [T, H, qk_rope_head_dim]); bf16, f16, f32, or
            e4m3 (also as uint8).
        cache: the paged cache, see :class:`libmla.KvCache`.
        kv_len: [B] int32, tokens of each request, those of the queries included; 0 is legal.
        sm_scale: the scale of scores, that before absorption: 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim).
        block_table: [B, max_pages] int32 page numbers; or
        kv_indptr: [B+1] int32 offsets into ``kv_indices``, in pages, and
        kv_indices: [kv_indptr[B] or more] int32 page numbers.
        qo_indptr: [B+1] int32, first query of each request; None: T / B queries each.
        causal: see above.
        q_scale: [1] f32, with e4m3 queries: what a stored query must be multiplied by.
        tree_mask: bool or uint8 [T, q_len_max or more]: where query t sees its request's draft j; or
        tree_parents: [T] int32, each draft's parent among its request's drafts, -1 for a root.
        attn_sink: [H] f32, natural-log logits: o is multiplied by exp(lse) / (exp(lse) + exp(sink)).
        window_left: a query sees its own position and this many before it; -1: all.
        logits_soft_cap: scores become cap * tanh(score / cap); 0: as they are.
        alibi_slopes: [H] f32: score += slope * (position of the key - position of the query).
        compute: "fp8" multiplies numbers of e4m3, with quantized caches: the elements of the cache as they are, queries
            with one scale for each token and head, and softmax weights with one for each 32 keys (on H100 and H200 for
            each 64) and group of channels; ``AttentionOptions`` in ``mla/params.h`` has every rounding. "default"
            ("exact" is the same) dequantizes keys to bf16.
        context_parallel: (rank, world, interleave): the cache and its page table hold this rank's tokens only.
        lse_base: base of the logarithm in ``lse``.
        lse_inf_without_keys: whether lse of a query without a visible key is +inf, as FlashMLA's, instead of -inf. Such
            states cannot be merged.
        batch_invariant: the bits of a request do not depend on the other requests.
        shared_prefix: rows that neighbouring requests share are read once for all of them. They are found when
            planning: whole pages that stand first in page tables of requests next to each other, before their own
            queries. So page tables must not change between ``plan`` and the calls with it.
        d_v: width of the value, where neither q, nor the cache, nor ``out`` says it; None: the largest power of two
            within d_qk (512 of 576, 256 of 320).
        out: [T, H, d_v], of q's type (bf16 for e4m3 queries), f32, or e4m3 with ``o_scale``.
        out_dtype: the type of a new ``out``.
        o_scale: [1] f32, with e4m3 outputs: o is divided by it.
        lse: [T, H] f32, where the log of the sum of the visible exponentials goes. It excludes the sink.
        return_lse: whether to return lse; implied by ``lse``.
        plan: a :class:`libmla.Plan` for these shapes and lengths; None: planned on the way.
        context: a :class:`libmla.Context`; None: the plan's, else the process's own.

    Returns:
        o, or (o, lse).
    """


@operation(
    Output("out"),
    Output("scale", "return_scale"),
    Output("max_logits", "return_max_logits"),
    Output("lse", "return_lse", implied_by="max_logits"),
)
def decode_sparse(
    q: Rows,
    cache: Cache,
    indices: Tensor,
    *,
    extra_cache: Cache | None = None,
    sm_scale: float,
    topk_length: Tensor | None = None,
    topk_length_per: LengthPer | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    extra_topk_length_per: LengthPer | None = None,
    qo_indptr: Tensor | None = None,
    attn_sink: Tensor | None = None,
    logits_soft_cap: float = 0.0,
    compute: Compute = "default",
    lse_base: LseBase = "e",
    lse_inf_without_keys: bool = False,
    batch_invariant: bool = False,
    d_v: int | None = None,
    q_scale: Tensor | None = None,
    o_scale: Tensor | None = None,
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
    max_logits: Tensor | None = None,
    return_max_logits: bool = False,
    lse: Tensor | None = None,
    return_lse: bool = False,
    plan: Plan | None = None,
    context: Context | None = None,
) -> Any:
    """Computes the attention of every query over the cached rows that its indices name, in one or two pools under one
    softmax. With the tokens of a prompt as queries it is sparse prefill from the pages of a cache of any format.

    Args:
        q: [T, H, d_qk], or the pair (q_nope, q_pe), as in :func:`decode`.
        cache: the pool, see :class:`libmla.KvCache`.
        indices: [T, topk] int32, physical slots, page * page_size + offset. A negative one, or one beyond the pool, is
            skipped wherever it stands.
        sm_scale: as in :func:`decode`.
        topk_length: int32 [T], or [B] with one length for all queries of a request: indices from it on are skipped.
        topk_length_per: "token" or "request": whom an entry of ``topk_length`` is for. None: as its shape says, which
            is refused where ``qo_indptr`` is given and T = B > 1.
        extra_cache: a second pool of the same row widths, with
        extra_indices: [T, extra_topk] int32 and
        extra_topk_length, extra_topk_length_per: as ``topk_length`` and ``topk_length_per``.
        qo_indptr: [B+1] int32, only with lengths per request; None: T / B queries each.
        q_scale, attn_sink, logits_soft_cap, compute, lse_base, lse_inf_without_keys, batch_invariant, d_v: as in
            :func:`decode`.
        out, out_dtype, o_scale, lse, return_lse, plan, context: as in :func:`decode`; ``out`` may also be [T, G, H / G,
            d_v], where groups of heads lie apart.
        cos_sin, positions, interleaved, gate: what becomes of o before it is stored, as in :func:`finish_output`: its
            last channels turn back, and a gate multiplies it. With any of these, and with ``scale``, o may first be
            rounded to bf16 where queries are bf16 or e4m3.
        scale, return_scale, channels_per_scale, power_of_two_scales: as in :func:`finish_output`: outputs of e4m3 in
            groups of channels, each with a scale, instead of ``o_scale``.
        max_logits: [T, H] f32, where the largest score goes (sm_scale included, -inf without a key).
        return_max_logits: whether to return max_logits, and lse with it; implied by ``max_logits``.

    Returns:
        o [T, H, d_v]; or (o, lse [T, H] f32); or (o, max_logits, lse). The scales come right behind o.

    Example:
        DeepSeek V4: attention that leaves what wo_a multiplies::

            out, scale = libmla.decode_sparse(
                q, window, indices, sm_scale=512**-0.5, cos_sin=cos_sin, positions=positions, return_scale=True
            )
    """


@operation(Output("out"), Output("lse", "return_lse"))
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    sm_scale: float,
    causal: bool = True,
    window_left: int = -1,
    alibi_slopes: Tensor | None = None,
    attn_sink: Tensor | None = None,
    logits_soft_cap: float = 0.0,
    compute: Compute = "default",
    lse_base: LseBase = "e",
    batch_invariant: bool = False,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    o_scale: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: DType | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    plan: Plan | None = None,
    context: Context | None = None,
) -> Any:
    """Computes the attention of a ragged batch in the up-projected form, with as many KV heads as query heads.

    Query i of a request sees key j iff ``j <= kv_len - q_len + i`` (causal), or every key of the request.

    Args:
        q: [T, H, d_qk]; bf16, f16, f32, or e4m3 (also as uint8).
        k: [S, H, d_qk], of q's type.
        v: [S, H, d_v], of q's type.
        qo_indptr: [B+1] int32, first query of each request.
        kv_indptr: [B+1] int32, first key of each request.
        sm_scale: the scale of scores.
        causal: see above.
        attn_sink, window_left, logits_soft_cap, alibi_slopes, lse_base, batch_invariant: as in :func:`decode`.
        compute: "fp8" multiplies numbers of e4m3, where q, k and v are: softmax weights become e4m3 too, with one scale
            for each 32 keys; ``AttentionOptions`` in ``mla/params.h`` has every rounding. "default" rounds nothing to
            e4m3.
        q_scale, k_scale, v_scale: [1] f32, with e4m3 tensors: what stored elements must be multiplied by.
        out: [T, H, d_v], of q's type or f32; with e4m3 tensors bf16, f32, or e4m3 with ``o_scale``.
        out_dtype: the type of a new ``out``; None: q's, or bf16 for e4m3.
        o_scale: [1] f32, with e4m3 outputs: o is divided by it.
        lse, return_lse, plan, context: as in :func:`decode`.

    Returns:
        o, or (o, lse [T, H] f32).
    """


@operation(
    Output("out"), Output("max_logits", "return_max_logits"), Output("lse", "return_lse", implied_by="max_logits")
)
def prefill_sparse(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    sm_scale: float,
    topk_length: Tensor | None = None,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    logits_soft_cap: float = 0.0,
    lse_base: LseBase = "e",
    lse_inf_without_keys: bool = False,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    out_dtype: DType | None = None,
    max_logits: Tensor | None = None,
    return_max_logits: bool = False,
    lse: Tensor | None = None,
    return_lse: bool = False,
    plan: Plan | None = None,
    context: Context | None = None,
) -> Any:
    """Computes the attention of every query over the rows that its indices name, of one dense tensor of rows.

    Args:
        q: [T, H, d_qk]; bf16, f16 or f32.
        kv: [S, d_qk]; bf16 or f16. The first ``d_v`` channels are the value.
        indices: [T, topk] int32, rows of ``kv``; negative, or S and above: skipped.
        sm_scale: the scale of scores.
        topk_length: [T] int32: indices from it on are skipped.
        d_v: width of the value, unless ``out`` says it.
        attn_sink, logits_soft_cap, lse_base, lse_inf_without_keys, batch_invariant: as in :func:`decode`.
        out: [T, H, d_v], of q's type or f32.
        out_dtype: the type of a new ``out``.
        max_logits: [T, H] f32, where the largest score goes (sm_scale included, -inf without a key).
        return_max_logits: whether to return max_logits, and lse with it; implied by ``max_logits``.
        lse, return_lse, plan, context: as in :func:`decode`.

    Returns:
        o; or (o, lse); or (o, max_logits, lse).
    """
