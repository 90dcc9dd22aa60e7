# SPDX-License-Identifier: Apache-2.0
"""Tests more than 2^31 elements in a GPU's memory: what lies behind them is found, and nothing else is read."""

from __future__ import annotations

import pytest
import torch

import libmla

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 12 << 30, reason="needs a GPU with 12 GB free"
)

PAGE_SIZE = 64
NUM_PAGES = 60_000
SCALE = 192**-0.5


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def mostly_nan(*shape: int) -> torch.Tensor:
    tensor = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    assert tensor.numel() > 2**31
    return tensor


@pytest.fixture
def caches() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a large cache, the numbers of five of its pages, and those pages alone."""
    large, pages = mostly_nan(NUM_PAGES, PAGE_SIZE, 576), ints(NUM_PAGES - 1, 17, NUM_PAGES - 3, 40_000, NUM_PAGES - 7)
    small = noise(5, PAGE_SIZE, 576)
    large[pages.long()] = small
    return large, pages, small


@pytest.mark.parametrize("num_heads", [16, 128])
def test_decode(caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor], num_heads: int) -> None:
    large, pages, small = caches
    q, kv_len = noise(2, num_heads, 576), ints(300)
    got = libmla.decode(q, large, kv_len=kv_len, block_table=pages[None], sm_scale=SCALE, return_lse=True)
    want = libmla.decode(q, small, kv_len=kv_len, block_table=ints(*range(5))[None], sm_scale=SCALE, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("num_heads", [16, 128])
def test_decode_sparse(caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor], num_heads: int) -> None:
    large, pages, small = caches
    slots = (pages.long()[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).flatten()
    chosen = torch.randperm(5 * PAGE_SIZE, device="cuda")[:130]
    q = noise(2, num_heads, 576)
    got = libmla.decode_sparse(q, large, slots[chosen].int().repeat(2, 1), sm_scale=SCALE)
    assert torch.equal(got, libmla.decode_sparse(q, small, chosen.int().repeat(2, 1), sm_scale=SCALE))


def test_append_and_gather(caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    large, pages, _ = caches
    rows, slots = noise(3, 576), torch.tensor([NUM_PAGES * PAGE_SIZE - 1, 5, 17 * PAGE_SIZE + 3], device="cuda")
    libmla.append(rows, slots, large)
    assert torch.equal(large.view(-1, 576)[slots], rows)
    gathered = libmla.gather(large, kv_len=ints(300), block_table=pages[None], out_indptr=ints(0, 300), num_rows=300)
    assert torch.equal(gathered, large[pages.long()].view(-1, 576)[:300])


def test_prefill() -> None:
    num_keys, num_heads, last = 100_000, 128, 1000
    k, v = mostly_nan(num_keys, num_heads, 192), torch.full((num_keys, num_heads, 128), float("nan")).bfloat16().cuda()
    k[-last:], v[-last:] = noise(last, num_heads, 192), noise(last, num_heads, 128)
    q = noise(40, num_heads, 192)
    got = libmla.prefill(
        q, k, v, qo_indptr=ints(0, 0, 40), kv_indptr=ints(0, num_keys - last, num_keys), sm_scale=SCALE
    )
    want = libmla.prefill(
        q, k[-last:].clone(), v[-last:].clone(), qo_indptr=ints(0, 40), kv_indptr=ints(0, last), sm_scale=SCALE
    )
    assert torch.equal(got, want) and torch.isfinite(got).all()


def test_prefill_sparse() -> None:
    kv = mostly_nan(4_000_000, 576)
    kv[-500:] = noise(500, 576)
    q, indices = noise(3, 128, 576), torch.randint(0, 500, (3, 200), device="cuda").int()
    got = libmla.prefill_sparse(q, kv, indices + (len(kv) - 500), sm_scale=SCALE)
    assert torch.equal(got, libmla.prefill_sparse(q, kv[-500:].clone(), indices, sm_scale=SCALE))
    assert torch.isfinite(got).all()
