# SPDX-License-Identifier: Apache-2.0
"""Computes what the operations should, in float64 and in the plainest way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

NEVER = -math.inf


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    sm_scale: float,
    *,
    sink: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o [H, d_v] and lse [H] of one query [H, d] over keys [S, d] or [H, S, d]; visible [S]; bias [H, S]."""
    heads = q.shape[0]
    keys = keys[:, visible] if keys.ndim == 3 else keys[visible].expand(heads, -1, -1)
    values = values[:, visible] if values.ndim == 3 else values[visible].expand(heads, -1, -1)
    if keys.shape[1] == 0:
        return torch.zeros(heads, values.shape[-1]).double(), torch.full((heads,), NEVER).double()
    scores = torch.einsum("hd,hsd->hs", q.double(), keys.double()) * sm_scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias[:, visible].double()
    lse = torch.logsumexp(scores, -1)
    o = torch.einsum("hs,hsd->hd", torch.softmax(scores, -1), values.double())
    if sink is not None:
        o = o / (1 + torch.exp(sink.double() - lse))[:, None]
    return o, lse


def rows_of(cache: torch.Tensor, pages: Sequence[int], length: int) -> torch.Tensor:
    """Returns the first `length` rows of a request whose pages these are."""
    return (
        cache[list(pages)].reshape(-1, cache.shape[-1])[:length] if length else cache.reshape(-1, cache.shape[-1])[:0]
    )


def decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    kv_len: Sequence[int],
    tables: Sequence[Sequence[int]],
    sm_scale: float,
    d_v: int,
    *,
    qo_indptr: Sequence[int] | None = None,
    causal: bool = True,
    window_left: int = -1,
    slopes: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o and lse of a batch over a cache [pages, page_size, d] of numbers as they are meant."""
    if qo_indptr is None:
        each = q.shape[0] // len(kv_len) if kv_len else 0
        qo_indptr = [each * b for b in range(len(kv_len) + 1)]
    o = torch.zeros(*q.shape[:2], d_v).double()
    lse = torch.full(q.shape[:2], NEVER).double()
    for b, length in enumerate(kv_len):
        rows = rows_of(cache, tables[b], length)
        begin, end = qo_indptr[b], qo_indptr[b + 1]
        at = torch.arange(length)
        for i, t in enumerate(range(begin, end)):
            position = length - (end - begin) + i
            visible = at <= position if causal else torch.ones(length).bool()
            if window_left >= 0:
                visible &= at >= position - window_left
            if tree is not None:
                drafts = at - (length - (end - begin))
                visible = (drafts < 0) | tree[t][drafts.clamp(min=0)].bool()
            bias = None if slopes is None else slopes[:, None] * (at - position)[None, :]
            o[t], lse[t] = attend(q[t], rows, rows[:, :d_v], visible, sm_scale, sink=sink, soft_cap=soft_cap, bias=bias)
    return o, lse


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounds to e4m3, saturating."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn)


def unpack_fp8_ds_mla(pages: torch.Tensor) -> torch.Tensor:
    """Returns bytes [pages, page_size, 656] as the numbers that they mean: 512 latent channels, 64 rotary ones."""
    scales = pages[..., 512:528].contiguous().view(torch.float32).repeat_interleave(128, -1)
    nope = (pages[..., :512].contiguous().view(torch.float8_e4m3fn).float() * scales).bfloat16()
    return torch.cat([nope, pages[..., 528:].contiguous().view(torch.bfloat16)], -1)


def unpack_fp8_dsv4(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Returns bytes [pages, page bytes] as numbers [pages, page_size, 512].

    A page holds the data of all its tokens, then their scales.
    """
    data = pages[:, : page_size * 576].reshape(-1, page_size, 576)
    codes = pages[:, page_size * 576 : page_size * 584].reshape(-1, page_size, 8)[..., :7].int()
    scales = torch.where(codes == 0, 0.0, torch.exp2((codes - 127).float())).repeat_interleave(64, -1)
    nope = (data[..., :448].contiguous().view(torch.float8_e4m3fn).float() * scales).bfloat16()
    return torch.cat([nope, data[..., 448:].contiguous().view(torch.bfloat16)], -1)


def e2m1(data: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of bytes, two a byte; the even one is in the low half."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2).long()
    return torch.where(codes < 8, 1.0, -1.0) * magnitudes[codes & 7]


def e4m3_bytes(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float8_e4m3fn).float()


def unpack_nvfp4_ds_mla(rows: torch.Tensor, outer: torch.Tensor | None) -> torch.Tensor:
    """Returns bytes [pages, page_size, 432, 416 or 368] as numbers [pages, page_size, 576]."""
    scales = e4m3_bytes(rows[..., 256:288]) * (1.0 if outer is None else outer)
    nope = (e2m1(rows[..., :256]) * scales.repeat_interleave(16, -1)).bfloat16()
    if rows.shape[-1] == 368:
        rope = (e4m3_bytes(rows[..., 304:]) * rows[..., 288:292].contiguous().view(torch.float32)).bfloat16()
    else:
        rope = rows[..., -128:].contiguous().view(torch.bfloat16)
    return torch.cat([nope, rope], -1)


def unpack_fp4_dsv4(cache: Any) -> torch.Tensor:
    """Returns the numbers of nvfp4_dsv4, pages with footers, or mxfp4_dsv4, rows of 368 bytes."""
    if cache.format == "mxfp4_dsv4":
        data, rope = cache.kv[..., :224], cache.kv[..., 240:]
        scales = torch.exp2((cache.kv[..., 224:238].int() - 127).float()).repeat_interleave(32, -1)
    else:
        rows = cache.kv[:, : cache.page_size * 352].reshape(-1, cache.page_size, 352)
        footer = cache.kv[:, cache.page_size * 352 : cache.page_size * 384].reshape(-1, cache.page_size, 32)
        data, rope, scales = rows[..., :224], rows[..., 224:], e4m3_bytes(footer[..., :28]).repeat_interleave(16, -1)
    return torch.cat([(e2m1(data) * scales).bfloat16(), rope.contiguous().view(torch.bfloat16)], -1)


def unpack_v41(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Returns pages of fp8_dsv41, 528 bytes a token, or fp4_dsv41, 288, as numbers [pages, page_size, 512]."""
    row, footer = (256, 32) if pages.shape[1] < page_size * 528 else (512, 16)
    data = pages[:, : page_size * row].reshape(-1, page_size, row)
    scales = pages[:, page_size * row : page_size * (row + footer)].reshape(-1, page_size, footer)
    if row == 512:
        values = data.contiguous().view(torch.float8_e4m3fn).float()
        return (values * torch.exp2((scales.int() - 127).float()).repeat_interleave(32, -1)).bfloat16()
    return (e2m1(data) * e4m3_bytes(scales).repeat_interleave(16, -1)).bfloat16()


def unpack_fp8_nope(rows: torch.Tensor) -> torch.Tensor:
    """Returns bytes [pages, page_size, 528] as numbers [pages, page_size, 512]."""
    scales = rows[..., 512:].contiguous().view(torch.float32).repeat_interleave(128, -1)
    return (rows[..., :512].contiguous().view(torch.float8_e4m3fn).float() * scales).bfloat16()


def unpack(cache: Any) -> torch.Tensor:
    """Returns the numbers of a packed KvCache, [pages, page_size, channels]."""
    if cache.format == "fp8_ds_mla":
        return unpack_fp8_ds_mla(cache.kv)
    if cache.format == "fp8_nope":
        return unpack_fp8_nope(cache.kv)
    if cache.format.startswith("nvfp4_ds_mla"):
        return unpack_nvfp4_ds_mla(cache.kv, cache.ckv_scale)
    if cache.format in ("nvfp4_dsv4", "mxfp4_dsv4"):
        return unpack_fp4_dsv4(cache)
    return (unpack_fp8_dsv4 if cache.format == "fp8_dsv4" else unpack_v41)(cache.kv, cache.page_size)


def check(got: torch.Tensor, wanted: torch.Tensor, tolerance: float | None = None) -> None:
    """Checks that numbers are close, by the precision of the element type, and infinities stand where they should."""
    if tolerance is None:
        tolerance = {torch.bfloat16: 1e-2, torch.float16: 3e-3}.get(got.dtype, 2e-3)
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)
