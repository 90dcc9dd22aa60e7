# SPDX-License-Identifier: Apache-2.0
"""Computes the functions of ``flash_mla.flash_mla_interface`` by libmla.

lse is a natural logarithm, float32. A query without a visible key gets out = 0 and, in decode and sparse prefill,
lse = +inf: the peer's convention (libmla's own is -inf). Inputs are read in place wherever their strides allow.

Beyond the peer, these are allowed: any number of heads, any page size, float16 and float32 queries, bfloat16 and
float16 caches in sparse decode, quantized caches in dense decode, attention sinks in dense decode, several KV heads in
sparse prefill, tensors on the CPU and on any GPU that libmla supports.

Arguments that cannot work raise ValueError or TypeError, and what no backend can do raises libmla.UnsupportedError.
"""

from typing import Any

import torch

import libmla
from libmla import _core
from libmla._call import TORCH_TENSORS, calling, compiling, gradients, refuse_gradients, refuse_without_memory
from libmla.flash_mla.metadata import FlashMLASchedMeta
from libmla.flash_mla.traced import traced_flash_mla_with_kvcache

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

_library = _core.function("flash_mla_with_kvcache")
_DIMS_OF_Q = "batch_size, seq_len_q, num_heads_q, head_dim"
_F32, _BF16, _E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Returns (an empty FlashMLASchedMeta, None). Arguments, which earlier versions of the peer need, are ignored."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | None,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    *,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decodes over a paged cache: over all keys of a request, or, with `indices`, over those that they name.

    q: [b, s_q, h_q, d_qk]; bfloat16, float16, float32, or float8_e4m3fn with descale_q.
    k_cache: [num_blocks, page_block_size, h_k, width], h_k dividing h_q. bfloat16 or float16 of width d_qk;
        or, with is_fp8_kvcache, bytes (float8_e4m3fn, uint8, int8) of width 656 (V3.2, GLM), 584 (V4: the scales of a
        page follow its data), or d_qk with descale_k. Packed rows (656, 584) have one KV head.
    block_table: [b, max_blocks] int32, and cache_seqlens: [b] int32; dense only, ignored with `indices`.
    head_dim_v: the first channels of a row, which are its value.
    tile_scheduler_metadata: of get_mla_metadata; None: plan for this call alone.
    num_splits: None; the second result of get_mla_metadata.
    softmax_scale: 1 / sqrt(d_qk) if None. Of an absorbed model it is 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim).
    causal: dense only; query i sees key j iff j <= cache_seqlen - s_q + i.
    indices: [b, s_q, topk] int32: block * page_block_size + offset; negative ones, and those beyond the cache, are
        skipped.
    attn_sink: [h_q] float32: out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)); lse excludes it.
    extra_k_cache, extra_indices_in_kvcache: a second pool under the same softmax; sparse only.
    topk_length, extra_topk_length: [b] (or [b, s_q]) int32; sparse only: entries of indices from it on are skipped.
    out: [b, s_q, h_q, head_dim_v] of the result's dtype, where it goes; None: a new tensor.
    enable_batch_invariant: the bits of a request do not depend on the other requests of the batch.
    kv_format: the layout of packed rows by name, "V32", "V32_NO_ROPE", "V4" or "V41"; None: as the width says. V41
        are rows of 528 bytes, beside which extra_k_cache may have rows of 288, both with the scales of a page after
        its data.
    descale_q, descale_k: [1] float32, not in the peer: what e4m3 queries, and an e4m3 cache of width d_qk, are
        multiplied by.

    Returns (out [b, s_q, h_q, head_dim_v] of q's dtype, bfloat16 for e4m3; softmax_lse [b, h_q, s_q] float32).
    """
    if num_splits is not None:
        raise ValueError("num_splits: expected None: how requests are split is in tile_scheduler_metadata")
    traced = type(q) not in TORCH_TENSORS or compiling()
    if traced:
        _expect_dims("q", q, _DIMS_OF_Q)
    try:
        b, s_q, h_q, _ = q.shape
    except ValueError:
        _expect_dims("q", q, _DIMS_OF_Q)
        raise
    scattered = s_q > 1 and b > 1
    if scattered:
        q, indices, topk_length = _at_one_stride(q, s_q), _at_one_stride(indices, s_q), _at_one_stride(topk_length, s_q)
        extra_indices_in_kvcache = _at_one_stride(extra_indices_in_kvcache, s_q)
        extra_topk_length = _at_one_stride(extra_topk_length, s_q)
    out_is_new = out is None
    if out_is_new:
        out = (
            q.new_empty(b, s_q, h_q, head_dim_v, dtype=_BF16)
            if q.dtype is _E4M3
            else q.new_empty(b, s_q, h_q, head_dim_v)
        )
    if s_q == 1 or (b == 1 and indices is None):
        lse = q.new_empty(b, h_q, s_q, dtype=_F32)
    else:
        lse = q.new_empty(b, s_q, h_q, dtype=_F32).transpose(1, 2)
    metadata: Any = None
    if tile_scheduler_metadata is not None:
        if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
            raise TypeError(
                "tile_scheduler_metadata: expected the FlashMLASchedMeta that get_mla_metadata returns, got "
                f"{type(tile_scheduler_metadata).__name__}"
            )
        metadata = tile_scheduler_metadata._handle
        if metadata is None:
            metadata = tile_scheduler_metadata._start()
    call = _library
    if traced:
        call = traced_flash_mla_with_kvcache
        metadata = 0 if metadata is None else tile_scheduler_metadata._number
    arguments = (
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        metadata,
        softmax_scale,
        causal,
        is_fp8_kvcache,
        indices,
        attn_sink,
        extra_k_cache,
        extra_indices_in_kvcache,
        topk_length,
        extra_topk_length,
        out,
        out_is_new,
        enable_batch_invariant,
        kv_format,
        descale_q,
        descale_k,
        lse,
    )
    if gradients():  # which tensors of integers have none of
        floats = (q, k_cache, attn_sink, extra_k_cache, out, descale_q, descale_k)
        refuse_gradients("flash_mla_with_kvcache", floats)
    try:
        call(*arguments)
    except RuntimeError:
        refuse_without_memory("flash_mla_with_kvcache", arguments)
        raise
    return out, lse.contiguous() if scattered and indices is None else lse


@calling({"out": "d_v"})
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes sparse prefill in the absorbed form.

    q: [s_q, h_q, d_qk]; bfloat16, float16 or float32.
    kv: [s_kv, h_kv, d_qk], bfloat16 or float16, h_kv dividing h_q; the first d_v channels of a row are its value.
    indices: [s_q, h_kv, topk] int32: rows of kv; negative ones, and those >= s_kv, are skipped.
    attn_sink: [h_q] float32: out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)); lse excludes it.
    topk_length: [s_q] int32: entries of indices from it on are skipped.
    out: [s_q, h_q, d_v] of q's dtype, where the result goes; None: a new tensor.

    Returns (out [s_q, h_q, d_v] of q's dtype, max_logits [s_q, h_q] float32, lse [s_q, h_q] float32). max_logits is the
    largest score, sm_scale included. A query without a valid index: out = 0, max_logits = -inf, lse = +inf.
    """
    _expect_dims("q", q, "s_q, h_q, d_qk")
    _expect_dims("kv", kv, "s_kv, h_kv, d_qk")
    _expect_dims("indices", indices, "s_q, h_kv, topk")
    s_q, h_q = q.shape[:2]
    h_kv = kv.shape[1]
    if indices.shape[1] != h_kv:
        raise ValueError(f"indices: expected {h_kv} KV heads in dimension 1, as in kv, got {indices.shape[1]}")
    group = _heads_per_kv_head(h_q, h_kv)
    if out is None:
        out = torch.empty(s_q, h_q, d_v, dtype=_out_dtype(q), device=q.device)
    _expect_output(out, (s_q, h_q, d_v), _out_dtype(q))
    max_logits, lse = (torch.empty(s_q, h_q, dtype=torch.float32, device=q.device) for _ in range(2))
    for kv_head in range(h_kv):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        libmla.prefill_sparse(
            q[:, heads],
            kv[:, kv_head],
            indices[:, kv_head],
            topk_length=topk_length,
            d_v=d_v,
            sm_scale=sm_scale,
            attn_sink=None if attn_sink is None else attn_sink[heads],
            out=out[:, heads],
            max_logits=max_logits[:, heads],
            lse=lse[:, heads],
            lse_inf_without_keys=True,
        )
    return out, max_logits, lse


@calling({"qo_indptr": "cu_seqlens_qo", "kv_indptr": "cu_seqlens_kv", "sm_scale": "softmax_scale"})
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ragged prefill in the up-projected form, forward only: backward raises NotImplementedError.

    q: [T, h_q, d_qk], k: [S, h_kv, d_qk], v: [S, h_kv, d_v]; bfloat16, float16 or float32, h_kv dividing h_q.
    cu_seqlens_qo, cu_seqlens_kv: [b + 1] int32, first query and first key of each request. They say everything:
        max_seqlen_qo, max_seqlen_kv and is_varlen are ignored.
    dropout_p: 0. deterministic: either; results always are.
    softmax_scale: 1 / sqrt(d_qk) if None.
    causal: query i of a request sees key j iff j <= kv_len - q_len + i.

    Returns (out [T, h_q, d_v] of q's dtype, lse [T, h_q] float32, whose tokens are contiguous). A query without a
    visible key: out = 0 and lse = -inf, as in the peer's kernel.
    """
    _refuse_dropout(dropout_p)
    return _flash_attn_varlen(q, k, v, cu_seqlens_qo, cu_seqlens_kv, causal, softmax_scale)


@calling(
    {
        "q": "qkv",
        "k": "qkv",
        "v": "qkv",
        "qo_indptr": "cu_seqlens",
        "kv_indptr": "cu_seqlens",
        "sm_scale": "softmax_scale",
    }
)
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes flash_attn_varlen_func over one tensor, qkv: [T, h, head_dim_qk + head_dim_qk + d_v]."""
    _refuse_dropout(dropout_p)
    q, k, v = qkv[..., :head_dim_qk], qkv[..., head_dim_qk : 2 * head_dim_qk], qkv[..., 2 * head_dim_qk :]
    return _flash_attn_varlen(q, k, v, cu_seqlens, cu_seqlens, causal, softmax_scale)


@calling(
    {
        "k": "kv",
        "v": "kv",
        "qo_indptr": "cu_seqlens_qo",
        "kv_indptr": "cu_seqlens_kv",
        "sm_scale": "softmax_scale",
    }
)
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes flash_attn_varlen_func over keys and values in one tensor, kv: [S, h_kv, head_dim_qk + d_v]."""
    _refuse_dropout(dropout_p)
    k, v = kv[..., :head_dim_qk], kv[..., head_dim_qk:]
    return _flash_attn_varlen(q, k, v, cu_seqlens_qo, cu_seqlens_kv, causal, softmax_scale)


class _ForwardOnly(torch.autograd.Function):
    """Keeps outputs of tensors that require gradients in the graph, so that backward says why there are none."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
        return _prefill(q.detach(), k.detach(), v.detach(), *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("flash_attn_varlen_func: libmla is for inference: it has no backward pass")


def _flash_attn_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _ForwardOnly.apply(q, k, v, *rest)
    return _prefill(q, k, v, *rest)


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _expect_dims(name, tensor, "tokens, heads, channels")
    num_tokens, h_q, d_qk = q.shape
    h_kv, d_v = v.shape[1:]
    if k.shape[1] != h_kv:
        raise ValueError(f"k: expected {h_kv} heads, as v has, got {k.shape[1]}")
    group = _heads_per_kv_head(h_q, h_kv)
    # As many heads at a time as one stride can describe: all, or those of one KV head.
    steps = [(slice(None), slice(None), h_q)]
    if group > 1:
        steps = [(slice(g * group, (g + 1) * group), slice(g, g + 1), group) for g in range(h_kv)]
    out = torch.empty(num_tokens, h_q, d_v, dtype=_out_dtype(q), device=q.device)
    lse = torch.empty(h_q, num_tokens, dtype=torch.float32, device=q.device).T
    plan = None
    for heads, kv_heads, count in steps:
        tensors = (q[:, heads], k[:, kv_heads].expand(-1, count, -1), v[:, kv_heads].expand(-1, count, -1))
        arguments: dict[str, Any] = {
            "qo_indptr": cu_seqlens_qo,
            "kv_indptr": cu_seqlens_kv,
            "causal": causal,
            "sm_scale": d_qk**-0.5 if softmax_scale is None else softmax_scale,
            "out": out[:, heads],
            "lse": lse[:, heads],
        }
        if plan is None and len(steps) > 1:
            plan = libmla.Plan.prefill(*tensors, **arguments)
        libmla.prefill(*tensors, plan=plan, **arguments)
    return out, lse


def _expect_dims(name: str, tensor: torch.Tensor, dims: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch tensor [{dims}], got {type(tensor).__name__}")
    if tensor.dim() != dims.count(",") + 1:
        raise ValueError(f"{name}: expected [{dims}], got shape {tuple(tensor.shape)}")


def _heads_per_kv_head(h_q: int, h_kv: int) -> int:
    if h_kv == 0 or h_q % h_kv != 0:
        raise ValueError(f"expected the KV heads to divide the {h_q} query heads, got {h_kv} KV heads")
    return h_q // h_kv


def _at_one_stride(rows: Any, s_q: int) -> Any:
    """Returns a tensor [b, s_q, ...] with all query tokens at one stride, a copy if they are not; others as they are."""
    if not isinstance(rows, torch.Tensor) or rows.dim() < 2 or rows.stride(0) == s_q * rows.stride(1):
        return rows
    return rows.contiguous()


def _expect_output(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out: expected {list(shape)} of {dtype}, got {list(out.shape)} of {out.dtype}")


def _out_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p: libmla is for inference; expected 0, got {dropout_p}")
