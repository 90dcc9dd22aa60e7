# SPDX-License-Identifier: Apache-2.0
"""Tests that compress makes of tokens what transformers' own modules of DeepSeek V4 make of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

import libmla
from batches import ints
from test_cache import rotated
from test_compress import check_latents, pooled
from tiny_models import one_thread, tiny_model  # noqa: F401


def randomize(module: torch.nn.Module) -> torch.nn.Module:
    for path, weight in module.named_parameters():
        if path.endswith("norm.weight"):
            weight.uniform_(0.5, 1.5)
        elif path.endswith("position_bias"):
            weight.normal_()
        else:
            weight.normal_(std=weight.shape[-1] ** -0.5)
        if path.endswith("gate_proj.weight"):
            weight *= 2
    return module.eval()


@dataclasses.dataclass
class Theirs:
    """Holds a compressor of transformers: of a layer, or within it of the indexer.

    Attributes:
        layer: the layer's compressor.
        own: the compressor itself, with kv_proj, gate_proj, position_bias and kv_norm.
        make_cache: makes the cache of one layer.
        name: of its entries in that cache.
    """

    layer: Any
    own: Any
    make_cache: Any
    name: str

    def angles(self, positions: int) -> torch.Tensor:
        """Returns cosines and sines as libmla takes them."""
        where = torch.arange(positions)[None]
        return torch.cat(self.own.rotary_emb(torch.zeros(1), where, layer_type="compress"), -1)[0]

    def run(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Returns all latents [B, groups, D] of texts that come in parts of these lengths."""
        cache = SimpleNamespace(layers=[self.make_cache()])
        first = 0
        for length in lengths:
            part = hidden[:, first : first + length]
            positions = torch.arange(first, first + length)[None].expand(len(hidden), -1)
            self.layer(part, part.new_zeros(*part.shape[:2], 48), positions, cache, 0)
            first += length
        return cache.layers[0].compressed_kv[self.name]


@pytest.fixture(params=["heavily", "sparse", "indexer"])
def theirs(request: pytest.FixtureRequest) -> Theirs:
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    changes = {"compress_rates": rates, "index_head_dim": 128, "rms_norm_eps": 1e-4}
    config = tiny_model("deepseek_v4", **changes).config
    if request.param == "heavily":
        layer = randomize(v4.DeepseekV4HCACompressor(config))
        return Theirs(layer, layer, lambda: v4.DeepseekV4HCACache(config), "compressor")
    layer = randomize(v4.DeepseekV4CSACompressor(config))
    own, name = (layer.indexer, "indexer") if request.param == "indexer" else (layer, "compressor")
    return Theirs(layer, own, lambda: v4.DeepseekV4CSACache(config), name)


TEXT = 27
PARTS = [pytest.param([TEXT], id="one call"), pytest.param([1] * TEXT, id="token by token")]
PARTS.append(pytest.param([5, 8, 1, 1, 12], id="parts"))


def run_mine(theirs: Theirs, hidden: torch.Tensor, lengths: Sequence[int], **more: Any) -> tuple[torch.Tensor, ...]:
    """Returns the rows [B, groups, D] of a bf16 cache that compress filled, and the latents."""
    own, count = theirs.own, len(hidden)
    ratio, width = own.position_bias.shape
    dim = own.head_dim
    span = ratio * width // dim
    cache = torch.full((count, 16, dim), torch.nan).bfloat16()
    state = torch.full((count, span - 1, 2 * width), torch.nan)
    latents, first = [], 0
    for length in lengths:
        part = hidden[:, first : first + length].flatten(0, 1)
        end = first + length
        ends = torch.arange(first + 1, end + 1)
        slots = torch.where(ends % ratio == 0, ends // ratio - 1, -1)
        slots = torch.cat([torch.where(slots < 0, -1, slots + 16 * b) for b in range(count)])
        latent = libmla.compress(
            own.kv_proj(part), own.gate_proj(part), kv_len=ints([end] * count), ratio=ratio, overlap=width > dim,
            state=state, state_table=ints(range(count))[:, None], position_bias=own.position_bias.float(),
            norm_weight=own.kv_norm.weight, norm_eps=own.kv_norm.variance_epsilon, slot_mapping=slots, cache=cache,
            cos_sin=theirs.angles(TEXT), **more,
        )  # fmt: skip
        latents.append(latent.view(count, length, dim)[:, ends % ratio == 0])
        first = end
    return cache[:, : TEXT // ratio], torch.cat(latents, 1)


@pytest.mark.parametrize("lengths", PARTS)
def test_rows_are_those_of_transformers(theirs: Theirs, lengths: list[int]) -> None:
    hidden = torch.randn(2, TEXT, 64)
    wanted = theirs.run(hidden, lengths)
    rows, _ = run_mine(theirs, hidden, lengths)
    assert rows.shape == wanted.shape
    # A number of bf16 is at most 2^-8 of itself away from what it was; the rest is how products of f32 add up.
    torch.testing.assert_close(rows.float(), wanted, rtol=2.0**-8, atol=1e-4)


def test_latents_of_bf16_are_as_good_as_those_of_transformers(theirs: Theirs) -> None:
    """Transformers rounds softmax weights and products to bf16 on the way, libmla the latent alone."""
    hidden = torch.randn(2, TEXT, 64).bfloat16()
    theirs.layer.bfloat16()
    own = theirs.own
    ratio, width = own.position_bias.shape
    _, mine = run_mine(theirs, hidden, [TEXT])
    true = torch.stack([
        pooled(
            own.kv_proj(text), own.gate_proj(text), ratio, width > own.head_dim, own.position_bias, own.kv_norm.weight,
            own.kv_norm.variance_epsilon,
        )
        for text in hidden
    ])  # fmt: skip
    angles = theirs.angles(TEXT)
    kept = own.head_dim - angles.shape[1]
    groups = torch.arange(true.shape[1]) * ratio
    turned = torch.stack([torch.cat([x[:, :kept], rotated(x[:, kept:], angles, groups, True)], -1) for x in true])
    their_error = (theirs.run(hidden, [TEXT]).double() - turned).norm()
    check_latents(mine.flatten(0, 1), true.flatten(0, 1))
    assert (mine.double() - true).norm() < their_error
