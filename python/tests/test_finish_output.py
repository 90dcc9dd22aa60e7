# SPDX-License-Identifier: Apache-2.0
"""Tests finish_output, decode_sparse that does the same, and the norms of append_rope, against float64 and against what engines compute."""

from __future__ import annotations

import pytest
import torch

import libmla

TOKENS, HEADS, D_V, ROTARY = 5, 8, 512, 64


def angles(positions: int, channels: int = ROTARY) -> torch.Tensor:
    """Returns [positions, channels] f32: cosines, then sines."""
    inverse = 10000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    return torch.cat([angle.cos(), angle.sin()], -1).float()


def turned_back(attention_out: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns it in float64, its last channels turned back, pairs of neighbours."""
    o = attention_out.double().clone()
    cos, sin = cos_sin[positions].double()[:, None].chunk(2, -1)
    x, y = o[..., -ROTARY::2].clone(), o[..., -ROTARY + 1 :: 2].clone()
    o[..., -ROTARY::2], o[..., -ROTARY + 1 :: 2] = x * cos + y * sin, y * cos - x * sin
    return o


@pytest.fixture
def output() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "attention_out": torch.randn(TOKENS, HEADS, D_V).bfloat16(),
        "cos_sin": angles(100),
        "positions": torch.tensor([0, 1, 17, 50, 99]),
    }


def test_turns_back_and_keeps_the_type(output: dict[str, torch.Tensor]) -> None:
    out = libmla.finish_output(output["attention_out"], cos_sin=output["cos_sin"], positions=output["positions"])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), turned_back(**output), rtol=2**-8, atol=1e-6)
    assert torch.equal(out[0], output["attention_out"][0])  # position 0 turns nothing


@pytest.mark.parametrize("channels", [32, 64, 128])
def test_quantizes_groups(output: dict[str, torch.Tensor], channels: int) -> None:
    out, scale = libmla.finish_output(**output, return_scale=True, channels_per_scale=channels)
    assert (out.dtype, scale.dtype, scale.shape) == (
        torch.float8_e4m3fn,
        torch.float32,
        (TOKENS, HEADS, D_V // channels),
    )
    expected = turned_back(**output).unflatten(-1, (-1, channels))
    powers = torch.exp2(torch.ceil(torch.log2(expected.abs().amax(-1).clamp(min=1e-4) / 448)))
    assert torch.equal(scale.double(), powers)
    values = out.double().unflatten(-1, (-1, channels)) * scale.double()[..., None]
    assert ((values - expected).abs() <= (expected.abs() * 2**-4).clamp(min=0) + scale[..., None] * 2**-10).all()


def test_writes_the_scales_of_deep_gemm(output: dict[str, torch.Tensor]) -> None:
    """Checks an output [T, G, D] whose groups lie apart, with scales whose tokens lie side by side: as f32, and as four
    exponents in an int32, both padded to four tokens."""
    groups, padded = 2, 8
    codes = torch.empty(groups, TOKENS, HEADS // groups, D_V, dtype=torch.float8_e4m3fn).transpose(0, 1)
    shape = (TOKENS, groups, HEADS // groups, 4)
    scale = torch.empty(groups, HEADS // groups, 4, padded)[..., :TOKENS].permute(3, 0, 1, 2)
    assert scale.shape == shape
    libmla.finish_output(**output, out=codes, scale=scale)
    plain, plain_scale = libmla.finish_output(**output, return_scale=True)
    assert torch.equal(codes.reshape(plain.shape).view(torch.uint8), plain.view(torch.uint8))
    assert torch.equal(scale.reshape(plain_scale.shape), plain_scale)

    packed = torch.zeros(groups, HEADS // groups, 1, padded, dtype=torch.int32)[..., :TOKENS].permute(3, 0, 1, 2)
    libmla.finish_output(**output, out=codes, scale=packed)
    exponents = packed.contiguous().view(torch.uint8).reshape(plain_scale.shape)
    assert torch.equal(exponents, (plain_scale.view(torch.int32) >> 23).to(torch.uint8))
    assert torch.equal(codes.reshape(plain.shape).view(torch.uint8), plain.view(torch.uint8))


@pytest.mark.parametrize("width", [1, D_V])
def test_gates(output: dict[str, torch.Tensor], width: int) -> None:
    gate = torch.randn(TOKENS, HEADS, width)
    out = libmla.finish_output(output["attention_out"], gate=gate, out_dtype="f32")
    torch.testing.assert_close(
        out.double(), output["attention_out"].double() * gate.double().sigmoid(), rtol=1e-5, atol=1e-7
    )


def sparse_problem() -> dict[str, object]:
    """Returns arguments of decode_sparse over a pool of as many rows as tokens, in bf16."""
    torch.manual_seed(5)
    return {
        "q": torch.randn(TOKENS, HEADS, D_V).bfloat16(),
        "cache": torch.randn(2, 16, D_V).bfloat16(),
        "indices": torch.randint(0, 32, (TOKENS, 9), dtype=torch.int32),
        "sm_scale": D_V**-0.5,
    }


def test_decode_sparse_finishes_its_outputs(output: dict[str, torch.Tensor]) -> None:
    problem, turn = sparse_problem(), {name: output[name] for name in ("cos_sin", "positions")}
    gate = torch.randn(TOKENS, HEADS, D_V)
    plain, lse = libmla.decode_sparse(**problem, out_dtype="f32", return_lse=True)
    wanted = turned_back(plain, **turn) * gate.double().sigmoid()
    close = {"rtol": 2**-7, "atol": 2**-8 * plain.abs().max().item()}

    o = libmla.decode_sparse(**problem, **turn, gate=gate)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.double(), wanted, **close)

    codes, scale, max_logits, same = libmla.decode_sparse(
        **problem, **turn, gate=gate, return_scale=True, channels_per_scale=64, return_max_logits=True
    )
    assert (codes.dtype, scale.shape, max_logits.shape) == (torch.float8_e4m3fn, (TOKENS, HEADS, 8), (TOKENS, HEADS))
    assert torch.equal(same, lse)
    assert torch.equal(scale, torch.exp2(torch.log2(scale).round())), "powers of two"
    values = codes.double().unflatten(-1, (-1, 64)) * scale.double()[..., None]
    torch.testing.assert_close(values.flatten(-2), wanted, rtol=2**-3, atol=close["atol"])

    grouped = torch.empty(2, TOKENS, HEADS // 2, D_V, dtype=torch.uint8).transpose(0, 1)  # u8 stands for e4m3
    exponents = torch.empty(TOKENS, 2, HEADS // 2, 8, dtype=torch.uint8)
    given = libmla.decode_sparse(**problem, **turn, gate=gate, out=grouped, scale=exponents)
    assert given[0] is grouped and given[1] is exponents
    assert torch.equal(grouped.reshape(codes.shape), codes.view(torch.uint8))
    assert torch.equal(exponents.reshape(scale.shape), (scale.view(torch.int32) >> 23).to(torch.uint8))


def test_decode_sparse_says_what_is_wrong(output: dict[str, torch.Tensor]) -> None:
    for message, given in (
        ("positions: expected a tensor, got none", {"cos_sin": output["cos_sin"]}),
        ("scale: expected a scale for each 32, 64 or 128 of 512 channels, got 2 scales",
         {"return_scale": True, "channels_per_scale": 256}),
        ("o_scale: expected none, since outputs are finished, got a tensor",
         {"return_scale": True, "o_scale": torch.ones(1)}),
        ("gate: expected shape .*got .5, 8, 2.", {"gate": torch.zeros(TOKENS, HEADS, 2)}),
        ("scale: expected none, since out is not e4m3, got a tensor",
         {"return_scale": True, "out_dtype": "bf16"}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^decode_sparse: {message}"):
            libmla.decode_sparse(**sparse_problem(), **given)


def test_says_what_is_wrong(output: dict[str, torch.Tensor]) -> None:
    for message, given in (
        ("positions: expected a tensor, got none", {"cos_sin": output["cos_sin"]}),
        ("positions: expected none, since cos_sin is not given, got a tensor", {"positions": output["positions"]}),
        ("scale: expected a tensor, got none", {"out_dtype": "e4m3"}),
        ("scale: expected a scale for each 32, 64 or 128 of 512 channels, got 2 scales",
         {"return_scale": True, "channels_per_scale": 256}),
        ("gate: expected shape .*got .5, 8, 2.", {"gate": torch.zeros(TOKENS, HEADS, 2)}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^finish_output: {message}"):
            libmla.finish_output(output["attention_out"], **given)


@pytest.mark.parametrize("whole_row", [False, True])
def test_norms_of_append_rope(whole_row: bool) -> None:
    """Checks DeepSeek V4's prologue: queries normalized as whole rows without a weight, keys with one."""
    torch.manual_seed(4)
    nope, rope = torch.randn(TOKENS, D_V), torch.randn(TOKENS, ROTARY)
    q = (torch.randn(TOKENS, HEADS, D_V), torch.randn(TOKENS, HEADS, ROTARY))
    weight = torch.randn(D_V + ROTARY if whole_row else D_V)
    cache = torch.zeros(1, 64, D_V + ROTARY, dtype=torch.bfloat16)
    positions, cos_sin = torch.tensor([0, 1, 17, 50, 99]), angles(100)
    queries = libmla.append_rope(
        nope, rope, torch.arange(TOKENS), cache, cos_sin=cos_sin, positions=positions, q=q,
        q_norm=True, norm_weight=weight, norm_eps=1e-5,
    )  # fmt: skip

    def norm(x: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    expected = norm(torch.cat(q, -1).double(), 1.0)
    back = turned_back(queries, cos_sin, positions)
    torch.testing.assert_close(back, expected, rtol=1e-5, atol=1e-5)
    row = torch.cat([nope, rope], -1).double()
    n = row.shape[1] if whole_row else D_V
    row[:, :n] = norm(row[:, :n], weight.double())
    written = turned_back(cache[0, :TOKENS, None], cos_sin, positions)[:, 0]
    torch.testing.assert_close(written, row, rtol=2**-8, atol=2**-7)
