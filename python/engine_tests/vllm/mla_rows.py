# SPDX-License-Identifier: Apache-2.0
"""Cached rows as numbers, and attention over them in float64: what the backends should compute."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def dequantized(kv_cache: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """[num_pages, page_size, d] float64, of a cache of any format that vLLM has for MLA."""
    if kv_cache.dtype == torch.uint8 and kv_cache.shape[-1] == 656:
        stored = kv_cache[..., :512].contiguous().view(torch.float8_e4m3fn).float()
        scales = kv_cache[..., 512:528].contiguous().view(torch.float32)
        ckv = (stored * scales.repeat_interleave(128, -1)).bfloat16()
        kpe = kv_cache[..., 528:].contiguous().view(torch.bfloat16)
        return torch.cat((ckv, kpe), -1).double()
    if kv_cache.dtype in (torch.uint8, torch.float8_e4m3fn):
        return (kv_cache.view(torch.float8_e4m3fn).float() * scale).bfloat16().double()
    return kv_cache.double()


def request_rows(rows: torch.Tensor, table: Sequence[int], length: int) -> torch.Tensor:
    """[length, d]: the tokens of a request whose pages these are."""
    return rows[list(table)].reshape(-1, rows.shape[-1])[:length]


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [T, H, d_v] and lse [T, H] of queries [T, H, d] over keys [S, H or 1, d]; visible [T, S]."""
    scores = torch.einsum("thd,shd->ths", q.double(), keys.double().expand(-1, q.shape[1], -1)) * sm_scale
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0)
    return torch.einsum("ths,shd->thd", weights, values.double().expand(-1, q.shape[1], -1)), lse


def causal(q_len: int, kv_len: int) -> torch.Tensor:
    """[q_len, kv_len]: the last query sees the last key, and each earlier one sees one less."""
    return torch.arange(kv_len)[None] <= torch.arange(kv_len - q_len, kv_len)[:, None]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double().cpu() - expected.cpu()).norm() / expected.norm().clamp(min=1e-30))
