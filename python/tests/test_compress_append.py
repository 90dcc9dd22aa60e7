# SPDX-License-Identifier: Apache-2.0
"""Tests compress with what it appends beside its latents against two calls, and what it refuses of that part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import libmla
from batches import ints

UNTOUCHED = 77
TOKENS = 6
PAGE = 16


def packed(cache_format: str) -> libmla.KvCache:
    page_bytes = libmla.page_bytes(cache_format, 512, PAGE)
    return libmla.KvCache(cache_format, kv=torch.full((2, page_bytes), UNTOUCHED, dtype=torch.uint8), page_size=PAGE)


def angles() -> torch.Tensor:
    turned = torch.arange(12)[:, None] * torch.rand(32)
    return torch.cat((turned.cos(), turned.sin()), -1)


def layer(window: str, pool: str, ratio: int, heads: int = 0) -> dict[str, Any]:
    """Returns the arguments of a call for a prompt of two tokens and one of four that goes on, as V4 (ratio 4, with
    overlap) and V4.1 have them."""
    overlap = ratio == 4
    width = 1024 if overlap else 512
    append = {
        "ckv": torch.randn(TOKENS, 448).bfloat16(),
        "kpe": torch.randn(TOKENS, 64).bfloat16(),
        "slot_mapping": torch.tensor([0, 17, 4, -1, 30, 31]),
        "cache": packed(window),
        "cos_sin": angles(),
        "positions": torch.tensor([0, 1, 4, 5, 6, 7]),
        "norm_weight": torch.randn(512),
    }
    if heads:
        q = torch.randn(TOKENS, heads, 512).bfloat16()
        append["q"] = (q[..., :448], q[..., 448:])
        append["q_out"] = torch.full((TOKENS, heads, 512), UNTOUCHED, dtype=torch.bfloat16)
        append["q_norm"] = True
    return {
        "kv": torch.randn(TOKENS, width),
        "score": torch.randn(TOKENS, width),
        "kv_len": ints([2, 8]),
        "qo_indptr": ints([0, 2, 6]),
        "ratio": ratio,
        "overlap": overlap,
        "state": torch.randn(2, 8, 2 * width),
        "state_table": ints([0, 1])[:, None],
        "norm_weight": torch.randn(512),
        "slot_mapping": torch.tensor([-1, 5, -1, 6, -1, 7]),
        "cache": packed(pool),
        "cos_sin": angles(),
        "latent": torch.full((TOKENS, 512), UNTOUCHED, dtype=torch.bfloat16),
        "append": append,
    }


def written(arguments: dict[str, Any]) -> list[torch.Tensor]:
    append = arguments["append"]
    tensors = [arguments["state"], arguments["cache"].kv, arguments["latent"], append["cache"].kv]
    return tensors + ([append["q_out"]] if "q" in append else [])


@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize(
    ("window", "pool", "ratio"),
    [
        ("fp8_dsv4", "fp8_dsv4", 4),
        ("fp8_dsv4", "nvfp4_dsv4", 4),
        ("fp8_dsv41", "fp4_dsv41", 2),
        ("nvfp4_dsv4", "fp8_dsv4", 4),
    ],
)
def test_one_call_leaves_the_bits_of_two(window: str, pool: str, ratio: int, heads: int, emulated_sm90: str) -> None:
    for device in ("cpu", emulated_sm90):
        context = libmla.Context(num_threads=2, device=device)
        torch.manual_seed(ratio + heads)
        one = layer(window, pool, ratio, heads)
        torch.manual_seed(ratio + heads)
        two = layer(window, pool, ratio, heads)
        before = [tensor.clone() for tensor in written(two)]
        assert libmla.compress(**one, context=context) is one["latent"]
        libmla.append_rope(**two["append"], context=context)
        libmla.compress(**{**two, "append": None}, context=context)
        for a, b, old in zip(written(one), written(two), before, strict=True):
            assert a.view(torch.uint8).equal(b.view(torch.uint8))
            assert not a.view(torch.uint8).equal(old.view(torch.uint8))


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"ckv": torch.zeros(5, 448).bfloat16()}, ValueError, "append.ckv: expected shape [T = 6, kv_lora_rank = 448]"),
        ({"ckv": None}, ValueError, "append.ckv: expected a tensor, got none"),
        ({"ckv": "rows"}, TypeError, "append.ckv: expected a tensor"),
        ({"positions": torch.full((6,), 12)}, ValueError, "append.positions: expected 0 to 11"),
        ({"positions": torch.zeros(6)}, ValueError, "append.positions: expected int64"),
        ({"slot_mapping": torch.full((6,), 32)}, ValueError, "append.slot_mapping: expected at most 31"),
        ({"cache": torch.zeros(2, PAGE, 500).bfloat16()}, ValueError, "append.cache: expected shape"),
        ({"cache": libmla.KvCache("fp9", kv=torch.zeros(1))}, ValueError, "append.cache.format: expected"),
        ({"norm_weight": torch.zeros(3)}, ValueError, "append.norm_weight: expected shape"),
        ({"norm_eps": "small"}, TypeError, "append.norm_eps: expected"),
        ({"interleaved": None}, TypeError, "append.interleaved: expected a bool"),
        ({"q": (torch.zeros(6, 2, 448).bfloat16(), torch.zeros(6, 2, 64).bfloat16())}, ValueError, "append.q_out: "),
        ({"q_out": torch.zeros(6, 2, 512)}, ValueError, "append.q_out: expected none, since append.q[0] is not given"),
    ],
    ids=lambda value: value if type(value) is str else "",
)
def test_errors_name_the_argument_and_nothing_is_written(
    changed: dict[str, Any], kind: type[Exception], message: str
) -> None:
    arguments = layer("fp8_dsv4", "fp8_dsv4", 4)
    arguments["append"].update(changed)
    before = [arguments[name].clone() for name in ("state", "latent")]
    with pytest.raises(kind) as caught:
        libmla.compress(**arguments, context=libmla.Context(num_threads=1, device="cpu"))
    assert str(caught.value).startswith(f"compress: {message}"), str(caught.value)
    assert [arguments["state"].equal(before[0]), arguments["latent"].equal(before[1])] == [True, True]
    assert (arguments["cache"].kv == UNTOUCHED).all()


def test_arguments_are_those_of_append_rope() -> None:
    arguments = layer("fp8_dsv4", "fp8_dsv4", 4)
    for unknown in ("context", "q_out_dtype", "keys"):
        with pytest.raises(TypeError, match=f"compress: append: expected .*, got {unknown}"):
            libmla.compress(**{**arguments, "append": {**arguments["append"], unknown: None}})
    del arguments["append"]["kpe"], arguments["append"]["positions"]
    with pytest.raises(TypeError, match=r"compress: append: .*missing 1 required .*argument: 'kpe'"):
        libmla.compress(**arguments)
    with pytest.raises(TypeError, match="compress: append: expected a dict of append_rope's arguments, got Tensor"):
        libmla.compress(**{**arguments, "append": torch.zeros(1)})


def test_gradients_are_refused() -> None:
    arguments = layer("fp8_dsv4", "fp8_dsv4", 4)
    arguments["append"]["norm_weight"].requires_grad_()
    with torch.enable_grad(), pytest.raises(TypeError, match=r"compress: .*inference only"):
        libmla.compress(**arguments)


def test_the_window_and_the_pool_have_memory_of_their_own() -> None:
    arguments = layer("fp8_dsv4", "fp8_dsv4", 4)
    arguments["append"]["cache"] = arguments["cache"]
    with pytest.raises(ValueError, match=r"compress: cache.kv: expected memory apart from that of append\.cache\.kv"):
        libmla.compress(**arguments)
    assert (arguments["cache"].kv == UNTOUCHED).all()
