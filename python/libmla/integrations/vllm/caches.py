# SPDX-License-Identifier: Apache-2.0
"""Presents vLLM's latent caches as caches of libmla."""

from __future__ import annotations

from typing import Any

import torch

import libmla

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")
"""Values of ``--kv-cache-dtype`` that have a format of libmla."""


def format_of(kv_cache_dtype: str | None, dtype: torch.dtype) -> Any:
    """Returns the name of the cache format.

    Args:
        kv_cache_dtype: one of :data:`KV_CACHE_DTYPES`; None: as "auto".
        dtype: the model's element type, which "auto" takes.
    """
    if kv_cache_dtype in (None, "auto"):
        return "f16" if dtype == torch.float16 else "bf16"
    names = {"float16": "f16", "bfloat16": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_ds_mla": "fp8_ds_mla"}
    return names[str(kv_cache_dtype)]


def cache_of(kv_cache: torch.Tensor, kv_cache_dtype: str, k_scale: torch.Tensor) -> libmla.KvCache | torch.Tensor:
    """Returns the cache of one layer.

    Args:
        kv_cache: [num_pages, page_size, row elements]; bytes may stand for e4m3.
        kv_cache_dtype: one of :data:`KV_CACHE_DTYPES`.
        k_scale: f32, one element: what stored elements of "fp8" are multiplied by.
    """
    if kv_cache_dtype == "fp8_ds_mla":
        # vLLM's own writers do not round scales up to powers of two either.
        return libmla.KvCache("fp8_ds_mla", kv=kv_cache, power_of_two_scales=False)
    if kv_cache_dtype.startswith("fp8"):
        return libmla.KvCache("fp8", kv=kv_cache, ckv_scale=k_scale.view(1))
    return kv_cache


def one_page(kv_cache_dtype: str, d_qk: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates a page of one token, as vLLM does.

    Args:
        kv_cache_dtype: one of :data:`KV_CACHE_DTYPES`.
        d_qk: channels of a row.
        dtype: the model's element type.
        device: where the page goes.
    """
    cache_format = format_of(kv_cache_dtype, dtype)
    if cache_format in ("fp8", "fp8_ds_mla"):
        return torch.zeros(1, 1, libmla.row_bytes(cache_format, d_qk), dtype=torch.uint8, device=device)
    element = torch.float16 if cache_format == "f16" else torch.bfloat16
    return torch.zeros(1, 1, d_qk, dtype=element, device=device)


def rows_of(ckv: torch.Tensor, kpe: torch.Tensor) -> Any:
    """Returns queries or keys as libmla takes them: the pair, or the latent part where there is no rotary part."""
    return (ckv, kpe) if kpe.shape[-1] else ckv


def append(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
) -> None:
    """Writes new tokens into a layer's cache.

    Args:
        kv_c: [T or more, kv_lora_rank]; rows from T on are padding.
        k_pe: [T or more, 1, qk_rope_head_dim].
        kv_cache: as in :func:`cache_of`; without elements while vLLM measures memory.
        slot_mapping: [T] int64; negative: skipped.
        kv_cache_dtype, k_scale: as in :func:`cache_of`.
    """
    if not kv_cache.numel():
        return
    slots = slot_mapping.flatten()
    rows = rows_of(kv_c[: slots.shape[0]], k_pe[: slots.shape[0]].squeeze(1))
    libmla.append(rows, slots, cache_of(kv_cache, kv_cache_dtype, k_scale))
