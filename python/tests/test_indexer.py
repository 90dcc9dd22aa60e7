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


def unpacked(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """Returns the keys [slots, 128] of the indexer's pages, which hold all keys of a page, then their scales."""
    keys = cache[:, : page_size * 128].reshape(-1, 128).contiguous().view(torch.float8_e4m3fn).double()
    scales = cache[:, page_size * 128 : page_size * 132].contiguous().view(torch.float32).reshape(-1, 1).double()
    return keys * scales


@pytest.fixture
def problem():
    batch = batches.paged([9, 0, 40], 16)
    cache = torch.full((batch.num_pages, libmla.indexer_page_bytes(16)), 0xFF, dtype=torch.uint8)
    keys = torch.randn(49, 128).bfloat16()
    libmla.append_indexer(keys, torch.tensor(batch.all_slots()), cache, page_size=16)
    lengths = [2, 1, 3]
    q = torch.randn(sum(lengths), HEADS, 128).bfloat16()
    weights = torch.rand(sum(lengths), HEADS)
    return batch, cache, keys, q, weights, batches.indptr(lengths)


def right(batch, cache, q, weights, qo_indptr, width, causal=True):
    keys = unpacked(cache, batch.page_size)
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
