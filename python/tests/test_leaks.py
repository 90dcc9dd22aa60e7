# SPDX-License-Identifier: Apache-2.0
"""Tests that calls leave nothing behind: no memory, no references."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import libmla
from small_problems import decode_problem

SLACK_BYTES = 2 << 20  # what an allocator may need for itself
OTHERS = 1000  # references to None and True that come and go elsewhere; a leak is 10,000 at least


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(call: Callable[[], Any], times: int) -> int:
    """Returns the bytes by which the process grows over that many calls, after some to warm up."""
    for _ in range(times // 20):
        call()
    gc.collect()
    before = resident_bytes()
    for _ in range(times):
        call()
    gc.collect()
    return resident_bytes() - before


class SmallDecode:
    """Makes the smallest decode call that there is."""

    def __init__(self) -> None:
        self.context = libmla.Context(num_threads=1)
        self.problem = decode_problem((1,), heads=1, page_size=1)
        self.q, self.cache = self.problem.q, self.problem.cache
        self.named = {**self.problem.arguments, "context": self.context}
        self.plan = libmla.Plan.decode(self.q, self.cache, **self.named)
        self.out = torch.empty(1, 1, 512, dtype=torch.bfloat16)

    def references(self) -> list[int]:
        """Returns how often each thing that a call is given is referred to."""
        gc.collect()  # what other tests left behind refers to None too
        given = (self.q, self.cache, self.plan, self.context, self.out, *self.named.values(), None, True, libmla.decode)
        return [sys.getrefcount(value) for value in given]

    def forgotten_since(self, before: list[int]) -> int:
        """Returns the most references to one thing that were not given back."""
        return max(after - earlier for earlier, after in zip(before, self.references()))


@pytest.fixture(scope="module")
def small() -> SmallDecode:
    return SmallDecode()


def test_a_hundred_thousand_calls(small: SmallDecode) -> None:
    def call() -> None:
        libmla.decode(small.q, small.cache, plan=small.plan, out=small.out, **small.named)

    call()
    before = small.references()
    assert growth(call, 100_000) < SLACK_BYTES
    assert small.forgotten_since(before) < OTHERS


@pytest.mark.parametrize("case", ["new outputs", "errors", "numpy", "plans", "caches", "pairs"])
def test_other_ways_to_call(small: SmallDecode, case: str) -> None:
    q, cache, named = small.q, small.cache, small.named
    numpy_named = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in named.items()}
    numpy_q, numpy_cache = q.half().numpy(), cache.half().numpy()
    kv = libmla.KvCache("bf16", kv=cache)
    rows, slots = torch.zeros(1, 576, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)

    def fail() -> None:
        with pytest.raises(ValueError):
            libmla.decode(q, cache, **{**named, "sm_scale": -1.0})

    calls: dict[str, Callable[[], Any]] = {
        "new outputs": lambda: libmla.decode(q, cache, return_lse=True, **named),
        "errors": fail,
        "numpy": lambda: libmla.decode(numpy_q, numpy_cache, return_lse=True, **numpy_named),
        "plans": lambda: libmla.Plan.decode(q, cache, **named),
        "caches": lambda: libmla.append(rows, slots, kv, context=small.context),
        "pairs": lambda: libmla.decode((q[..., :512], q[..., 512:]), kv, plan=small.plan, **named),
    }
    calls[case]()
    before = small.references()
    assert growth(calls[case], 10_000) < SLACK_BYTES
    assert small.forgotten_since(before) < OTHERS


def test_contexts_take_their_threads_with_them() -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    libmla.Context(num_threads=3)
    before = threads()
    assert growth(lambda: libmla.Context(num_threads=3), 200) < SLACK_BYTES
    assert threads() <= before
