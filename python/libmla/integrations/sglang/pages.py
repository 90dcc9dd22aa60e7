# SPDX-License-Identifier: Apache-2.0
"""Turns SGLang's pools and request tables into caches and page tables of libmla.

All of it is views or device operations: nothing waits for the GPU.
"""

from __future__ import annotations

import torch

import libmla
from libmla.types import CacheFormat

V32_ROW_BYTES = libmla.row_bytes("fp8_ds_mla", 576)
V4_FORMATS: dict[str, CacheFormat] = {"v4": "fp8_dsv4", "v41": "fp8_dsv41", "v41_fp4": "fp4_dsv41"}
"""The format of a pool of V4's and V4.1's, by the value of its SGLang ``kv_layout``."""


def pool_cache(buffer: torch.Tensor, page_size: int, one: torch.Tensor) -> libmla.KvCache | torch.Tensor:
    """Returns a view of a layer's buffer of an MLA pool as a paged cache.

    Args:
        buffer: [slots, 1, width]: bf16 or f16 rows; e4m3 rows, which SGLang stores unscaled; or packed V3.2 rows.
        page_size: tokens of a page; divides ``slots``.
        one: f32 [1], 1.0.
    """
    if buffer.shape[-1] == V32_ROW_BYTES and buffer.element_size() == 1:
        return libmla.KvCache("fp8_ds_mla", kv=_paged(buffer.view(torch.uint8), page_size))
    pages = _paged(buffer, page_size)
    if buffer.dtype == torch.float8_e4m3fn:
        return libmla.KvCache("fp8", kv=pages, ckv_scale=one)
    return pages


def v4_cache(buffer: torch.Tensor, page_size: int, layout: str) -> libmla.KvCache:
    """Returns a view of a layer's buffer of a pool of V4's or V4.1's as a cache.

    The buffer is [pages, page bytes], with the scales in the page's footer; ``layout`` is one of :data:`V4_FORMATS`.
    """
    return libmla.KvCache(V4_FORMATS[layout], kv=buffer.view(torch.uint8), page_size=page_size)


def page_table(req_to_token: torch.Tensor, rows: torch.Tensor, page_size: int, out: torch.Tensor) -> None:
    """Writes the page numbers of requests.

    Args:
        req_to_token: [requests, tokens] slots; those of a page are consecutive.
        rows: [B] rows of it.
        page_size: tokens of a page.
        out: i32 [B, max_pages]. What lies past a request's tokens is garbage, as in ``req_to_token``.
    """
    first = req_to_token[:, ::page_size][:, : out.shape[1]]
    torch.index_select(first, 0, rows, out=out)
    if page_size > 1:
        out.floor_divide_(page_size)


def branch_table(
    req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, topk: int, steps: int, out: torch.Tensor
) -> None:
    """Writes the slots of each branch of a draft, as pages of one token: its request's, then the branch's own.

    Args:
        req_to_token: [requests, tokens] slots; the ``topk * steps`` after a request's tokens are those of its branches.
        rows: [B] rows of it.
        seq_lens: [B] tokens of the requests.
        topk: branches of a request.
        steps: slots of a branch.
        out: i32 [B * topk, tokens].
    """
    tokens = out.shape[1]
    whole = req_to_token[:, : tokens + (topk - 1) * steps].index_select(0, rows)
    column = torch.arange(tokens, device=out.device)
    past = column - seq_lens.view(-1, 1, 1)
    branch = torch.arange(topk, device=out.device).view(1, -1, 1) * steps
    source = torch.where(past < 0, column, column + branch).clamp_(max=whole.shape[1] - 1)
    out.view(len(rows), topk, tokens).copy_(whole.unsqueeze(1).expand(-1, topk, -1).gather(2, source))


def _paged(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    slots, _, width = buffer.shape
    stride = buffer.stride(0)
    return buffer.as_strided((slots // page_size, page_size, width), (page_size * stride, stride, 1))
