# SPDX-License-Identifier: Apache-2.0
"""Tests the paged latent cache: pages, forks, crops, and what does not fit."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from libmla.integrations.transformers import LatentCache, patch
from tiny_models import error, installed, one_thread, poisoned_pages, tiny_model, tokens  # noqa: F401


def patched(name: str = "deepseek_v3", **arguments: Any) -> Any:
    """Returns a model that attends everything from the cache, so that what is wrong with the cache shows."""
    return patch(tiny_model(name), absorb="always", page_size=4, **arguments)


def new_cache(model: Any, **arguments: Any) -> LatentCache:
    return LatentCache(model.config, page_size=4, **arguments)


def used(cache: LatentCache) -> int:
    return cache.pages.count - cache.pages.num_free


def fresh(model: Any, ids: torch.Tensor, last: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the logits of the last tokens, without anything that was cached before."""
    return model(ids, attention_mask=mask).logits[:, -last:]


def test_pages_follow_lengths() -> None:
    model = patched()
    cache = new_cache(model)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :6] = 0
    model(tokens(2, 11), attention_mask=mask[:, :11], past_key_values=cache)
    assert cache.lengths == [11, 5] and list(map(len, cache.block_table)) == [3, 2] and used(cache) == 5
    pages = {page for table in cache.block_table for page in table}
    assert len(pages) == 5 and max(pages) < cache.pages.count
    assert cache.get_seq_length() == 11 and cache.get_max_length() == -1
    model(tokens(2, 1), attention_mask=mask, past_key_values=cache)
    assert cache.lengths == [12, 6] and used(cache) == 5
    assert repr(cache) == "LatentCache(bf16, page_size=4, lengths=[12, 6])"
    cache.reset()
    assert cache.lengths == [] and used(cache) == 0 and cache.get_seq_length() == 0
    ids = tokens(3, 6)
    assert error(model(ids, past_key_values=cache).logits, fresh(model, ids, 6)) == 0


def test_pools_grow_and_keep_what_they_hold() -> None:
    model, ids = patched(), tokens(2, 40)
    cache = new_cache(model)
    sizes = []
    for at in range(0, 40, 5):
        logits = model(ids[:, at : at + 5], past_key_values=cache).logits
        sizes.append(cache.pages.count)
    assert error(logits, fresh(model, ids, 5)) < 1e-5
    assert len(set(sizes)) < len(sizes) and sizes[-1] < 2 * 20
    assert all(len(pool.data) == sizes[-1] for pool in cache.pages.pools.values())


def test_a_cache_of_fixed_size() -> None:
    model = patched()
    cache = new_cache(model, num_pages=6)
    assert cache.get_max_length() == 24
    ids = tokens(2, 13)
    model(ids[:, :12], past_key_values=cache)
    assert used(cache) == 6 and cache.pages.count == 6
    with pytest.raises(ValueError, match="num_pages: expected at least 8 pages of 4 tokens .* got 6"):
        model(ids[:, 12:], past_key_values=cache)
    assert cache.lengths == [12, 12]
    with pytest.raises(ValueError, match=r"continues after 13 tokens, but the cache has 12: .* reset\(\)"):
        model(ids[:, 12:], past_key_values=cache)
    cache.reset()
    assert error(model(ids[:, :9], past_key_values=cache).logits, fresh(model, ids[:, :9], 9)) == 0


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
@pytest.mark.parametrize("removed", [1, 3, 5, 9])
def test_crop(name: str, removed: int) -> None:
    # What torch multiplies depends in its last bits on how many tokens come at once, and an element of a row may then be
    # rounded to the other side: in bf16 that alone changed logits by 2e-5, on a processor without AVX-512.
    model, ids = patched(name, cache_format="f16"), tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, 8] = 0
    cache = new_cache(model, cache_format="f16")
    kept = 14 - removed
    model(ids, attention_mask=mask, past_key_values=cache)
    cache.crop(-removed)
    cache.crop(0)
    assert cache.lengths == mask[:, :kept].sum(1).tolist() and cache.get_seq_length() == kept
    assert used(cache) == sum(-(-length // 4) for length in cache.lengths)
    more = tokens(2, 4)
    mask = torch.cat([mask[:, :kept], torch.ones_like(more)], 1)
    got = model(more, attention_mask=mask, past_key_values=cache).logits
    assert error(got, fresh(model, torch.cat([ids[:, :kept], more], 1), 4, mask)) < 1e-5
    cache.crop(-100)
    assert cache.lengths == [0, 0] and used(cache) == 0
    with pytest.raises(ValueError, match="crop: expected 0 or less, .* got 3"):
        cache.crop(3)


@pytest.mark.skipif("mistral_large4" not in installed(), reason="transformers has no such model")
def test_crop_of_layers_that_share_rows_but_not_an_indexer() -> None:
    model = patch(tiny_model("mistral_large4", indexer_types=["full", "shared", "full"]), absorb="always")
    ids, more = tokens(2, 14), tokens(2, 3)
    cache = new_cache(model)
    model(ids, past_key_values=cache)
    cache.crop(-2)
    got = model(more, past_key_values=cache).logits
    assert error(got, fresh(model, torch.cat([ids[:, :12], more], 1), 3)) < 1e-5


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "kimi_linear"])
def test_many_prompts_behind_one_prefix(name: str) -> None:
    model, prefix = patched(name), tokens(1, 10)
    cache = new_cache(model)
    model(prefix, past_key_values=cache)
    before = [pool.data.clone() for pool in cache.pages.pools.values()]
    fork = cache.fork([0] * 3)
    assert used(cache) == 3 and fork.block_table == cache.block_table * 3
    rest = tokens(3, 7)
    got = model(rest, past_key_values=fork).logits
    whole = torch.cat([prefix.expand(3, -1), rest], 1)
    assert error(got, fresh(model, whole, 7)) < 1e-5
    assert fork.lengths == [17] * 3 and cache.lengths == [10]
    # Two full pages in common; the third, half full, was copied for each, and two more follow.
    assert used(cache) == 3 + 3 * 3
    for pool, old in zip(cache.pages.pools.values(), before, strict=True):
        rows = pool.data[cache.block_table[0]].flatten(0, 1)[:10]
        assert torch.equal(rows, old[cache.block_table[0]].flatten(0, 1)[:10])
    last = tokens(1, 2)
    assert error(model(last, past_key_values=cache).logits, fresh(model, torch.cat([prefix, last], 1), 2)) < 1e-5
    del fork
    gc.collect()
    assert used(cache) == 3


def test_a_page_with_one_owner_left_is_not_copied() -> None:
    model = patched()
    cache = new_cache(model)
    model(tokens(1, 6), past_key_values=cache)
    tables = cache.block_table
    fork = copy.deepcopy(cache)
    assert fork.block_table == tables and used(cache) == 2
    model(tokens(1, 1), past_key_values=fork)
    assert fork.block_table[0][0] == tables[0][0] and fork.block_table[0][1] != tables[0][1]
    model(tokens(1, 1), past_key_values=cache)
    assert cache.block_table == tables and used(cache) == 3
    fork.crop(-7)
    assert used(cache) == 2
    cache.crop(-7)
    assert used(cache) == 0


def test_full_pages_are_never_copied() -> None:
    model = patched()
    cache = new_cache(model)
    model(tokens(1, 8), past_key_values=cache)
    fork = cache.fork()
    model(tokens(1, 1), past_key_values=fork)
    assert fork.block_table[0][:2] == cache.block_table[0] and used(cache) == 3


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_other_batches(name: str) -> None:
    model, ids = patched(name), tokens(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    cache = new_cache(model)
    model(ids, attention_mask=mask, past_key_values=cache)
    for change, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        other = cache.fork()
        change(other)
        more = tokens(len(rows), 3)
        whole, seen = torch.cat([ids[rows], more], 1), torch.cat([mask[rows], torch.ones_like(more)], 1)
        got = model(more, attention_mask=seen, past_key_values=other).logits
        assert error(got, fresh(model, whole, 3, seen)) < 1e-5
    assert cache.lengths == [5, 9, 9]
    with pytest.raises(ValueError, match="requests: expected 0 to 2, got 3"):
        cache.fork([3])


def test_a_cache_may_leave_inference_mode() -> None:
    model, ids = patched("deepseek_v32"), tokens(1, 9)
    cache = new_cache(model)
    with torch.inference_mode():
        model(ids[:, :6], past_key_values=cache)
    fork = cache.fork()
    assert error(model(ids[:, 6:], past_key_values=fork).logits, fresh(model, ids, 3)) < 1e-5
    fork.crop(-3)


def test_every_format_is_copied() -> None:
    for cache_format in ("bf16", "f16", "fp8", "fp8_ds_mla"):
        model, ids = patched(cache_format=cache_format), tokens(1, 9)
        cache = new_cache(model, cache_format=cache_format)
        model(ids[:, :7], past_key_values=cache)
        fork = cache.fork()
        cache.reset()
        assert error(model(ids[:, 7:], past_key_values=fork).logits, fresh(model, ids, 2)) < 1e-5


def test_what_does_not_continue_a_cache() -> None:
    model, ids = patched(), tokens(2, 8)
    cache = new_cache(model)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :2] = 0
    model(ids, attention_mask=mask[:, :8], past_key_values=cache)
    with pytest.raises(ValueError, match="expected a batch of 2, as the cache has, got 1"):
        model(ids[:1, :1], past_key_values=cache.fork())
    with pytest.raises(ValueError, match="attention_mask: .* cannot be masked, or shown, later"):
        model(ids[:, :1], past_key_values=cache.fork())
    mask[1, 3] = 0
    with pytest.raises(ValueError, match="attention_mask: .* cannot be masked, or shown, later"):
        model(ids[:, :1], attention_mask=mask, past_key_values=cache.fork())
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \[2, 9\], got \[2, 7\]"):
        model(ids[:, :1], attention_mask=mask[:, :7], past_key_values=cache.fork())


def test_refused_caches() -> None:
    config = tiny_model("deepseek_v3").config
    for arguments, message in (
        ({"cache_format": "fp8_dsv4"}, "cache_format: .* got fp8_dsv4, whose rows are DeepSeek V4's"),
        ({"cache_format": "q4"}, "cache_format: .* got 'q4'"),
        ({"page_size": 0}, "page_size: expected 1 or more, got 0"),
        ({"num_pages": -1}, "num_pages: expected 1 or more, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            LatentCache(config, **arguments)
    model = patched()
    with pytest.raises(ValueError, match="device: expected the model's layers on meta, got cpu"):
        model(tokens(1, 3), past_key_values=LatentCache(config, device="meta"))
    cache = new_cache(model)
    with pytest.raises(TypeError, match="written through the cache"):
        cache.layers[0].update(torch.zeros(1), torch.zeros(1))
