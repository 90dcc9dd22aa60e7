# SPDX-License-Identifier: Apache-2.0
"""Tests that patched models of every architecture with latent attention compute what the unpatched ones do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import libmla
from libmla.integrations.transformers import LatentCache, LatentQuery, patch, unpatch
from libmla.integrations.transformers import layer as layer_module
from tiny_models import ARCHITECTURES, DEVICES, error, installed, one_thread, poisoned_pages, tiny_model, tokens  # noqa: F401

# Prompts that are longer than what the tiny models' indexers choose are attended from rows of bf16.
INDEXED = {"deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note", "glm5_next", "mistral_large4"}


def conversation(model: Any, parts: list[torch.Tensor], mask: torch.Tensor, **named: Any) -> list[torch.Tensor]:
    """Returns the logits of all real tokens of each part, one forward after the other."""
    cache, start, logits = None, 0, []
    for part in parts:
        end = start + part.shape[1]
        if cache is not None:
            named["past_key_values"] = cache
        out = model(part, attention_mask=mask[:, :end], use_cache=True, **named)
        logits.append(out.logits[mask[:, start:end].bool()])
        cache, start = out.past_key_values, end
    return logits


def padded(device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the parts and the mask of three requests, one of them padded on the left.

    The parts are a prompt, three tokens and one token.
    """
    parts = [tokens(3, 23, device), tokens(3, 3, device), tokens(3, 1, device)]
    mask = torch.ones(3, 27, dtype=torch.long, device=device)
    mask[1, :9] = 0
    return parts, mask


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", installed())
def test_f32(name: str, device: str) -> None:
    model = tiny_model(name, device=device)
    parts, mask = padded(device)
    expected = conversation(model, parts, mask)
    got = conversation(patch(model), parts, mask)
    errors = list(map(error, got, expected))
    # Prompts are computed in f32; what follows reads a cache of bf16.
    assert errors[0] < (3e-3 if name in INDEXED else 1e-5), errors
    assert max(errors[1:]) < 3e-3, errors
    always = list(map(error, conversation(patch(model, absorb="always"), parts, mask), expected))
    assert 1e-5 < max(always) < 3e-3, always


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", installed())
def test_bf16(name: str, device: str) -> None:
    exact = tiny_model(name, device=device)
    model = copy.deepcopy(exact).bfloat16()
    parts, mask = padded(device)
    truth, unpatched = conversation(exact, parts, mask), conversation(model, parts, mask)
    got = conversation(patch(model), parts, mask)
    assert max(map(error, got, unpatched)) <= 1e-2
    for mine, theirs, true in zip(got, unpatched, truth, strict=True):
        assert error(mine, true) < 1.3 * error(theirs, true)


def test_all_architectures_are_tested() -> None:
    folder = Path(transformers.__file__).parent / "models"
    latent = {path.parent.name for path in folder.glob("*/modeling_*.py") if "def expand_kv" in path.read_text("utf-8")}
    assert latent <= set(ARCHITECTURES)
    assert latent == {name.removesuffix("_yarn") for name in installed()} - {"kimi_k25"}, (
        "which is built upon deepseek_v3"
    )


# What a cache's format makes of rows, written down once more: ckv [..., 512] and kpe [..., 64].
def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _ds_mla(ckv: torch.Tensor, kpe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = ckv.unflatten(-1, (4, 128))
    scale = 2 ** torch.ceil(torch.log2(parts.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448))
    return (_e4m3(parts / scale) * scale).flatten(-2), kpe.bfloat16().float()


ROUNDED: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "bf16": lambda ckv, kpe: (ckv.bfloat16().float(), kpe.bfloat16().float()),
    "f16": lambda ckv, kpe: (ckv.half().float(), kpe.half().float()),
    "fp8": lambda ckv, kpe: (_e4m3(ckv), _e4m3(kpe)),
    "fp8_ds_mla": _ds_mla,
}


@pytest.mark.parametrize("cache_format", ROUNDED)
def test_formats(cache_format: str) -> None:
    """Apart from what the format does to rows, decode with queries of f32 is exact on CPUs."""
    model = tiny_model("deepseek_v3")
    parts, mask = padded("cpu")
    exact = conversation(model, parts, mask)
    patch(model, cache_format=cache_format, absorb="always", page_size=16, context=libmla.Context(device="cpu"))
    got = conversation(model, parts, mask)
    unpatch(model)
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            expand = module.expand_kv
            module.expand_kv = lambda ckv, kpe, expand=expand: expand(*ROUNDED[cache_format](ckv, kpe))
    expected = conversation(model, parts, mask)
    assert max(map(error, got, expected)) < 2e-5
    assert error(got[0], exact[0]) > 5e-5


def test_small_latents() -> None:
    model = tiny_model("mistral4")
    parts, mask = padded("cpu")
    expected = conversation(model, parts, mask)
    got = conversation(patch(model, cache_format="fp8"), parts, mask)
    assert max(map(error, got, expected)) < 5e-2


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_padding_anywhere(name: str) -> None:
    model = tiny_model(name)
    parts = [tokens(4, 20), tokens(4, 5), tokens(4, 1)]
    mask = torch.ones(4, 26, dtype=torch.long)
    mask[0, 14:20] = 0  # to the right of the prompt
    mask[1, :19] = 0
    mask[2, 5:9] = mask[2, 21] = 0  # within
    mask[3, :22] = 0  # everything
    expected = conversation(model, parts, mask)
    for absorb in ("decode", "always"):
        got = conversation(patch(model, absorb=absorb), parts, mask)
        assert max(map(error, got, expected)) < 3e-3
    cache = LatentCache(model.config)
    conversation(model, parts, mask, past_key_values=cache)
    assert cache.lengths == mask.sum(1).tolist()


@pytest.mark.parametrize("name", ["deepseek_v2", "kimi_linear"])
def test_a_long_chunk_behind_a_prefix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_module, "_PREFIX_ROWS", 48)  # the prefix in slices
    merged = []
    merge_states = libmla.merge_states
    monkeypatch.setattr(libmla, "merge_states", lambda *a, **n: merged.append(1) or merge_states(*a, **n))
    model = tiny_model(name)
    parts = [tokens(3, 41), tokens(3, 37), tokens(3, 2)]
    mask = torch.ones(3, 80, dtype=torch.long)
    mask[0, :40] = mask[2, :17] = 0
    expected = conversation(model, parts, mask)
    got = conversation(patch(model), parts, mask)
    assert max(map(error, got, expected)) < 3e-3
    assert merged


def test_without_a_cache() -> None:
    for name in ("deepseek_v3", "deepseek_v32", "kimi_linear"):
        model = tiny_model(name)
        ids, mask = tokens(2, 19), torch.ones(2, 19, dtype=torch.long)
        mask[0, :4] = 0
        expected = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        out = patch(model)(ids, attention_mask=mask, use_cache=False)
        assert out.past_key_values is None
        assert error(out.logits[mask.bool()], expected) < (3e-3 if name in INDEXED else 1e-5)


def test_unpatch() -> None:
    for name in ("deepseek_v3", "glm5_next", "kimi_linear"):
        model = tiny_model(name)
        ids = tokens(2, 9)
        before = model(ids)
        patch(patch(model, cache_format="fp8"), cache_format="f16")
        assert model(ids).past_key_values.cache_format == "f16"
        after = unpatch(unpatch(model))(ids)
        assert torch.equal(after.logits, before.logits)
        assert type(after.past_key_values) is type(before.past_key_values)
        assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 11)


def test_a_copy_of_a_patched_model() -> None:
    model = patch(tiny_model("deepseek_v3"))
    twin = copy.deepcopy(model)
    for weight in model.parameters():
        weight.zero_()
    ids = tokens(2, 9)
    expected = unpatch(copy.deepcopy(twin))(ids).logits
    assert error(twin(ids).logits, expected) < 1e-5
    assert twin.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)


def test_projections_that_are_no_linear_layers() -> None:
    """Projections that are quantized or adapted are multiplied out."""

    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = tiny_model("deepseek_v3")
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            plain = module.kv_b_proj
            module.kv_b_proj = Doubled(plain.in_features, plain.out_features, bias=False)
            module.kv_b_proj.weight = plain.weight
    parts, mask = padded("cpu")
    expected = conversation(model, parts, mask)
    assert max(map(error, conversation(patch(model), parts, mask), expected)) < 3e-3


class Window:
    """Chooses the first token and the last ``width``."""

    def __init__(self, width: int) -> None:
        self.width, self.layers = width, []

    def __call__(self, query: LatentQuery) -> torch.Tensor:
        self.layers.append(query.layer)
        assert query.q_nope.shape == (len(query.positions), 4, 512)
        back = torch.arange(self.width, device=query.positions.device)
        window = query.positions[:, None] - back
        return torch.cat([torch.where(window > 0, window, -1), torch.zeros_like(window[:, :1])], 1).int()


@pytest.mark.parametrize("absorb", ["decode", "always"])
def test_select_keys(absorb: str) -> None:
    model = tiny_model("deepseek_v3")
    ids, width = tokens(2, 30), 7
    at = torch.arange(30)
    seen = (at <= at[:, None]) & ((at > at[:, None] - width) | (at == 0))
    expected = model(ids, attention_mask=seen.expand(2, 1, 30, 30)).logits
    window = Window(width)
    patch(model, absorb=absorb, select_keys=window)
    prompt = model(ids[:, :20])
    rest = model(ids[:, 20:], past_key_values=prompt.past_key_values)
    assert error(torch.cat([prompt.logits, rest.logits], 1), expected) < 3e-3
    assert window.layers == [0, 1, 0, 1]
    dense = unpatch(model)(ids).logits
    assert error(patch(model, absorb=absorb, select_keys=lambda query: None)(ids).logits, dense) < 3e-3
    assert error(expected, dense) > 0.05


def test_an_emulated_gpu(emulated_sm90: str) -> None:
    model = tiny_model("deepseek_v3")
    parts, mask = padded("cpu")
    parts, mask = [parts[0][:, :12], parts[2]], mask[:, :13]
    expected = conversation(model, parts, mask)
    context = libmla.Context(device=emulated_sm90)
    got = conversation(patch(model, context=context), parts, mask)
    assert max(map(error, got, expected)) < 5e-3


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v3", {"cache_format": "fp8_dsv4"}, "cache_format: .* bf16, f16, fp8, fp8_ds_mla, .* got fp8_dsv4"),
    ("deepseek_v3", {"cache_format": "mxfp4_dsv4"}, "cache_format: .* nvfp4_ds_mla_368 .* got mxfp4_dsv4"),
    ("mistral4", {"cache_format": "nvfp4_ds_mla"}, "cache_format: .* bf16, f16, fp8 for .* got nvfp4_ds_mla, whose"),
    ("deepseek_v3", {"cache_format": "int4"}, "cache_format: .* got 'int4'"),
    (
        "mistral4",
        {"cache_format": "fp8_ds_mla"},
        "cache_format: .* bf16, f16, fp8 .* 256 latent and 64 .* got fp8_ds_mla",
    ),
    ("mistral_large4", {"cache_format": "fp8_ds_mla"}, "cache_format: .* 512 latent and 0 rotary"),
    ("deepseek_v3", {"absorb": "never"}, "absorb: expected 'decode' or 'always', got 'never'"),
    ("deepseek_v3", {"compute": "fp4"}, 'compute: expected "default", "fp8" or "exact", got "fp4"'),
    ("deepseek_v3", {"compute": "fp8"}, "compute: expected default, since bf16 caches are not quantized, got fp8"),
    ("deepseek_v3", {"page_size": 0}, "page_size: expected 1 or more, got 0"),
    ("deepseek_v32", {"select_keys": Window(3)}, "select_keys: expected None, as DeepseekV32Attention has an indexer"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED)
def test_refused_arguments(name: str, arguments: dict[str, Any], message: str) -> None:
    if name not in installed():
        pytest.skip(f"no {name} in transformers {transformers.__version__}")
    model = tiny_model(name)
    ids = tokens(1, 5)
    before = model(ids).logits
    with pytest.raises(ValueError, match=message):
        patch(model, **arguments)
    assert torch.equal(model(ids).logits, before)
    patch(model, page_size=7)
    with pytest.raises(ValueError, match=message):
        patch(model, **arguments)
    assert model(ids).past_key_values.page_size == 7


def test_refused_models() -> None:
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    with pytest.raises(
        ValueError, match="model: expected .* latent attention .* got LlamaForCausalLM with LlamaAttention"
    ):
        patch(llama)
    with pytest.raises(ValueError, match="config: .* kv_lora_rank, got LlamaConfig"):
        LatentCache(llama.config)
    model = tiny_model("deepseek_v3")
    model.model.layers[1].self_attn.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(4 * 56))
    with pytest.raises(ValueError, match="kv_b_proj without a bias, got one in DeepseekV3Attention"):
        patch(model)


def test_a_model_that_expands_before_it_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("deepseek_v3")
    monkeypatch.delattr(type(model.model.layers[0].self_attn), "expand_kv")
    with pytest.raises(ValueError, match="transformers 5.17 and newer, got DeepseekV3Attention and transformers"):
        patch(model)


def test_refused_calls() -> None:
    model = tiny_model("deepseek_v3")
    twin = type(model)(model.config).eval()
    patch(model)
    ids = tokens(2, 6)
    with pytest.raises(
        ValueError, match="past_key_values: expected a .*LatentCache for a patched model, got DynamicCache"
    ):
        model(ids, past_key_values=transformers.DynamicCache())
    cache = model.model(ids, use_cache=True, past_key_values=LatentCache(model.config)).past_key_values
    assert cache.lengths == [6, 6]
    model(ids, None, None, cache)
    assert cache.lengths == [12, 12]
    own = transformers.DynamicCache()
    model.model(ids, past_key_values=own)
    with pytest.raises(ValueError, match="past_key_values: expected a .*LatentCache"):
        model.model(ids, past_key_values=own)
    with pytest.raises(
        ValueError, match="DeepseekV3Attention is of a model that was not patched, but shares its config"
    ):
        twin(ids)
    with pytest.raises(ValueError, match="attention_mask: expected a causal mask"):
        model(ids, attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention_mask: expected one that says where padding is"):
        model(ids, attention_mask=torch.zeros(2, 1, 6, 6))
    with pytest.raises(ValueError, match="cache_implementation: expected none for a patched model, .* got 'static'"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="use_cache: expected True .* absorb='always'"):
        patch(model, absorb="always")(ids, use_cache=False)
    with torch.enable_grad(), pytest.raises(TypeError, match="no_grad"):
        model(ids)
