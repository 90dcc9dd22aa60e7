# SPDX-License-Identifier: Apache-2.0
"""Tests libmla.distributed in one process: shares of tokens and heads."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import batches
import expected
import libmla
from libmla.distributed import ContextParallel, combine, global_position, local_kv_len, locate, shard_heads

SHARES = [(1, 1), (2, 1), (3, 1), (4, 16), (2, 64), (5, 3)]


@pytest.fixture
def group_of_one(tmp_path):
    """Makes a process group with this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("world_size", "interleave"), SHARES)
def test_every_token_has_one_place(world_size, interleave):
    """Token i lives on rank (i / I) mod N, behind those of its rank that come before it."""
    counts = [0] * world_size
    for token in range(300):
        owner = token // interleave % world_size
        assert [local_kv_len(token, rank, world_size, interleave) for rank in range(world_size)] == counts
        assert locate(token, world_size, interleave) == (owner, counts[owner])
        assert global_position(counts[owner], owner, world_size, interleave) == token
        counts[owner] += 1


@pytest.mark.parametrize("array", [np.arange, torch.arange])
def test_shares_of_arrays(array):
    tokens = array(200)
    rank, local = locate(tokens, 3, 4)
    lengths = local_kv_len(tokens, 1, 3, 4)
    assert type(rank) is type(local) is type(lengths) is type(tokens)
    assert [locate(token, 3, 4) for token in range(200)] == list(zip(rank.tolist(), local.tolist(), strict=True))
    assert [local_kv_len(token, 1, 3, 4) for token in range(200)] == lengths.tolist()
    assert (global_position(local[rank == 2], 2, 3, 4) == tokens[rank == 2]).all()


def test_shares_that_cannot_be():
    for arguments, field in (((9, 0, 0, 1), "world_size"), ((9, 2, 2, 1), "rank"), ((9, -1, 2, 1), "rank")):
        with pytest.raises(ValueError, match=f"{field}: expected"):
            local_kv_len(*arguments)
    with pytest.raises(ValueError, match="interleave: expected at least 1"):
        locate(9, 2, 0)


def test_heads():
    q = torch.randn(3, 12, 8)
    parts = [shard_heads(q, rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat(parts, 1), q) and parts[1].data_ptr() == q[:, 3:].data_ptr()
    assert shard_heads(q[0, :, 0], 1, 2, dim=0).shape == (6,)
    with pytest.raises(ValueError, match="heads: expected .* 5 ranks can share equally, got 12"):
        shard_heads(q, 0, 5)


@pytest.mark.parametrize("method", ["all_to_all", "all_gather"])
def test_one_rank(group_of_one, method):
    group = ContextParallel(method=method)
    batch = batches.paged([5, 0, 40], 16)
    rows = torch.randn(45, 576).bfloat16()
    cache = torch.full((batch.num_pages, 16, 576), math.nan).bfloat16()
    group.append(rows, cache, **batch.pages(), qo_indptr=batches.indptr(batch.kv_len))
    assert torch.equal(cache.view(-1, 576)[batch.all_slots()], rows)
    q = torch.randn(3, 6, 576).bfloat16()
    o, lse = group.decode(q, cache, **batch.pages(), sm_scale=0.07, return_lse=True)
    wanted = expected.decode(q, cache, batch.kv_len, batch.tables, 0.07, 512)
    expected.check(o, wanted[0])
    expected.check(lse, wanted[1])


def test_the_new_tokens_are_the_last_ones(group_of_one):
    """Without qo_indptr every request has as many new tokens; what is beyond a request's pages goes nowhere."""
    group = ContextParallel()
    batch = batches.paged([7, 2, 33], 4)
    mapping = group.slot_mapping(6, **batch.pages(), page_size=4)
    assert mapping.dtype == torch.int64
    assert mapping.tolist() == [slot for b in range(3) for slot in batch.slots(b)[-2:]]
    # A padded request of a captured batch: one query, no token.
    pages = batch.pages()
    pages["kv_len"] = batches.ints([7, 0, 33])
    assert group.slot_mapping(3, **pages, page_size=4).tolist() == [batch.slots(0)[-1], -1, batch.slots(2)[-1]]
    with pytest.raises(ValueError, match="qo_indptr: expected one, as 3 requests cannot .* 4 tokens"):
        group.slot_mapping(4, **batch.pages(), page_size=4)


def test_bad_input(group_of_one):
    with pytest.raises(ValueError, match="method: expected one of all_to_all, all_gather, got 'ring'"):
        ContextParallel(method="ring")
    with pytest.raises(ValueError, match="interleave: expected at least 1 token, got 0"):
        ContextParallel(interleave=0)
    with pytest.raises(TypeError, match="partial_dtype: expected torch.float32.* got torch.int32"):
        ContextParallel(partial_dtype=torch.int32)
    o, lse = torch.zeros(2, 4, 8), torch.zeros(2, 4)
    for arguments, message in (
        ((o, lse[:, :3]), "combine: expected partial_o .* and partial_lse"),
        ((o[0], lse[0]), "combine: expected partial_o"),
    ):
        with pytest.raises(ValueError, match=message):
            combine(*arguments)
    with pytest.raises(ValueError, match=r"attn_sink: expected \[4\]"):
        combine(o, lse, attn_sink=torch.zeros(1))
    batch = batches.paged([5], 16)
    cache = batches.random_cache(batch)
    group = ContextParallel()
    q = torch.randn(1, 4, 576).bfloat16()
    with pytest.raises(ValueError, match="q: expected"):
        group.decode(q[0], cache, **batch.pages(), sm_scale=1)
    with pytest.raises(ValueError, match=r"out: expected \[1, 4, 512\], got \[1, 4, 256\]"):
        group.decode(q, cache, **batch.pages(), sm_scale=1, out=torch.empty(1, 4, 256).bfloat16())
    with pytest.raises(
        TypeError, match="partial_dtype: expected torch.float32 or torch.bfloat16, .* got torch.float16"
    ):
        ContextParallel(partial_dtype=torch.float16).decode(q, cache, **batch.pages(), sm_scale=1)
    with pytest.raises(TypeError, match="lse_base"):
        group.decode(q, cache, **batch.pages(), sm_scale=1, lse_base="2")
    with pytest.raises(TypeError, match="lse_inf_without_keys"):
        group.decode(q, cache, **batch.pages(), sm_scale=1, lse_inf_without_keys=True)


def test_no_group():
    with pytest.raises((ValueError, RuntimeError), match="process group"):
        ContextParallel()


def test_importing_libmla_does_not_bring_it():
    code = "import sys, libmla; assert 'libmla.distributed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not hasattr(libmla, "ContextParallel")


def test_the_example_of_the_docs(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    (tmp_path / "example.py").write_text(page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, "example.py"], cwd=tmp_path, check=True, timeout=120)
