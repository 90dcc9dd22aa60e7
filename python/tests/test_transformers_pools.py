# SPDX-License-Identifier: Apache-2.0
"""Tests that patched models of DeepSeek V4's kind attend to their windows and pools as the unpatched ones do."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
import torch

transformers = pytest.importorskip("transformers")
v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import libmla
from libmla.integrations.transformers import patch, unpatch
from libmla.types import CacheFormat
from test_transformers import conversation, padded
from text_models import example
from tiny_models import DEVICES, error, one_thread, poisoned_pages, tiny_model, tokens  # noqa: F401

OF_OTHER_WIDTHS = ("fp8_ds_mla", "nvfp4_ds_mla", "nvfp4_ds_mla_416", "nvfp4_ds_mla_368")
FORMATS = [name for name in get_args(CacheFormat) if name not in OF_OTHER_WIDTHS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [64, 3])
def test_f32(device: str, page_size: int) -> None:
    model = tiny_model("deepseek_v4", device=device)
    parts, mask = padded(device)
    expected = conversation(model, parts, mask)
    for cache_format in ("bf16", "f16"):
        got = conversation(patch(model, cache_format=cache_format, page_size=page_size), parts, mask)
        errors = list(map(error, got, expected))
        assert 1e-6 < max(errors) < 4e-3, errors


@pytest.mark.parametrize("device", DEVICES)
def test_bf16(device: str) -> None:
    exact = tiny_model("deepseek_v4", device=device)
    model = copy.deepcopy(exact).bfloat16()
    parts, mask = padded(device)
    truth, unpatched = conversation(exact, parts, mask), conversation(model, parts, mask)
    got = conversation(patch(model), parts, mask)
    for mine, theirs, true in zip(got, unpatched, truth, strict=True):
        assert error(mine, true) < 1.3 * error(theirs, true)


def test_without_a_cache_of_the_model() -> None:
    model = tiny_model("deepseek_v4")
    texts = [tokens(2, 19), tokens(1, 8), tokens(1, 1)]  # of the last one nothing is compressed
    expected = [model(ids, use_cache=False).logits for ids in texts]
    patch(model, cache_format="f16")
    assert (
        max(error(model(ids, use_cache=False).logits, true) for ids, true in zip(texts, expected, strict=True)) < 1e-3
    )


# What formats make of rows [..., 512], written down once more.
def _e4m3(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.float8_e4m3fn).float()


def _groups(rows: torch.Tensor, size: int) -> torch.Tensor:
    groups = rows.unflatten(-1, (-1, size))
    scale = 2 ** torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448))
    return (_e4m3(groups / scale) * scale).flatten(-2)


ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bf16": lambda rows: rows.bfloat16().float(),
    "fp8": _e4m3,
    "fp8_dsv41": lambda rows: _groups(rows, 32),
    "fp8_dsv4": lambda rows: torch.cat([_groups(rows[..., :448], 64), rows[..., 448:].bfloat16().float()], dim=-1),
}
PAIRS = [*itertools.product(("bf16", "fp8", "fp8_dsv41"), repeat=2), ("fp8_dsv4", "fp8_dsv4")]


@contextmanager
def rounded(model: Any, window: str, pool: str) -> Iterator[None]:
    """Lets an unpatched model attend to rows as these formats store them."""

    def attend(module: Any, query: Any, key: torch.Tensor, value: Any, mask: torch.Tensor, **named: Any) -> Any:
        compressed = counts.get(module.layer_idx, 0)
        first = key.shape[2] - compressed
        rows = torch.cat([ROUNDED[window](key[:, :, :first]), ROUNDED[pool](key[:, :, first:])], dim=2)
        return v4.eager_attention_forward(module, query, rows, rows, mask, **named)

    counts: dict[int, int] = {}
    hooks = []
    for layer in model.model.layers:
        if layer.self_attn.compressor is not None:

            def note(_: Any, __: Any, made: Any, at: int = layer.self_attn.layer_idx) -> None:
                counts[at] = made[0].shape[2]

            hooks.append(layer.self_attn.compressor.register_forward_hook(note))
    AttentionInterface.register("rounded_rows", attend)
    AttentionMaskInterface.register("rounded_rows", eager_mask)
    model.set_attn_implementation("rounded_rows")
    yield
    model.set_attn_implementation("eager")
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(("window", "pool"), PAIRS)
def test_window_and_pool_have_formats_of_their_own(window: str, pool: str) -> None:
    """Apart from what the formats do to rows, attention with queries of f32 is exact on CPUs."""
    model = tiny_model("deepseek_v4")
    parts, mask = padded("cpu")
    exact = conversation(model, parts, mask)
    with rounded(model, window, pool):
        expected = conversation(model, parts, mask)
    got = conversation(patch(model, cache_format=window, pool_format=pool), parts, mask)
    for mine, theirs, true in zip(got, expected, exact, strict=True):
        assert error(mine, theirs) < 0.05 * error(theirs, true)
    if window == pool:
        alone = conversation(patch(model, cache_format=window), parts, mask)
        assert all(map(torch.equal, alone, got))


@pytest.mark.parametrize("cache_format", FORMATS)
def test_every_format_of_512_channels(cache_format: str) -> None:
    model = tiny_model("deepseek_v4")
    parts, mask = padded("cpu")
    exact = conversation(model, parts, mask)
    errors = list(map(error, conversation(patch(model, cache_format=cache_format), parts, mask), exact))
    assert max(errors) < (0.2 if "fp4" in cache_format else 0.06 if "fp8" in cache_format else 4e-3), errors


@pytest.mark.parametrize("beams", [1, 2])
def test_generate(beams: int) -> None:
    model = tiny_model("deepseek_v4")
    (prompt, *_), mask = padded("cpu")
    named = {"attention_mask": mask[:, :23], "max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    expected = model.generate(prompt, **named)
    assert torch.equal(patch(model, cache_format="f16").generate(prompt, **named), expected)


def test_products_of_e4m3() -> None:
    """On a CPU the reference alone computes them."""
    model = tiny_model("deepseek_v4")
    ids = tokens(1, 17)
    usual = patch(model, cache_format="fp8_dsv4")(ids).logits
    named: dict[str, Any] = {"cache_format": "fp8_dsv4", "compute": "fp8"}
    assert 1e-3 < error(patch(model, **named, context=libmla.Context(backend="reference"))(ids).logits, usual) < 0.1
    with pytest.raises(libmla.UnsupportedError, match="not those of compute fp8"):
        patch(model, **named, context=libmla.Context(backend="cpu_portable"))(ids)


def test_patching_is_undone_and_copied() -> None:
    model = tiny_model("deepseek_v4")
    ids = tokens(1, 17)
    before = model(ids).logits
    patch(model, cache_format="fp8_dsv4")
    coarse = model(ids).logits
    assert error(coarse, before) > 1e-3
    twin = copy.deepcopy(model)
    assert torch.equal(unpatch(model)(ids).logits, before)
    assert torch.equal(twin(ids).logits, coarse)
    assert torch.equal(unpatch(twin)(ids).logits, before)


def test_the_example_is_trained_with_what_its_cache_stores() -> None:
    with example():
        import shapes
    model = shapes.new_model("deepseek-v4", shapes.Sizes(512, 3, 64, 32, 2, 512), dropout=0.0).eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_()
    ids = tokens(2, 384)
    trained = model(ids, use_cache=False).logits
    exact = model.set_attn_implementation("eager") or model(ids, use_cache=False).logits
    stored = patch(model, cache_format="fp8_dsv4")(ids, use_cache=False).logits
    assert error(trained, stored) < 0.1 * error(trained, exact)


def test_an_emulated_gpu(emulated_sm90: str) -> None:
    model = tiny_model("deepseek_v4")
    ids = tokens(1, 15)
    expected = model(ids).logits
    context = libmla.Context(device=emulated_sm90)
    assert error(patch(model, cache_format="f16", context=context)(ids).logits, expected) < 5e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache_format": "fp8_ds_mla"}, "cache_format: .* fp8_dsv4, .* 448 latent and 64 .* got fp8_ds_mla, whose"),
        ({"pool_format": "nvfp4_ds_mla"}, "pool_format: expected one of bf16, .* got nvfp4_ds_mla, whose"),
        ({"pool_format": "fp8_dsv4"}, "pool_format: expected .* beside others, got fp8_dsv4 beside bf16"),
        ({"pool_format": "int4"}, "pool_format: .* got 'int4'"),
        ({"compute": "fp8", "cache_format": "fp8_dsv4", "pool_format": "bf16"}, "compute: .* bf16 caches are not"),
        ({"select_keys": print}, "select_keys: expected None, as DeepseekV4Attention has an indexer"),
        ({"page_size": 0}, "page_size: expected 1 or more, got 0"),
        ({"absorb": "never"}, "absorb: expected 'decode' or 'always', got 'never'"),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], message: str) -> None:
    model = tiny_model("deepseek_v4")
    ids = tokens(1, 5)
    before = model(ids).logits
    with pytest.raises(ValueError, match=message):
        patch(model, **arguments)
    assert torch.equal(model(ids).logits, before)


def test_models_without_a_pool_take_no_format_for_one() -> None:
    with pytest.raises(ValueError, match="pool_format: expected None, as DeepseekV3ForCausalLM has no compressed pool"):
        patch(tiny_model("deepseek_v3"), pool_format="bf16")
