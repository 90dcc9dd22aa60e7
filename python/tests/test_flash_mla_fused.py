# SPDX-License-Identifier: Apache-2.0
"""Tests the fused functions of libmla.flash_mla against float64, and against the operations that they are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import libmla
from libmla.flash_mla import fused_norm_rope_attn_rope_cast as fused
from test_finish_output import angles

TOKENS, HEADS, GROUPS, KEYS, D, ROPE = 5, 8, 2, 40, 512, 64
POSITIONS = torch.tensor([0, 3, 17, 50, 99], dtype=torch.int32)
LAYOUT = (GROUPS, 32, True, True, True)
SCALE = D**-0.5


def rotation(*, norm: bool = True) -> tuple[Any, ...]:
    return (norm, 1e-6, POSITIONS, False, ROPE, angles(100))


def turned(x: torch.Tensor, sign: float) -> torch.Tensor:
    """Returns x [T, H, D] in float64 with its last channels turned by the tokens' positions."""
    x = x.double().clone()
    cos, sin = angles(100)[POSITIONS].double()[:, None].chunk(2, -1)
    a, b = x[..., -ROPE::2].clone(), x[..., -ROPE + 1 :: 2].clone()
    x[..., -ROPE::2], x[..., -ROPE + 1 :: 2] = a * cos - sign * b * sin, b * cos + sign * a * sin
    return x


def values_of(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Returns the output [T, H, D] that codes and exponents stand for."""
    assert codes.shape == (TOKENS, GROUPS, HEADS // GROUPS * D) and codes.dtype == torch.float8_e4m3fn
    assert exponents.shape == (TOKENS, GROUPS, HEADS // GROUPS * D // 128) and exponents.dtype == torch.int32
    assert exponents.stride(0) == 1 and exponents.stride(2) == 8  # tokens side by side, padded to a multiple of four
    scales = torch.exp2(exponents.contiguous().view(torch.uint8).double() - 127)
    return (codes.double().unflatten(-1, (-1, 32)) * scales[..., None]).reshape(TOKENS, HEADS, D)


@pytest.mark.parametrize("norm", [False, True])
def test_prefill_against_float64(norm: bool) -> None:
    torch.manual_seed(1)
    q, kv = torch.randn(TOKENS, HEADS, D).bfloat16() * 3, torch.randn(KEYS, 1, D).bfloat16()
    indices = torch.stack([torch.randperm(KEYS)[:16] for _ in range(TOKENS)])[:, None].int()
    indices[:, :, 5] = -1
    sink = torch.randn(HEADS)
    codes, exponents, max_logits, lse = fused.prefill(
        *rotation(norm=norm),
        *LAYOUT,
        q,
        kv,
        indices,
        SCALE,
        attn_sink=sink,
        topk_length=torch.full((TOKENS,), 12).int(),
    )
    queries = q.double()
    if norm:
        queries = queries / (queries.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    queries = turned(queries, 1)
    for t in range(TOKENS):
        rows = kv[[i for i in indices[t, 0, :12].tolist() if i >= 0], 0].double()
        scores = queries[t] @ rows.T * SCALE
        torch.testing.assert_close(max_logits[t].double(), scores.amax(-1), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[t].double(), scores.logsumexp(-1), rtol=2e-2, atol=2e-2)
    probabilities = torch.zeros(TOKENS, HEADS, KEYS, dtype=torch.float64)
    for t in range(TOKENS):
        seen = [i for i in indices[t, 0, :12].tolist() if i >= 0]
        weights = (queries[t] @ kv[seen, 0].double().T * SCALE).exp()
        probabilities[t, :, seen] = weights / (weights.sum(-1, keepdim=True) + sink.double().exp()[:, None])
    expected = turned(probabilities @ kv[:, 0].double(), -1)
    got = values_of(codes, exponents)
    # An element of e4m3 is within 2^-4 of itself, and 2^-10 of its scale, which is at most a 224th of the largest.
    allowed = expected.abs() * 2**-4 + expected.abs().unflatten(-1, (-1, 32)).amax(-1, keepdim=True).div(
        224 * 1024
    ).expand(-1, -1, -1, 32).flatten(2)
    assert ((got - expected).abs() <= allowed + 3e-2 * expected.abs().amax()).all()
    assert torch.nn.functional.cosine_similarity(got.flatten(), expected.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("row_bytes, name", [(584, "fp8_dsv4"), (528, "fp8_dsv41"), (288, "fp4_dsv41")])
def test_decode_is_its_operations(row_bytes: int, name: Any) -> None:
    torch.manual_seed(2)
    page_size = 16
    pages = torch.zeros(3, page_size, 1, row_bytes, dtype=torch.uint8)
    pool = libmla.KvCache(name, kv=pages.view(3, -1), page_size=page_size)
    libmla.append(torch.randn(3 * page_size, D), torch.arange(3 * page_size), pool)
    q = torch.randn(TOKENS, HEADS, D).bfloat16()
    indices = torch.randint(-1, 3 * page_size, (TOKENS, 7)).int()
    lengths = torch.tensor([7, 0, 3, 7, 5], dtype=torch.int32)
    codes, exponents, lse = fused.decode(
        *rotation(), *LAYOUT, q, pages, indices, SCALE, topk_length=lengths, extra_k_cache=pages,
        extra_indices_in_kvcache=indices.flip(1).contiguous(), extra_topk_length=lengths,
    )  # fmt: skip
    norm = (q.double() / (q.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()).float()
    o, expected_lse = libmla.decode_sparse(
        turned(norm, 1).bfloat16(), pool, indices, topk_length=lengths, topk_length_per="token", extra_cache=pool,
        extra_indices=indices.flip(1).contiguous(), extra_topk_length=lengths, extra_topk_length_per="token",
        sm_scale=SCALE, return_lse=True,
    )  # fmt: skip
    expected_lse[expected_lse == -torch.inf] = torch.inf
    torch.testing.assert_close(lse, expected_lse, rtol=1e-2, atol=1e-2)
    expected = turned(o, -1)
    assert not values_of(codes, exponents)[1].any()  # the query without keys
    assert ((values_of(codes, exponents) - expected).abs() <= expected.abs() * 0.1 + 2e-2 * expected.abs().amax()).all()


def test_weights_keep_their_order() -> None:
    weight = torch.randn(GROUPS, 24, 4 * D).to(torch.float8_e4m3fn)
    coarse = torch.randint(100, 140, (GROUPS, 24, 4 * D // 128), dtype=torch.uint8)  # an exponent for 128 channels
    scales = coarse.view(torch.int32)
    same, fine = fused.permute_wv_proj((weight, scales), 4, D)
    assert same is weight and fine.shape == (GROUPS, 24, 4 * D // 128) and fine.stride(1) == 1
    assert torch.equal(fine.contiguous().view(torch.uint8), coarse.repeat_interleave(4, -1))
    assert fused.permute_wv_proj((weight, fine), 4, D)[1] is fine
    pair = (weight, scales)
    assert fused.permute_q_b_proj(pair, HEADS, D) is pair
    with pytest.raises(ValueError, match="^weight_and_sf: expected scales that divide 16 times four, got 3"):
        fused.permute_wv_proj((weight, scales[..., :3]), 4, D)


def test_says_what_is_wrong() -> None:
    q, kv, indices = torch.randn(TOKENS, HEADS, D), torch.randn(KEYS, 1, D).bfloat16(), torch.zeros(TOKENS, 1, 4).int()
    for message, layout in (
        ("num_per_channels: expected 32, got 128", (GROUPS, 128, True, True, True)),
        ("use_packed_ue8m0: expected True, got False", (GROUPS, 32, True, True, False)),
        ("n_wv_group: expected a divisor of 8 heads, got 3", (3, 32, True, True, True)),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            fused.prefill(*rotation(), *layout, q, kv, indices, SCALE)
    with pytest.raises(ValueError, match="^k_cache: expected one head of 584, 528, 288 bytes, got"):
        fused.decode(*rotation(), *LAYOUT, q, torch.zeros(2, 4, 1, 656, dtype=torch.uint8), indices[:, 0], SCALE)
