# SPDX-License-Identifier: Apache-2.0
"""Tests the sparse-attention indexer against float64."""

from __future__ import annotations

import math

import pytest
import torch

import batches
import expected
import libmla
from batches import ints

HEADS = 4


def unpacked(cache: torch.Tensor, page_size: int, format: str = "fp8") -> torch.Tensor:
    """Returns the keys [slots, 128] of the indexer's pages, which hold all keys of a page, then their scales."""
    if format == "mxfp4":
        pairs = cache[:, : page_size * 64].reshape(-1, 64)
        codes = torch.stack([pairs % 16, pairs // 16], -1).reshape(-1, 4, 32).long()
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()[codes % 8] * (1 - codes // 8 * 2)
        exponents = cache[:, page_size * 64 : page_size * 68].reshape(-1, 4, 1).double()
        return (values * torch.exp2(exponents - 127)).reshape(-1, 128)
    keys = cache[:, : page_size * 128].reshape(-1, 128).contiguous().view(torch.float8_e4m3fn).double()
    scales = cache[:, page_size * 128 : page_size * 132].contiguous().view(torch.float32).reshape(-1, 1).double()
    return keys * scales


def small_problem(format: str):
    batch = batches.paged([9, 0, 40], 16)
    cache = torch.full((batch.num_pages, libmla.indexer_page_bytes(16, format)), 0xFF, dtype=torch.uint8)
    keys = torch.randn(49, 128).bfloat16()
    libmla.append_indexer(keys, torch.tensor(batch.all_slots()), cache, page_size=16, format=format)
    lengths = [2, 1, 3]
    q = torch.randn(sum(lengths), HEADS, 128).bfloat16()
    weights = torch.rand(sum(lengths), HEADS)
    return batch, cache, keys, q, weights, batches.indptr(lengths)


@pytest.fixture
def problem():
    return small_problem("fp8")


def right(batch, cache, q, weights, qo_indptr, width, causal=True, format="fp8"):
    keys = unpacked(cache, batch.page_size, format)
    logits = torch.full((q.shape[0], width), -math.inf).double()
    for b, length in enumerate(batch.kv_len):
        begin, end = qo_indptr[b], qo_indptr[b + 1]
        for i, t in enumerate(range(begin, end)):
            seen = max(0, min(length, length - (end - begin) + i + 1)) if causal else length
            of_request = keys[batch.slots(b)[:seen]]
            scores = torch.relu(q[t].double() @ of_request.T) * weights[t].double()[:, None]
            logits[t, :seen] = scores.sum(0)
    return logits


def test_stored_keys(problem):
    batch, cache, keys, *_ = problem
    stored = unpacked(cache, 16)[batch.all_slots()]
    torch.testing.assert_close(stored, keys.double(), atol=0.05, rtol=0.07)
    other = torch.zeros_like(cache)
    libmla.append_indexer(
        keys[:2], torch.tensor([-1, 5]), other.view(torch.float8_e4m3fn), page_size=16, power_of_two_scales=False
    )
    scale = other[0, 16 * 128 + 20 : 16 * 128 + 24].view(torch.float32)
    torch.testing.assert_close(scale[0], keys[1].float().abs().max() / 448, atol=0, rtol=1e-6)
    assert (other[1:] == 0).all() and (other[0, : 5 * 128] == 0).all()


def test_stored_keys_of_mxfp4():
    batch, cache, keys, *_ = small_problem("mxfp4")
    stored = unpacked(cache, 16, "mxfp4")[batch.all_slots()]
    groups = keys.double().reshape(-1, 4, 32)
    scales = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True) / 6)))
    error = (stored.reshape(-1, 4, 32) - groups).abs()
    assert (error <= scales).all() and (
        error[groups.abs() < scales] <= scales.expand(groups.shape)[groups.abs() < scales] / 4
    ).all()
    # Ties go to the even code, as on the hardware; the scale is that of the largest magnitude, 6.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 16)[None]
    rounded = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0] * 16).double()
    one = torch.zeros(1, libmla.indexer_page_bytes(1, "mxfp4"), dtype=torch.uint8)
    libmla.append_indexer(-ties, torch.tensor([0]), one, page_size=1, format="mxfp4")
    assert torch.equal(unpacked(one, 1, "mxfp4")[0], -rounded)
    with pytest.raises(ValueError, match="power_of_two_scales: expected powers of two for mxfp4 keys"):
        libmla.append_indexer(ties, torch.tensor([0]), one, page_size=1, format="mxfp4", power_of_two_scales=False)
    with pytest.raises(ValueError, match='append_indexer: format: expected fp8 or mxfp4, got "fp4"'):
        libmla.append_indexer(ties, torch.tensor([0]), one, page_size=1, format="fp4")
    with pytest.raises(ValueError, match="cache: expected pages of at least 132 bytes"):
        libmla.append_indexer(ties, torch.tensor([0]), one, page_size=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_logits_of_mxfp4(dtype):
    batch, cache, _, q, weights, qo_indptr = small_problem("mxfp4")
    more = {"page_size": 16, "qo_indptr": qo_indptr, "format": "mxfp4", **batch.pages()}
    q = expected.e4m3(q.float()) if dtype == "float8_e4m3fn" else q.to(getattr(torch, dtype))
    logits = libmla.indexer_logits(q, weights, cache, **more)
    wanted = right(batch, cache, q.float(), weights, qo_indptr.tolist(), logits.shape[1], format="mxfp4")
    expected.check(logits, wanted, 1e-5)
    slots = libmla.indexer_top_k(q, weights, cache, 10, **more)
    for t, b in enumerate([0, 0, 1, 2, 2, 2]):
        best = [j for j in chosen(logits[t], 10) if logits[t, j] > -math.inf]
        assert slots[t].tolist() == [batch.slots(b)[j] for j in best] + [-1] * (10 - len(best))


@pytest.mark.parametrize("causal", [True, False])
def test_logits(problem, causal):
    batch, cache, _, q, weights, qo_indptr = problem
    more = {"page_size": 16, "qo_indptr": qo_indptr, "causal": causal}
    logits = libmla.indexer_logits(q, weights, cache, **batch.pages(), **more)
    wanted = right(batch, cache, q, weights, qo_indptr.tolist(), logits.shape[1], causal)
    expected.check(logits, wanted, 2e-2)
    assert logits.shape == (6, 48)
    assert libmla.indexer_logits(q, weights, cache, **batch.pages("csr"), **more, max_kv_len=40).shape == (6, 40)
    mine = torch.empty(6, 41)
    assert libmla.indexer_logits(q, weights, cache, **batch.pages(), **more, logits=mine) is mine
    assert torch.equal(mine, logits[:, :41])
    stored = expected.e4m3(q.float())
    same = [
        libmla.indexer_logits(s, weights, cache, **batch.pages(), **more) for s in (stored, stored.view(torch.uint8))
    ]
    assert torch.equal(*same)
    expected.check(same[0], right(batch, cache, stored.float(), weights, qo_indptr.tolist(), 48, causal), 2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits(problem, dtype):
    batch, cache, _, q, weights, qo_indptr = problem
    more = {"page_size": 16, "qo_indptr": qo_indptr, **batch.pages()}
    exact = libmla.indexer_logits(q, weights, cache, **more)
    logits = libmla.indexer_logits(q, weights, cache, **more, logits_dtype=dtype)
    assert logits.dtype == dtype and torch.equal(logits, exact.to(dtype))
    mine = torch.empty(6, 49, dtype=dtype)[:, 1:]  # rows of an odd stride, at odd places
    assert libmla.indexer_logits(q, weights, cache, **more, logits=mine) is mine
    assert torch.equal(mine, logits)
    slots = libmla.indexer_top_k(q, weights, cache, 10, **more, logits_dtype=dtype)
    keys = libmla.top_k(mine, 10)
    for t, b in enumerate([0, 0, 1, 2, 2, 2]):
        best = chosen(logits[t], 10)
        assert keys[t].tolist() == best
        best = [j for j in best if logits[t, j] > -math.inf]
        assert slots[t].tolist() == [batch.slots(b)[j] for j in best] + [-1] * (10 - len(best))
    # Finite logits beyond the type's range stay finite, above those of keys that are not seen.
    large = libmla.indexer_logits(q, weights * -1e30, cache, **more, logits_dtype=torch.float16)
    assert torch.equal(large.isinf(), exact.isinf()) and (large.abs() == 65504).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda q, weights, cache, more: libmla.indexer_logits(q, weights, cache, **more, logits_dtype="e4m3"),
            "indexer_logits: logits: expected bf16, f16 or f32, got e4m3",
        ),
        (
            lambda q, weights, cache, more: libmla.indexer_logits(
                q, weights, cache, **more, logits=torch.zeros(6, 48, dtype=torch.int32)
            ),
            "indexer_logits: logits: expected bf16, f16 or f32, got int32",
        ),
        (
            lambda q, weights, cache, more: libmla.indexer_top_k(q, weights, cache, 3, **more, logits_dtype="i64"),
            "indexer_top_k: logits: expected bf16, f16 or f32, got int64",
        ),
        (
            lambda q, weights, cache, more: libmla.top_k(torch.zeros(2, 5, dtype=torch.int32), 3),
            "top_k: logits: expected bf16, f16 or f32, got int32",
        ),
    ],
)
def test_other_types_of_logits_are_refused(problem, call, message):
    batch, cache, _, q, weights, qo_indptr = problem
    with pytest.raises(ValueError, match=message):
        call(q, weights, cache, {"page_size": 16, "qo_indptr": qo_indptr, **batch.pages()})


def chosen(logits: torch.Tensor, k: int) -> list[int]:
    """Returns the k best of a row, ascending; of equal ones the lower index wins."""
    return sorted(sorted(range(len(logits)), key=lambda j: (-logits[j].item(), j))[:k])


@pytest.mark.parametrize("k", [1, 5, 30])
def test_top_k(k):
    logits = torch.randint(6, (4, 20)).float()
    lengths = ints([20, 7, 0, 1])
    indices = libmla.top_k(logits, k, lengths=lengths)
    for t, length in enumerate(lengths.tolist()):
        row = chosen(logits[t, :length], k)
        assert indices[t].tolist() == row + [-1] * (k - len(row))
    mine = torch.empty(4, k, dtype=torch.int32)
    assert libmla.top_k(logits, k, indices=mine) is mine
    assert mine[1].tolist()[: min(k, 20)] == chosen(logits[1], k)


def test_indexer_of_pooled_keys():
    """A key of GLM-5.3-Flash stands for 4 tokens, all of which are listed if it is chosen."""
    ratio, kv_len = 4, [9, 0, 42, 3]
    keys = batches.paged([length // ratio for length in kv_len], 2)
    latent = batches.paged(kv_len, 16)
    cache = torch.zeros((keys.num_pages, libmla.indexer_page_bytes(2)), dtype=torch.uint8)
    slots_of_keys = torch.tensor(keys.all_slots())
    libmla.append_indexer(torch.randn(len(slots_of_keys), 128).bfloat16(), slots_of_keys, cache, page_size=2)
    lengths = [2, 1, 6, 1]
    q, weights = torch.randn(sum(lengths), HEADS, 128).bfloat16(), torch.rand(sum(lengths), HEADS)
    more = {"qo_indptr": batches.indptr(lengths), "kv_len": ints(kv_len), "ratio": ratio}
    pages = {name: table for name, table in keys.pages().items() if name != "kv_len"}
    logits = libmla.indexer_logits(q, weights, cache, **pages, page_size=2, **more)
    of_cache = unpacked(cache, 2)
    seen = [length - n + i + 1 for length, n in zip(kv_len, lengths) for i in range(n)]
    requests = [b for b, n in enumerate(lengths) for _ in range(n)]
    for t, b in enumerate(requests):
        whole = max(seen[t], 0) // ratio
        scores = torch.relu(q[t].double() @ of_cache[keys.slots(b)[:whole]].T) * weights[t].double()[:, None]
        expected.check(logits[t : t + 1, :whole], scores.sum(0)[None], 2e-2)
        assert (logits[t, whole:] == -math.inf).all()
    chosen_keys = libmla.top_k(logits, 3, lengths=ints([max(n, 0) // ratio for n in seen]))
    tables = {name: table for name, table in latent.pages().items() if name != "kv_len"}
    slots = libmla.physical_slots(chosen_keys, **tables, page_size=16, list_tokens=True, **more)
    assert slots.shape == (10, 3 * 4 + 3)
    for t, b in enumerate(requests):
        tokens = [4 * j + i if j >= 0 else -1 for j in chosen_keys[t].tolist() for i in range(4)]
        rest = list(range(max(seen[t], 0) // 4 * 4, max(seen[t], 0)))
        tokens += rest + [-1] * (3 - len(rest))
        assert slots[t].tolist() == [latent.slots(b)[j] if j >= 0 else -1 for j in tokens]


def candidates(logits: torch.Tensor, seen: int, blocks: int) -> list[int]:
    """Returns the candidate blocks of DeepSeek V4.1: those with the largest logits and the newest one, ascending."""
    best = [logits[first : min(first + 8, seen)].max() for first in range(0, seen, 8)]
    if best:
        best[-1] = torch.tensor(math.inf)
    return chosen(torch.tensor(best), blocks)


def test_two_levels():
    """One layer of DeepSeek V4.1 chooses blocks of 8 keys; another one chooses its keys within them."""
    batch = batches.paged([200, 0, 61, 7], 16)
    lengths = [3, 1, 2, 1]
    seen = [length - n + i + 1 for length, n in zip(batch.kv_len, lengths) for i in range(n)]
    requests = [b for b, n in enumerate(lengths) for _ in range(n)]
    more = {"page_size": 16, "qo_indptr": batches.indptr(lengths), **batch.pages()}

    def layer():
        cache = torch.zeros((batch.num_pages, libmla.indexer_page_bytes(16)), dtype=torch.uint8)
        keys = torch.randn(sum(batch.kv_len), 128).bfloat16()
        libmla.append_indexer(keys, torch.tensor(batch.all_slots()), cache, page_size=16)
        return torch.randn(7, HEADS, 128).bfloat16(), torch.rand(7, HEADS), cache

    first, second = layer(), layer()
    logits = libmla.indexer_logits(*first, **more)
    blocks = libmla.top_k(logits, 4, lengths=ints([max(n, 0) for n in seen]), block_size=8)
    dense = libmla.indexer_logits(*second, **more)
    inside = libmla.indexer_logits(*second, **more, blocks=blocks, block_size=8)
    assert inside.shape == (7, 32)
    keys = libmla.top_k(inside, 20, blocks=blocks, block_size=8)
    slots, counts = libmla.indexer_top_k(*second, 20, **more, blocks=blocks, block_size=8, return_valid_count=True)
    for t, b in enumerate(requests):
        listed = candidates(logits[t], max(seen[t], 0), 4)
        assert blocks[t].tolist() == listed + [-1] * (4 - len(listed))
        open_keys = [j for block in listed for j in range(8 * block, min(8 * block + 8, seen[t]))]
        best = [open_keys[i] for i in chosen(dense[t, open_keys], 20)]
        assert keys[t].tolist() == best + [-1] * (20 - len(best))
        assert slots[t].tolist() == [batch.slots(b)[j] for j in best] + [-1] * (20 - len(best))
        assert counts[t] == len(best)


def test_indexer_top_k(problem):
    batch, cache, _, q, weights, qo_indptr = problem
    more = {"page_size": 16, "qo_indptr": qo_indptr}
    logits = libmla.indexer_logits(q, weights, cache, **batch.pages(), **more)
    latent = batches.paged(batch.kv_len, 4)
    requests = [0, 0, 1, 2, 2, 2]
    tables = {f"latent_{name}": table for name, table in latent.pages("csr").items() if name != "kv_len"}
    slots, counts = libmla.indexer_top_k(
        q, weights, cache, 10, **batch.pages(), **more, **tables, latent_page_size=4, return_valid_count=True
    )
    own = libmla.indexer_top_k(q, weights, cache, 10, **batch.pages(), **more)
    for t, b in enumerate(requests):
        best = [j for j in chosen(logits[t], 10) if logits[t, j] > -math.inf]
        assert slots[t].tolist() == [latent.slots(b)[j] for j in best] + [-1] * (10 - len(best))
        assert own[t].tolist() == [batch.slots(b)[j] for j in best] + [-1] * (10 - len(best))
        assert counts[t] == len(best)


@pytest.mark.parametrize("share", [None, (0, 2, 1), (1, 2, 3), (2, 3, 16)])
@pytest.mark.parametrize("ratio", [1, 4])
def test_indexer_top_k_is_its_three_steps(ratio, share):
    batch, _, _, q, weights, qo_indptr = small_problem("fp8")
    keys = torch.zeros(9, libmla.indexer_page_bytes(16), dtype=torch.uint8)
    libmla.append_indexer(torch.randn(144, 128), torch.arange(144), keys, page_size=16)
    table = torch.arange(9, dtype=torch.int32).reshape(3, 3)
    of_keys = {"kv_len": batch.pages()["kv_len"], "block_table": table, "page_size": 16, "qo_indptr": qo_indptr}
    tokens = {"latent_block_table": table + 20, "latent_page_size": 16}
    logits = libmla.indexer_logits(q, weights, keys, **of_keys, ratio=ratio)
    chosen_keys = libmla.top_k(logits, 3)
    chosen_keys[logits.gather(1, chosen_keys.clamp(min=0).long()) == -math.inf] = -1
    pages = {**of_keys, "block_table": table + 20}
    more = {"ratio": ratio, "list_tokens": True, "context_parallel": share}
    wanted = libmla.physical_slots(chosen_keys, **pages, **more, compact=True, return_valid_count=True)
    given = libmla.indexer_top_k(q, weights, keys, 3, **of_keys, **tokens, **more, return_valid_count=True)
    assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))
    wide = torch.empty(6, 50, dtype=torch.int32)
    assert libmla.indexer_top_k(q, weights, keys, 3, **of_keys, **tokens, **more, slots=wide) is wide
    width = wanted[0].shape[1]
    assert torch.equal(wide[:, :width], wanted[0]) and (wide[:, width:] == -1).all()
