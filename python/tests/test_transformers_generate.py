# SPDX-License-Identifier: Apache-2.0
"""Tests ``generate`` of patched models: what it writes is what the unpatched model would write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import libmla
from libmla.integrations.transformers import LatentCache, patch, unpatch
from tiny_models import DEVICES, installed, one_thread, poisoned_pages, tiny_model, tokens  # noqa: F401


def prompts(device: str, batch: int = 3) -> dict[str, torch.Tensor]:
    """Returns a batch of prompts of different lengths."""
    ids = tokens(batch, 17, device)
    mask = torch.ones_like(ids)
    for request in range(1, batch):
        mask[request, : 4 * request] = ids[request, : 4 * request] = 0
    return {"input_ids": ids, "attention_mask": mask}


def check_greedy(model: Any, inputs: dict[str, torch.Tensor], output: torch.Tensor) -> None:
    """Checks that every token that was written has the unpatched model's largest logit behind what precedes it.

    A logit as large, but for what rounding of rows to bf16 does to logits, will do too.
    """
    start = inputs["input_ids"].shape[1]
    assert torch.equal(output[:, :start], inputs["input_ids"]) and output.shape[1] > start
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(output[:, start:])], 1)
    logits = unpatch(model)(output, attention_mask=mask).logits[:, start - 1 : -1].float()
    written = logits.gather(-1, output[:, start:, None])[..., 0]
    best = logits.amax(-1)
    assert bool((best - written < 0.02 * logits.std(-1)).all())
    # Not all of them near-ties.
    assert bool(((best == written).float().mean(-1) > 0.6).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", installed())
def test_greedy(name: str, device: str) -> None:
    model, inputs = tiny_model(name, device=device), prompts(device)
    out = patch(model, page_size=8).generate(**inputs, max_new_tokens=14, do_sample=False, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, LatentCache)
    # glm5_next's attention is not told of padding: its indexer leaves it out.
    assert out.past_key_values.lengths == ([30] * 3 if name == "glm5_next" else [30, 26, 22])
    check_greedy(model, inputs, out.sequences)


def test_the_same_tokens() -> None:
    model, inputs = tiny_model("deepseek_v3"), prompts("cpu", 2)
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(patch(model).generate(**inputs, max_new_tokens=8, do_sample=False), expected)


@pytest.mark.parametrize("cache_format", ["f16", "fp8", "fp8_ds_mla"])
def test_formats(cache_format: str) -> None:
    model, inputs = patch(tiny_model("deepseek_v3").bfloat16(), cache_format=cache_format), prompts("cpu")
    out = model.generate(**inputs, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_logits=True)
    assert out.past_key_values.cache_format == cache_format
    assert all(logits.isfinite().all() for logits in out.logits)


def test_sampling() -> None:
    model, inputs = tiny_model("deepseek_v3"), prompts("cpu")
    torch.manual_seed(3)
    expected = model.generate(**inputs, max_new_tokens=10, do_sample=True, top_k=20, num_return_sequences=2)
    torch.manual_seed(3)
    got = patch(model).generate(**inputs, max_new_tokens=10, do_sample=True, top_k=20, num_return_sequences=2)
    # Draws from distributions that differ by rounding rarely differ.
    assert got.shape == expected.shape == (6, 27)
    assert bool((got == expected)[:, :20].all())
    assert len(torch.unique(got[:, 17:], dim=0)) == 6


@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa"])
def test_beams(name: str) -> None:
    model, inputs = tiny_model(name), prompts("cpu", 2)
    named = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "length_penalty": 0.0}
    named |= {"return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(**inputs, **named)
    got = patch(model, page_size=4).generate(**inputs, **named)
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, atol=2e-2, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_assisted(name: str, device: str) -> None:
    """Drafts of an assistant make several queries a step, and rejected tokens are cropped."""
    model, assistant = tiny_model(name, device=device), tiny_model("deepseek_v3", device=device, num_hidden_layers=1)
    inputs = prompts(device, 1)
    patch(model, page_size=4), patch(assistant, page_size=4)
    steps, crops = [], []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: steps.append(kwargs["position_ids"].shape[1]), with_kwargs=True
    )
    crop = LatentCache.crop
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(LatentCache, "crop", lambda self, number: crops.append(number) or crop(self, number))
        out = model.generate(**inputs, max_new_tokens=16, do_sample=False, assistant_model=assistant)
    hook.remove()
    assert max(steps[1:]) > 1 and min(crops) < 0
    check_greedy(model, inputs, out)


def test_drafts_that_are_looked_up_in_the_prompt() -> None:
    model = tiny_model("deepseek_v3")
    ids = tokens(1, 6).repeat(1, 4)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    out = patch(model).generate(**inputs, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)
    check_greedy(model, inputs, out)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa"])
def test_a_conversation_with_a_kept_cache(name: str) -> None:
    model = tiny_model(name)
    patch(model)
    cache = LatentCache(model.config, page_size=8)
    first = tokens(2, 12)
    said = model.generate(first, max_new_tokens=5, do_sample=False, past_key_values=cache)
    assert cache.lengths == [16, 16]
    prompt = torch.cat([said, tokens(2, 40)], 1)  # more than is worth absorbing
    out = model.generate(prompt, max_new_tokens=5, do_sample=False, past_key_values=cache)
    assert cache.lengths == [61, 61]
    check_greedy(model, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, out)


def test_prompts_behind_one_prefix() -> None:
    model = patch(tiny_model("deepseek_v3"))
    prefix, rest = tokens(1, 20), tokens(4, 6)
    cache = LatentCache(model.config, page_size=8)
    model(prefix, past_key_values=cache)
    ids = torch.cat([prefix.expand(4, -1), rest], 1)
    fork = cache.fork([0] * 4)
    out = model.generate(ids, max_new_tokens=4, do_sample=False, past_key_values=fork)
    assert [table[:2] for table in fork.block_table] == [cache.block_table[0][:2]] * 4
    check_greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, out)


def test_prompts_in_chunks() -> None:
    model, inputs = tiny_model("deepseek_v3"), prompts("cpu")
    out = patch(model).generate(**inputs, max_new_tokens=4, do_sample=False, prefill_chunk_size=5)
    check_greedy(model, inputs, out)


def test_one_plan_serves_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[str] = []
    update = libmla.Plan.update
    monkeypatch.setattr(
        libmla.Plan, "update", lambda plan, *a, **n: planned.append(plan.operation) or update(plan, *a, **n)
    )
    model = patch(tiny_model("deepseek_v3", num_hidden_layers=4))
    model.generate(tokens(2, 9), max_new_tokens=5, do_sample=False)
    assert planned == ["prefill"] + ["decode"] * 4


def test_without_use_cache() -> None:
    model, inputs = tiny_model("deepseek_v3"), prompts("cpu")
    out = patch(model).generate(**inputs, max_new_tokens=3, do_sample=False, use_cache=False)
    check_greedy(model, inputs, out)
