# SPDX-License-Identifier: Apache-2.0
"""Computes the functions of ``flash_mla.flash_mla_interface`` by libmla.

lse is a natural logarithm, float32. A query without a visible key gets out = 0 and, in decode and sparse prefill,
lse = +inf: the peer's convention (libmla's own is -inf). Inputs are read in place wherever their strides allow.

Beyond the peer, these are allowed: any number of heads, any page size, float16 and float32 queries, bfloat16 and
float16 caches in sparse decode, quantized caches in dense decode, attention sinks in dense decode, several KV heads in
sparse prefill, tensors on the CPU and on any GPU that libmla supports.

Arguments that cannot work raise ValueError or TypeError, and what no backend can do raises libmla.UnsupportedError.
"""

import dataclasses
from typing import Any

import torch

import libmla
from libmla._call import calling
from libmla.flash_mla.caches import kv_cache

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Holds a plan, which the first call of flash_mla_with_kvcache that is given it makes, and the next ones use.

    Calls that share it have equal shapes and equal values of cache_seqlens. On a GPU, a first call inside a captured
    graph puts the planning into the graph. Setting `tile_scheduler_metadata` to None, or `have_initialized` to False,
    plans again.
    """

    @dataclasses.dataclass
    class Config:
        """Holds what the calls that share a plan have in common; topk and extra_ fields are None if not given."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int

        causal: bool
        is_fp8_kvcache: bool
        topk: int | None

        extra_page_block_size: int | None
        extra_topk: int | None

        enable_batch_invariant: bool = False

    have_initialized: bool = False

    config: Config | None = None

    tile_scheduler_metadata: torch.Tensor | None = None  # the plan's workspace
    num_splits: torch.Tensor | None = None  # [1] int32: partial states to be merged

    plan: libmla.Plan | None = dataclasses.field(default=None, repr=False, compare=False)


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Returns (an empty FlashMLASchedMeta, None). Arguments, which earlier versions of the peer need, are ignored."""
    return FlashMLASchedMeta(), None


@calling(
    {
        "kv_len": "cache_seqlens",
        "cache": "k_cache",
        "cache.kv": "k_cache",
        "cache.ckv_scale": "descale_k",
        "extra_cache": "extra_k_cache",
        "extra_cache.kv": "extra_k_cache",
        "extra_cache.ckv_scale": "descale_k",
        "extra_indices": "extra_indices_in_kvcache",
        "q_scale": "descale_q",
        "sm_scale": "softmax_scale",
        "out": "head_dim_v",
    }
)
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
    _expect_dims("q", q, "batch_size, seq_len_q, num_heads_q, head_dim")
    _expect_dims("k_cache", k_cache, "num_blocks, page_block_size, num_heads_k, width")
    b, s_q, h_q, d_qk = q.shape
    _, page_size, h_k, _ = k_cache.shape
    group = _heads_per_kv_head(h_q, h_k)
    if indices is None:
        sparse = (extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length)
        operation, options = "decode", _dense_options(block_table, cache_seqlens, causal, sparse)
    else:
        rest = (topk_length, extra_indices_in_kvcache, extra_topk_length)
        operation, options = "decode_sparse", _sparse_options(b, s_q, h_k, causal, indices, extra_k_cache, rest)
    topk = None if indices is None else indices.shape[2]
    extra_page_size = None if extra_k_cache is None else extra_k_cache.shape[1]
    extra_topk = None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[2]
    config = FlashMLASchedMeta.Config(
        b, s_q, h_q, page_size, h_k, causal, is_fp8_kvcache, topk, extra_page_size, extra_topk, enable_batch_invariant
    )
    plan = _known_plan(tile_scheduler_metadata, config)
    options["batch_invariant"] = enable_batch_invariant
    options["sm_scale"] = d_qk**-0.5 if softmax_scale is None else softmax_scale
    options["q_scale"] = descale_q
    options["lse_inf_without_keys"] = True
    rows = q.reshape(b * s_q, h_q, d_qk)
    if out is None:
        out_rows = q.new_empty(b * s_q, h_q, head_dim_v, dtype=_out_dtype(q))
        out = out_rows.view(b, s_q, h_q, head_dim_v)
    else:
        out_rows = _rows_of(out, (b, s_q, h_q, head_dim_v), _out_dtype(q))
    lse = q.new_empty(b * s_q, h_q, dtype=torch.float32)
    for kv_head in range(h_k):
        q_heads, options["out"], options["lse"], options["attn_sink"] = rows, out_rows, lse, attn_sink
        if h_k > 1:
            heads = slice(kv_head * group, (kv_head + 1) * group)
            q_heads, options["out"], options["lse"] = rows[:, heads], out_rows[:, heads], lse[:, heads]
            options["attn_sink"] = None if attn_sink is None else attn_sink[heads]
        form = (kv_head, d_qk, is_fp8_kvcache, descale_k, kv_format)
        options["cache"] = kv_cache("k_cache", k_cache, *form)
        if extra_k_cache is not None:
            options["extra_cache"] = kv_cache("extra_k_cache", extra_k_cache, *form)
        if plan is None and tile_scheduler_metadata is not None:
            plan = getattr(libmla.Plan, operation)(q_heads, **options)
        getattr(libmla, operation)(q_heads, plan=plan, **options)
    if tile_scheduler_metadata is not None and plan is not None:
        _remember(tile_scheduler_metadata, config, plan, q.device)
    lse = lse.as_strided((b, h_q, s_q), (s_q * h_q, 1, h_q))
    return out, lse if operation == "decode_sparse" else lse.contiguous()


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


def _dense_options(
    block_table: torch.Tensor | None, cache_seqlens: torch.Tensor | None, causal: bool, sparse: tuple[Any, ...]
) -> dict[str, Any]:
    names = ("extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")
    for name, value in zip(names, sparse, strict=True):
        if value is not None:
            raise ValueError(f"{name}: has a meaning only with indices, that is in sparse attention")
    for name, value in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if value is None:
            raise ValueError(f"{name}: missing; without indices, all keys of a request are read")
    return {"kv_len": cache_seqlens, "block_table": block_table, "causal": causal}


def _sparse_options(
    b: int,
    s_q: int,
    h_k: int,
    causal: bool,
    indices: torch.Tensor,
    extra_k_cache: torch.Tensor | None,
    rest: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
) -> dict[str, Any]:
    topk_length, extra_indices, extra_topk_length = rest
    if causal:
        raise ValueError("causal: indices already say what a query sees; expected False with them")
    options: dict[str, Any] = {
        "indices": _flat_indices("indices", indices, b, s_q),
        "topk_length": None if topk_length is None else topk_length.flatten(),
        "topk_length_per": _length_per(topk_length),
    }
    if extra_k_cache is None:
        for name, value in (
            ("extra_indices_in_kvcache", extra_indices),
            ("extra_topk_length", extra_topk_length),
        ):
            if value is not None:
                raise ValueError(f"{name}: has a meaning only with extra_k_cache")
        return options
    if extra_indices is None:
        raise ValueError("extra_indices_in_kvcache: missing; extra_k_cache needs it")
    _expect_dims("extra_k_cache", extra_k_cache, "num_blocks, page_block_size, num_heads_k, width")
    if extra_k_cache.shape[2] != h_k:
        raise ValueError(f"extra_k_cache: expected {h_k} KV heads, as in k_cache, got {extra_k_cache.shape[2]}")
    options["extra_indices"] = _flat_indices("extra_indices_in_kvcache", extra_indices, b, s_q)
    options["extra_topk_length"] = None if extra_topk_length is None else extra_topk_length.flatten()
    options["extra_topk_length_per"] = _length_per(extra_topk_length)
    return options


def _length_per(lengths: torch.Tensor | None) -> str:
    """Says what lengths belong to: [b] to requests, [b, s_q] to query tokens."""
    return "request" if lengths is None or lengths.ndim == 1 else "token"


def _known_plan(meta: FlashMLASchedMeta | None, config: FlashMLASchedMeta.Config) -> libmla.Plan | None:
    if meta is None:
        return None
    if not isinstance(meta, FlashMLASchedMeta):
        raise TypeError(
            "tile_scheduler_metadata: expected the FlashMLASchedMeta that get_mla_metadata returns, got "
            f"{type(meta).__name__}"
        )
    if not meta.have_initialized or meta.tile_scheduler_metadata is None:
        return None
    if meta.config != config:
        name = next(
            f.name for f in dataclasses.fields(config) if getattr(meta.config, f.name) != getattr(config, f.name)
        )
        raise ValueError(
            f"tile_scheduler_metadata: planned for {name} {getattr(meta.config, name)}, used with "
            f"{getattr(config, name)}; calls that share it have equal shapes and lengths: take another one from "
            "get_mla_metadata"
        )
    return meta.plan


def _remember(
    meta: FlashMLASchedMeta, config: FlashMLASchedMeta.Config, plan: libmla.Plan, device: torch.device
) -> None:
    if meta.plan is plan:
        return
    meta.config, meta.plan, meta.have_initialized = config, plan, True
    meta.tile_scheduler_metadata = torch.from_dlpack(plan.workspace)
    meta.num_splits = torch.full((1,), plan.num_splits, dtype=torch.int32, device=device)


def _expect_dims(name: str, tensor: torch.Tensor, dims: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch tensor [{dims}], got {type(tensor).__name__}")
    if tensor.dim() != dims.count(",") + 1:
        raise ValueError(f"{name}: expected [{dims}], got shape {tuple(tensor.shape)}")


def _heads_per_kv_head(h_q: int, h_kv: int) -> int:
    if h_kv == 0 or h_q % h_kv != 0:
        raise ValueError(f"expected the KV heads to divide the {h_q} query heads, got {h_kv} KV heads")
    return h_q // h_kv


def _flat_indices(name: str, indices: torch.Tensor, b: int, s_q: int) -> torch.Tensor:
    _expect_dims(name, indices, "batch_size, seq_len_q, topk")
    if indices.shape[:2] != (b, s_q):
        raise ValueError(f"{name}: expected [{b}, {s_q}, topk], got shape {tuple(indices.shape)}")
    return indices.reshape(b * s_q, indices.shape[2])


def _expect_output(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out: expected {list(shape)} of {dtype}, got {list(out.shape)} of {out.dtype}")


def _rows_of(out: torch.Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Returns an output [b, s_q, h_q, d_v] as [b * s_q, h_q, d_v], in its memory."""
    _expect_output(out, shape, dtype)
    b, s_q = shape[:2]
    if b > 1 and s_q > 1 and out.stride(0) != s_q * out.stride(1):
        raise ValueError(
            f"out: expected the queries of all requests at one stride, {s_q} * {out.stride(1)} in dimension 0, got "
            f"{out.stride(0)}"
        )
    return out.view(b * s_q, *shape[2:])


def _out_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p: libmla is for inference; expected 0, got {dropout_p}")
