# SPDX-License-Identifier: Apache-2.0
"""Turns FlashMLA's caches, [num_blocks, page_block_size, num_heads_k, width], into those of libmla."""

import functools
from typing import get_args

import torch

import libmla
from libmla.types import Cache, CacheFormat

_BYTE_TYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
#: The peer's names of the layouts of packed rows. Beside a V41 cache, an extra one may have FP4 rows.
_NAMED_FORMATS: dict[str, CacheFormat] = {
    "V32": "fp8_ds_mla",
    "V32_NO_ROPE": "fp8_nope",
    "V4": "fp8_dsv4",
    "V41": "fp8_dsv41",
}
_FP4_BESIDE_V41: CacheFormat = "fp4_dsv41"
_PLAIN_TYPES = (torch.bfloat16, torch.float16)


def kv_cache(
    name: str,
    cache: torch.Tensor,
    kv_head: int,
    d_qk: int,
    fp8: bool,
    descale: torch.Tensor | None,
    kv_format: str | None = None,
) -> Cache:
    """Returns one KV head of a cache, without a copy.

    name: of the argument, for messages. fp8: whether the cache is quantized; `kv_format` says how, or without one the
    row width: 656 bytes are ``fp8_ds_mla``, 584 ``fp8_dsv4``, d_qk elements ``fp8`` with the one scale `descale` [1]
    f32.
    """
    if kv_format is not None and kv_format not in _NAMED_FORMATS:
        raise ValueError(f"kv_format: expected one of {', '.join(_NAMED_FORMATS)}, got {kv_format!r}")
    if kv_format is not None and not fp8:
        raise ValueError("kv_format: names quantized rows; expected None while is_fp8_kvcache is False")
    if not fp8:
        if cache.dtype not in _PLAIN_TYPES:
            raise TypeError(
                f"{name}: expected bfloat16 or float16 while is_fp8_kvcache is False, got {cache.dtype}; quantized "
                "caches need is_fp8_kvcache=True"
            )
        return cache.select(2, kv_head)
    if cache.dtype not in _BYTE_TYPES:
        raise TypeError(
            f"{name}: expected float8_e4m3fn, uint8 or int8 while is_fp8_kvcache is True, got {cache.dtype}"
        )
    width = cache.shape[3]
    if kv_format is None and width == d_qk:
        if descale is None:
            raise ValueError(f"{name}: rows of {d_qk} e4m3 values have one scale for the tensor: descale_k is missing")
        rows = cache.select(2, kv_head).view(torch.float8_e4m3fn)
        return libmla.KvCache("fp8", kv=rows, ckv_scale=descale)
    if cache.shape[2] != 1:
        raise ValueError(f"{name}: packed rows belong to all query heads: expected num_heads_k 1, got {cache.shape[2]}")
    rows = cache.select(2, 0)
    if kv_format is None:
        formats: tuple[CacheFormat, ...] = ("fp8_ds_mla", "fp8_dsv4")
    else:
        formats = (_NAMED_FORMATS[kv_format],)
        if kv_format == "V41" and name == "extra_k_cache":
            formats += (_FP4_BESIDE_V41,)
    page_size = cache.shape[1]
    for one in formats:
        if width == _row_bytes(one, d_qk):
            return _packed(name, rows, one, page_size)
    if kv_format is not None:
        expected = " or ".join(f"{_row_bytes(one, d_qk)} bytes ({one})" for one in formats)
        raise ValueError(f"{name}: expected rows of {expected}, as kv_format is {kv_format}, got {width}")
    others = " or ".join(
        one for one in get_args(CacheFormat) if one not in ("bf16", "f16", "fp8") and _row_bytes(one, d_qk) == width
    )
    raise ValueError(
        f"{name}: expected rows of 656 bytes (fp8_ds_mla), 584 bytes (fp8_dsv4) or {d_qk} e4m3 values, got {width}"
        + (
            f", which would be {others}: these have to be named, by kv_format or in calls of libmla itself"
            if others
            else ""
        )
    )


@functools.cache
def _row_bytes(cache_format: CacheFormat, d_qk: int) -> int:
    """Returns the bytes of one token, its scales included."""
    return libmla.page_bytes(cache_format, d_qk, 1)


def _packed(name: str, rows: torch.Tensor, cache_format: CacheFormat, page_size: int) -> libmla.KvCache:
    """Returns the cache of packed rows [num_blocks, page_block_size, width]."""
    if cache_format in ("fp8_ds_mla", "fp8_nope"):
        return libmla.KvCache(cache_format, kv=rows)
    if page_size > 1 and rows.stride(1) != rows.shape[2]:
        raise ValueError(
            f"{name}: pages of {cache_format} keep all their data before all their scales: expected stride "
            f"{rows.shape[2]} in dimension 1, got {rows.stride(1)}"
        )
    return libmla.KvCache(cache_format, kv=rows.flatten(1), page_size=page_size)
