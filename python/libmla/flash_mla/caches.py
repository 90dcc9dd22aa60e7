# SPDX-License-Identifier: Apache-2.0
"""Turns FlashMLA's caches, [num_blocks, page_block_size, num_heads_k, width], into ``libmla.KvCache``."""

from typing import get_args

import torch

import libmla
from libmla.types import CacheFormat

_BYTE_TYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_PLAIN_FORMATS: dict[torch.dtype, CacheFormat] = {torch.bfloat16: "bf16", torch.float16: "f16"}


def kv_cache(
    name: str, cache: torch.Tensor, kv_head: int, d_qk: int, fp8: bool, descale: torch.Tensor | None
) -> libmla.KvCache:
    """Returns one KV head of a cache, without a copy.

    name: of the argument, for messages. fp8: whether the cache is quantized; its row width says how: 656 bytes are
    ``fp8_ds_mla``, 584 ``fp8_dsv4``, d_qk elements ``fp8`` with the one scale `descale` [1] f32.
    """
    if not fp8:
        if cache.dtype not in _PLAIN_FORMATS:
            raise TypeError(
                f"{name}: expected bfloat16 or float16 while is_fp8_kvcache is False, got {cache.dtype}; quantized "
                "caches need is_fp8_kvcache=True"
            )
        return libmla.KvCache(_PLAIN_FORMATS[cache.dtype], kv=cache[:, :, kv_head])
    if cache.dtype not in _BYTE_TYPES:
        raise TypeError(
            f"{name}: expected float8_e4m3fn, uint8 or int8 while is_fp8_kvcache is True, got {cache.dtype}"
        )
    width = cache.shape[3]
    if width == d_qk:
        if descale is None:
            raise ValueError(f"{name}: rows of {d_qk} e4m3 values have one scale for the tensor: descale_k is missing")
        rows = cache[:, :, kv_head].view(torch.float8_e4m3fn)
        return libmla.KvCache("fp8", kv=rows, ckv_scale=descale)
    if cache.shape[2] != 1:
        raise ValueError(f"{name}: packed rows belong to all query heads: expected num_heads_k 1, got {cache.shape[2]}")
    rows = cache[:, :, 0].view(torch.uint8)
    if width == libmla.row_bytes("fp8_ds_mla", d_qk):
        return libmla.KvCache("fp8_ds_mla", kv=rows)
    page_size = cache.shape[1]
    if width * page_size == libmla.page_bytes("fp8_dsv4", d_qk, page_size):
        if page_size > 1 and rows.stride(1) != width:
            raise ValueError(
                f"{name}: pages of fp8_dsv4 keep all their data before all their scales: expected stride {width} in "
                f"dimension 1, got {rows.stride(1)}"
            )
        return libmla.KvCache("fp8_dsv4", kv=rows.flatten(1), page_size=page_size)
    others = " or ".join(
        one
        for one in get_args(CacheFormat)
        if one not in ("bf16", "f16", "fp8") and libmla.page_bytes(one, d_qk, 1) == width
    )
    raise ValueError(
        f"{name}: expected rows of 656 bytes (fp8_ds_mla), 584 bytes (fp8_dsv4) or {d_qk} e4m3 values, got {width}"
        + (f", which would be {others}: these have to be named, in calls of libmla itself" if others else "")
    )
