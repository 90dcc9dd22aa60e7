# SPDX-License-Identifier: Apache-2.0
"""Attention in float64, written down as it is defined."""

from __future__ import annotations

import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request: q [T, H, d], k [S, H or 1, d], v [S, H or 1, d_v], seen bool [T, S] -> (o [T, H, d_v], lse [T, H])."""
    q, k, v = (tensor.double().cpu() for tensor in (q, k, v))
    k, v = (tensor.expand(-1, q.shape[1], -1) for tensor in (k, v))
    scores = torch.einsum("thd,shd->ths", q, k) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    out = torch.einsum("ths,shd->thd", weights, v)
    if sink is not None:
        out = out * torch.sigmoid(lse - sink.double().cpu()).nan_to_num(0.0)[..., None]  # no key, no sink: 0 of nothing
    return out, lse


def causal(queries: int, keys: int) -> torch.Tensor:
    """Which key a query sees if the queries are the last ones: bool [queries, keys]."""
    return torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of a tensor: largest difference over largest value."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if not expected.numel():
        return 0.0
    difference = (got.double().cpu() - expected).abs().max()
    return float(difference / expected.abs().max().clamp(min=1e-30))
