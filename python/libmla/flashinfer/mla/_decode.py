# SPDX-License-Identifier: Apache-2.0
"""Holds the functions of flashinfer.mla that need no plan, for DeepSeek V3: dense decode, and sparse decode over slots.

The peer's backend names choose a convention, never a kernel: libmla selects one itself (libmla.explain says which).
"""

from typing import Any

import torch

import libmla
from libmla._call import calling
from libmla.flashinfer._common import (
    E4M3,
    Scale,
    Sinks,
    add_sink,
    attend_scaled,
    attn_sink,
    check_choice,
    int32,
    lse_base,
    one_head,
    output,
    refuse,
    row_cache,
    rows_view,
    visible_keys,
)

_BACKENDS = ("auto", "trtllm-gen", "cute-dsl", "xqa", "sparse", "cake")


@calling(
    {
        "q": "query",
        "cache.kv": "kv_cache",
        "kv_len": "seq_lens",
        "block_table": "block_tables",
        "indices": "block_tables",
        "topk_length": "sparse_mla_top_k_lens",
        "qo_indptr": "cum_seq_lens_q",
        "context_parallel.rank": "cp_rank",
        "context_parallel.world": "cp_world",
        "attn_sink": "sinks",
        "q_scale": "bmm1_scale",
        "sm_scale": "bmm1_scale",
    }
)
def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: Sinks = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decodes in the absorbed form, causal: the last query of a request sees all of its keys.

    query is [B, q_len, H, d_qk], or [T, H, d_qk] with cum_seq_lens_q int32 [B + 1], of bf16, f16, f32 or e4m3. kv_cache
    is [pages, page_size, d_qk] or [pages, 1, page_size, d_qk], of bf16, f16, e4m3, or bytes of fp8_ds_mla (656 a row).
    Returns out: the query's shape with kv_lora_rank channels, bf16 for e4m3 queries, else the query's dtype; with
    `return_lse` also lse f32 [T, H] (or the given tensor, also as [B, q_len, H]).

    - Dense: block_tables int32 [B, pages] ([B, 2, pages] if not uses_shared_paged_kv_idx; the first is used),
      seq_lens int32 [B].
    - sparse_mla_top_k > 0: block_tables int32 [B, q_len, topk] (or [T, topk]) are slots, page * page_size + offset;
      a negative one is skipped. Of a query's row count its first min(topk, keys it sees by seq_lens [B]) entries;
      with fp8_ds_mla bytes, seq_lens are those counts themselves, [B, q_len] or [T], or None for all of them.
      sparse_mla_top_k_lens int32 [T] limits them further.
    - bmm1_scale multiplies the scores, bmm2_scale the output (backend "xqa": both). A bmm1_scale tensor stays on the
      device with e4m3 queries; with others it is read.
    - lse is in base 2 or natural, as return_lse_base says ("base2", "basee"). By default it is in base 2, but for
      dense decodes that the peer gives to CuTe DSL: backend "cute-dsl", or "auto" with cum_seq_lens_q, enable_dcp, 65
      to 127 heads or pages of 128 tokens. It excludes the sinks, but for fp8_ds_mla bytes, where the peer counts them.
      A query without a key has out 0 and lse -inf.
    - enable_dcp: this rank holds the tokens i with i % cp_world == cp_rank, and causal_seqlens_kv_global int32 [B]
      are the requests' lengths over all ranks.

    Without effect: workspace_buffer, the lengths' maxima, skip_softmax_threshold_scale_factor and use_fp16_softmax
    (every key is computed, in f32), kv_scale_format (stored scales are read as they are), and launch options.
    """
    check_choice("backend", backend, _BACKENDS)
    check_choice("return_lse_base", return_lse_base, (None, "basee", "base2"))
    if max_q_len is not None and cum_seq_lens_q is None:
        raise ValueError("max_q_len: expected none without cum_seq_lens_q, got a number")
    share = _context_parallel(enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global)
    rows = one_head("kv_cache", kv_cache)
    q, q_len = _flat_query(query, cum_seq_lens_q, kv_lora_rank + qk_rope_head_dim)
    out = output("out", out, (*query.shape[:-1], kv_lora_rank), _out_dtype(query, out), query)
    lse, flat_lse = _lse_buffers(lse, return_lse, query)
    cute_dsl = backend == "cute-dsl"
    if backend == "auto" and sparse_mla_top_k == 0:
        ragged = cum_seq_lens_q is not None
        cute_dsl = ragged or enable_dcp or 64 < q.shape[1] < 128 or rows.shape[1] == 128
    base2 = return_lse_base == "base2" or (return_lse_base is None and not cute_dsl)
    arguments: dict[str, Any] = {
        "cache": _packed_cache(rows) if rows.dtype == torch.uint8 else row_cache(rows),
        "out": rows_view("out", out, (*q.shape[:-1], kv_lora_rank)),
        "lse": flat_lse,
        "lse_base": lse_base(base2),
        "attn_sink": attn_sink(sinks),
        "bmm1_scale": bmm1_scale * bmm2_scale if backend == "xqa" else bmm1_scale,
        "bmm2_scale": bmm2_scale,
    }
    if sparse_mla_top_k == 0:
        if share is not None:
            arguments["context_parallel"] = share
            seq_lens = causal_seqlens_kv_global
        if seq_lens is None:
            raise ValueError("seq_lens: expected a tensor for a dense decode, got none")
        table = _shared_table(block_tables, uses_shared_paged_kv_idx)
        attend_scaled(libmla.decode, q, kv_len=seq_lens, block_table=table, qo_indptr=cum_seq_lens_q, **arguments)
    else:
        if share is not None:
            refuse("enable_dcp with sparse_mla_top_k is not supported: give every rank the slots that it holds")
        packed = rows.dtype == torch.uint8
        lengths = _topk_lengths(
            packed, sparse_mla_top_k, q.shape[0], q_len, seq_lens, cum_seq_lens_q, sparse_mla_top_k_lens
        )
        slots = _slots(block_tables, q.shape[0], sparse_mla_top_k)
        attend_scaled(libmla.decode_sparse, q, indices=slots, topk_length=lengths, topk_length_per="token", **arguments)
        if packed and sinks is not None and flat_lse is not None:
            add_sink(flat_lse, arguments["attn_sink"], base2)
    return out if lse is None else (out, lse)


trtllm_prefill_with_kv_cache_mla = trtllm_batch_decode_with_kv_cache_mla
"""The name by which prefill callers call the same function."""


def xqa_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: Sinks = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Decodes densely, as trtllm_batch_decode_with_kv_cache_mla does with backend "xqa", where bmm1_scale scales the
    queries and bmm2_scale the cache, so that scores are multiplied by both. Beyond the peer: q_len above 1, sinks, any
    number of heads. `out` may be [B, q_len, H, kv_lora_rank], or [B, H, kv_lora_rank] if q_len is 1.
    """
    into = out
    if out is not None and out.ndim == 3:
        into = out[:, None]
    result: Any = trtllm_batch_decode_with_kv_cache_mla(
        query,
        kv_cache,
        workspace_buffer,
        qk_nope_head_dim,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        out=into,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=sinks,
        backend="xqa",
    )
    return result if out is None else out


def _out_dtype(query: torch.Tensor, out: torch.Tensor | None) -> torch.dtype:
    """Returns the output's type: the caller's choice among those libmla writes; else the query's own, bf16 for e4m3."""
    default = torch.bfloat16 if query.dtype == E4M3 else query.dtype
    return out.dtype if out is not None and out.dtype == torch.float32 else default


def _flat_query(query: torch.Tensor, cum_seq_lens_q: torch.Tensor | None, d_qk: int) -> tuple[torch.Tensor, int]:
    """Returns (query as [T, H, d_qk], the number of queries of each request, 0 if ragged)."""
    ndim = 4 if cum_seq_lens_q is None else 3
    if query.ndim != ndim:
        given = "without" if cum_seq_lens_q is None else "with"
        raise ValueError(f"query: expected {ndim} dimensions {given} cum_seq_lens_q, got {query.ndim}")
    if query.shape[-1] != d_qk:
        raise ValueError(f"query: expected kv_lora_rank + qk_rope_head_dim = {d_qk} channels, got {query.shape[-1]}")
    return (query.flatten(0, 1), query.shape[1]) if ndim == 4 else (query, 0)


def _lse_buffers(
    lse: torch.Tensor | None, return_lse: bool, query: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns (what the caller gets, the same memory as [T, H]), or Nones without return_lse."""
    if not return_lse:
        return None, None
    heads = query.shape[-2]
    flat = (query.shape[:-2].numel(), heads)
    if lse is not None and lse.ndim == query.ndim - 1 and lse.ndim == 3:
        output("lse", lse, query.shape[:-1], torch.float32, query)
        return lse, rows_view("lse", lse, flat)
    lse = output("lse", lse, flat, torch.float32, query)
    return lse, lse


def _context_parallel(enable: bool, world: int, rank: int, lengths: torch.Tensor | None) -> tuple[int, int, int] | None:
    """Returns (rank, world, interleave) as libmla.decode takes it."""
    if not enable:
        if world != 1 or rank != 0 or lengths is not None:
            raise ValueError("enable_dcp: expected True with cp_world, cp_rank or causal_seqlens_kv_global, got False")
        return None
    if lengths is None:
        raise ValueError("causal_seqlens_kv_global: expected a tensor with enable_dcp, got none")
    return rank, world, 1


def _shared_table(block_tables: torch.Tensor, shared: bool) -> torch.Tensor:
    ndim = 2 if shared else 3
    if block_tables.ndim != ndim:
        raise ValueError(
            f"block_tables: expected {ndim} dimensions with uses_shared_paged_kv_idx={shared}, got {block_tables.ndim}"
        )
    return block_tables if shared else block_tables[:, 0]


def _slots(block_tables: torch.Tensor, num_tokens: int, topk: int) -> torch.Tensor:
    if block_tables.shape[-1] != topk or block_tables.shape[:-1].numel() != num_tokens:
        raise ValueError(
            f"block_tables: expected a row of sparse_mla_top_k = {topk} slots for each of {num_tokens} query tokens, "
            f"got shape {tuple(block_tables.shape)}"
        )
    return block_tables.reshape(num_tokens, topk)


def _topk_lengths(
    packed: bool,
    topk: int,
    num_tokens: int,
    q_len: int,
    seq_lens: torch.Tensor | None,
    cum_seq_lens_q: torch.Tensor | None,
    top_k_lens: torch.Tensor | None,
) -> torch.Tensor | None:
    """Returns [T] int32: how many entries count in every row of slots; None: all."""
    lengths = None
    if packed:
        if seq_lens is not None and seq_lens.numel() == num_tokens:
            lengths = int32("seq_lens", seq_lens).reshape(num_tokens)
    elif seq_lens is not None:
        lengths = visible_keys(seq_lens, num_tokens, q_len, cum_seq_lens_q).clamp_(min=0, max=topk)
    if top_k_lens is None:
        return lengths
    top_k_lens = int32("sparse_mla_top_k_lens", top_k_lens).reshape(num_tokens)
    return top_k_lens if lengths is None else torch.minimum(lengths, top_k_lens)


def _packed_cache(rows: torch.Tensor) -> libmla.KvCache:
    row_bytes = libmla.row_bytes("fp8_ds_mla", 576)
    if rows.shape[-1] != row_bytes:
        refuse(
            f"rows of {rows.shape[-1]} bytes are not supported: libmla reads fp8_ds_mla, {row_bytes} bytes a row "
            "(512 e4m3 channels, 4 scales, 64 bf16 rotary channels)"
        )
    return libmla.KvCache("fp8_ds_mla", kv=rows)
