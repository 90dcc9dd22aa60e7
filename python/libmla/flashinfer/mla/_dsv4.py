# SPDX-License-Identifier: Apache-2.0
"""Computes flashinfer.mla's decode of DeepSeek V4: a sliding-window pool and a compressed pool under one softmax."""

from typing import Any

import torch

import libmla
from libmla._call import calling
from libmla.flashinfer._common import (
    Scale,
    attend_scaled,
    attn_sink,
    check_choice,
    int32,
    one_head,
    output,
    refuse_given,
    row_cache,
    rows_view,
    visible_keys,
)

_NAME = "trtllm_batch_decode_sparse_mla_dsv4"
_BACKENDS = ("auto", "trtllm-gen", "cute-dsl", "sparse", "cake")
# kv_cache_format -> the formats of swa_kv_cache and of compressed_kv_cache, where they are bytes
_FORMATS = {
    "fp8": ("fp8_dsv4", "fp8_dsv4"),
    "nvfp4": ("nvfp4_dsv4", "nvfp4_dsv4"),
    "fp8_dsv41": ("fp8_dsv41", "fp8_dsv41"),
    "fp8_dsv41_fp4_ca": ("fp8_dsv41", "fp4_dsv41"),
}
_WIDTH = 512
_WINDOW = 128  # slots of the sliding window in a combined table
_HCA = "libmla reads slots; give the combined table as sparse_indices"


@calling(
    {
        "q": "query",
        "cache.kv": "swa_kv_cache",
        "extra_cache.kv": "compressed_kv_cache",
        "indices": "sparse_indices",
        "extra_indices": "extra_sparse_indices",
        "topk_length": "swa_topk_lens",
        "extra_topk_length": "extra_sparse_topk_lens",
        "attn_sink": "sinks",
        "q_scale": "bmm1_scale",
        "sm_scale": "bmm1_scale",
    }
)
def trtllm_batch_decode_sparse_mla_dsv4(
    query: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    sparse_indices: torch.Tensor | None = None,
    compressed_kv_cache: torch.Tensor | None = None,
    sparse_topk_lens: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    enable_pdl: bool | None = None,
    swa_topk_lens: torch.Tensor | None = None,
    extra_sparse_indices: torch.Tensor | None = None,
    extra_sparse_topk_lens: torch.Tensor | None = None,
    backend: str = "auto",
    hca_swa_indices: torch.Tensor | None = None,
    hca_compressed_block_tables: torch.Tensor | None = None,
    hca_seq_lens: torch.Tensor | None = None,
    hca_is_causal: bool = True,
    hca_use_persistent: bool = False,
    hca_sparse_indices_format: str | None = None,
    remapped_sparse_indices_buffer: torch.Tensor | None = None,
    sparse_indices_are_storage_offsets: bool | None = None,
    dsv4_inv_rope_cos_sin_cache: torch.Tensor | None = None,
    dsv4_output_scale: torch.Tensor | None = None,
    sparse_topk_lens_offset: int = 0,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    *,
    kv_cache_format: str = "fp8",
) -> torch.Tensor:
    """Decodes sparsely over one or two pools under one softmax. query is [B, q_len, H, 512], or [T, H, 512] with
    cum_seq_lens_q int32 [B + 1], of bf16, f16, f32 or e4m3. Returns out of the query's shape (bf16 for e4m3 queries).

    A pool is [pages, page_size, w], or 4-D with its one head where kv_layout says: w = 512 channels of bf16, f16 or
    e4m3, or bytes (u8) of pages whose format kv_cache_format says: "fp8" is fp8_dsv4 (584), "nvfp4" nvfp4_dsv4 (384),
    "fp8_dsv41" that format (528), and "fp8_dsv41_fp4_ca" fp8_dsv41 for swa_kv_cache and fp4_dsv41 (288) for
    compressed_kv_cache; any page size, padded pages too. Slots are page * page_size + offset, a
    negative one is skipped. There are two ways to name them, in int32:

    - with swa_topk_lens [T] (the peer's SM120 form): sparse_indices [T, topk] in swa_kv_cache, of which the first
      swa_topk_lens count; extra_sparse_indices [T, extra_topk] in compressed_kv_cache with extra_sparse_topk_lens [T].
    - without (TRTLLM-GEN's and Cake's): sparse_indices [T, 128 + n] holds 128 slots of swa_kv_cache, then n of
      compressed_kv_cache (or these stand in extra_sparse_indices). sparse_topk_lens [T] + sparse_topk_lens_offset
      counts both, the 128 always; extra_sparse_topk_lens the compressed ones alone. seq_lens [B] limits the window's
      slots to the keys that a query sees. Rows may be fewer than query tokens: the others' output is left alone.

    bmm1_scale multiplies the scores, bmm2_scale the output; sinks f32 [H] are natural-log logits. A query without a
    valid slot gets 0. Refused: HCA page tables, the RoPE-and-quantize epilogue.
    """
    check_choice("backend", backend, _BACKENDS)
    check_choice("kv_cache_format", kv_cache_format, tuple(_FORMATS))
    refuse_given(
        _NAME,
        hca_swa_indices=(hca_swa_indices, _HCA),
        hca_compressed_block_tables=(hca_compressed_block_tables, _HCA),
        hca_seq_lens=(hca_seq_lens, _HCA),
        dsv4_inv_rope_cos_sin_cache=(dsv4_inv_rope_cos_sin_cache, "libmla's attention does not rotate its output"),
        dsv4_output_scale=(dsv4_output_scale, "libmla's attention does not write block scales"),
        sparse_indices_are_storage_offsets=(
            sparse_indices_are_storage_offsets and not _dense(swa_kv_cache, compressed_kv_cache),
            "libmla reads pages by their strides; give logical slots",
        ),
    )
    if sparse_indices is None:
        raise ValueError("sparse_indices: expected a tensor, got none")
    ndim = 4 if cum_seq_lens_q is None else 3
    if query.ndim not in (ndim, 3):
        raise ValueError(f"query: expected {ndim} dimensions, got {query.ndim}")
    q = query.flatten(0, -3)
    dtype = torch.bfloat16 if query.element_size() == 1 else query.dtype
    out = output("out", out, (*query.shape[:-1], _WIDTH), dtype, query)
    flat_out = rows_view("out", out, (*q.shape[:-1], _WIDTH))
    swa_format, compressed_format = _FORMATS[kv_cache_format]
    swa = _pool("swa_kv_cache", swa_kv_cache, kv_layout, swa_format)
    compressed = None
    if compressed_kv_cache is not None:
        compressed = _pool("compressed_kv_cache", compressed_kv_cache, kv_layout, compressed_format)
    active = None
    if swa_topk_lens is None:
        active = _active(sparse_topk_lens, extra_sparse_topk_lens, sparse_topk_lens_offset)
    if active is None:
        pools = _separate_pools(sparse_indices, swa_topk_lens, extra_sparse_indices, extra_sparse_topk_lens)
    else:
        pools = _combined_pools(sparse_indices, active, extra_sparse_indices)
        if seq_lens is not None:
            q_len = query.shape[1] if query.ndim == 4 else 1
            _cut_window(pools, seq_lens, q_len, cum_seq_lens_q)
    if pools["extra_indices"] is not None and compressed is None:
        raise ValueError("compressed_kv_cache: expected a tensor, since slots of it are given, got none")
    rows = pools["indices"].shape[0]
    attend_scaled(
        libmla.decode_sparse,
        q[:rows],
        cache=swa,
        extra_cache=compressed if pools["extra_indices"] is not None else None,
        out=flat_out[:rows],
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        attn_sink=attn_sink(sinks),
        topk_length_per="token",
        extra_topk_length_per="token",
        **pools,
    )
    return out


def _pool(name: str, cache: torch.Tensor, kv_layout: str, cache_format: str) -> libmla.KvCache:
    if cache.dtype != torch.uint8:
        if cache_format != _FORMATS["fp8"][0]:
            raise ValueError(f"{name}: expected uint8 pages of {cache_format}, got {cache.dtype}")
        return row_cache(one_head(name, cache, kv_layout))
    if cache.ndim == 4:
        # Bytes of either layout are the same; the peer, too, takes the head where it stands.
        cache = cache.squeeze(2 if cache.shape[2] == 1 else 1)
    token_bytes = libmla.page_bytes(cache_format, _WIDTH, 1)
    if cache.ndim != 3 or cache.shape[2] != token_bytes:
        raise ValueError(
            f"{name}: expected pages of page_size x {token_bytes} bytes ({cache_format}), got shape {tuple(cache.shape)}"
        )
    num_pages, page_size, row = cache.shape
    if page_size > 1 and cache.stride()[1:] != (row, 1):
        raise ValueError(f"{name}: expected pages whose bytes are contiguous, got strides {cache.stride()}")
    pages = cache.as_strided((num_pages, page_size * row), (cache.stride(0), 1), cache.storage_offset())
    return libmla.KvCache(cache_format, kv=pages, page_size=page_size)


def _dense(*caches: torch.Tensor | None) -> bool:
    return all(cache is None or cache.is_contiguous() for cache in caches)


def _flat(indices: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the indices as [T, topk], or None if there are none."""
    if indices is None or indices.shape[-1] == 0:
        return None
    return indices.reshape(-1, indices.shape[-1])


def _separate_pools(
    indices: torch.Tensor, lengths: torch.Tensor | None, extra: torch.Tensor | None, extra_lengths: torch.Tensor | None
) -> dict[str, Any]:
    slots = _flat(extra)
    return {
        "indices": _flat(indices),
        "topk_length": None if lengths is None else int32("swa_topk_lens", lengths).reshape(-1),
        "extra_indices": slots,
        "extra_topk_length": None
        if slots is None or extra_lengths is None
        else int32("extra_sparse_topk_lens", extra_lengths).reshape(-1),
    }


def _active(lengths: torch.Tensor | None, extra_lengths: torch.Tensor | None, offset: int) -> torch.Tensor | None:
    """Returns [T]: how many slots count in a row of a combined table, its 128 of the window among them.

    Returns None if nothing says it.
    """
    if lengths is not None and extra_lengths is not None:
        raise ValueError("extra_sparse_topk_lens: expected none beside sparse_topk_lens, got a tensor")
    if extra_lengths is not None:
        return int32("extra_sparse_topk_lens", extra_lengths) + (_WINDOW + offset)
    return None if lengths is None else int32("sparse_topk_lens", lengths) + offset


def _combined_pools(indices: torch.Tensor, active: torch.Tensor, extra: torch.Tensor | None) -> dict[str, Any]:
    """Returns the pools of a table whose first 128 slots are the window's.

    The other slots may stand in a table of their own.
    """
    indices = indices.reshape(-1, indices.shape[-1])
    if indices.shape[1] < _WINDOW:
        raise ValueError(
            f"sparse_indices: expected at least {_WINDOW} slots a row (the sliding window's), got {indices.shape[1]}"
        )
    if extra is None:
        extra = indices[:, _WINDOW:]
    compressed = _flat(extra)
    return {
        "indices": indices[:, :_WINDOW],
        "topk_length": active.clamp(min=0, max=_WINDOW),
        "extra_indices": compressed,
        "extra_topk_length": None if compressed is None else active - _WINDOW,
    }


def _cut_window(pools: dict[str, Any], seq_lens: torch.Tensor, q_len: int, cum_seq_lens_q: torch.Tensor | None) -> None:
    """Shortens the window where a query stands so early that it sees fewer keys."""
    rows = pools["indices"].shape[0]
    if cum_seq_lens_q is None:
        seq_lens = seq_lens[: -(-rows // q_len)]
    seen = visible_keys(seq_lens, rows, q_len, cum_seq_lens_q)
    pools["topk_length"] = torch.minimum(pools["topk_length"], seen)
