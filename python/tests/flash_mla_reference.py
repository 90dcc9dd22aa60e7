# SPDX-License-Identifier: Apache-2.0
"""Computes in float64 what FlashMLA's functions return, and checks results against it."""

import math
from dataclasses import dataclass

import torch

INF = math.inf


@dataclass
class Expected:
    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor
    magnitude: torch.Tensor  # sum of p |v|: what relative errors of the terms are relative to


def attend(q, k, v, scale, visible=None, sink=None, empty_lse=INF) -> Expected:
    """Computes attention in float64 of q [T, H, d] over k [S, d], v [S, d_v], with visible [T, S] and sink [H]."""
    scores = torch.einsum("thd,sd->ths", q.double(), k.double()) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, :], -INF)
    lse = scores.logsumexp(-1)
    empty = lse == -INF
    p = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    if sink is not None:
        p = p / (1 + torch.exp(sink.double() - lse.masked_fill(empty, 0.0)))[..., None]
    p = p.masked_fill(empty[..., None], 0.0)
    v = v.double()
    max_logits = scores.amax(-1) if scores.shape[-1] else torch.full(lse.shape, -INF, dtype=torch.float64)
    return Expected(p @ v, lse.masked_fill(empty, empty_lse), max_logits, p @ v.abs())


def stack(rows: list[Expected]) -> Expected:
    return Expected(*(torch.stack([getattr(r, f) for r in rows]) for f in vars(rows[0])))


def beside(groups: list[Expected]) -> Expected:
    """Puts groups of heads, [T, H, ...] each, side by side."""
    return Expected(*(torch.cat([getattr(g, f) for g in groups], 1) for f in vars(groups[0])))


def check(out, lse, expected: Expected) -> None:
    """Checks out and lse.

    bf16 rounds the output, and the probabilities inside, by at most 2^-9 of a term each; 2^-7 leaves a factor 2.
    """
    error = (out.double() - expected.out).abs()
    worst = (error - expected.magnitude * 2**-7).max().item()
    assert worst <= 1e-6, f"output off by {error.max().item():.3g}, {worst:.3g} over its bound"
    assert lse.dtype == torch.float32
    infinite = expected.lse.isinf()
    assert torch.equal(lse[infinite].double(), expected.lse[infinite])
    torch.testing.assert_close(lse[~infinite].double(), expected.lse[~infinite], atol=2e-4, rtol=2e-4)
