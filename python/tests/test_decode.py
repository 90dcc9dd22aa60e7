# SPDX-License-Identifier: Apache-2.0
"""Tests decode against float64."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
import torch

import batches
import expected
import libmla
from batches import ints
from libmla.types import CacheFormat

SM_SCALE = 192**-0.5
RAGGED = [5, 0, 64, 1, 150]


def problem(kv_len=RAGGED, page_size=16, heads=6, dtype=torch.bfloat16, width=576, queries=1):
    batch = batches.paged(kv_len, page_size)
    cache = batches.random_cache(batch, width, torch.float16 if dtype == torch.float16 else torch.bfloat16)
    q = torch.randn(len(kv_len) * queries, heads, width).to(dtype)
    return batch, cache, q


@pytest.mark.parametrize("form", ["block_table", "csr"])
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ragged_batches(dtype, page_size, form):
    batch, cache, q = problem(dtype=dtype, page_size=page_size)
    o, lse = libmla.decode(q, cache, **batch.pages(form), sm_scale=SM_SCALE, return_lse=True)
    wanted = expected.decode(q, cache, batch.kv_len, batch.tables, SM_SCALE, 512)
    assert o.dtype == dtype and lse.dtype == torch.float32
    expected.check(o, wanted[0])
    expected.check(lse, wanted[1])
    assert (o[1] == 0).all() and (lse[1] == -math.inf).all()


@pytest.mark.parametrize(("width", "d_v"), [(576, 512), (320, 256), (512, 512)])
@pytest.mark.parametrize("heads", [1, 5, 17])
def test_width_of_the_value(width, d_v, heads):
    batch, cache, q = problem([7, 30], heads=heads, width=width)
    o = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE)
    expected.check(o, expected.decode(q, cache, batch.kv_len, batch.tables, SM_SCALE, d_v)[0])


def test_width_that_the_caller_says():
    batch, cache, q = problem([7, 30], width=160)
    wanted = expected.decode(q, cache, batch.kv_len, batch.tables, SM_SCALE, 96)[0]
    expected.check(libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, d_v=96), wanted)
    out = torch.empty(2, 6, 96).bfloat16()
    assert libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, d_v=96, out=out) is out
    expected.check(out, wanted)


def test_queries_and_cache_in_parts():
    batch, cache, q = problem()
    wanted = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE)
    parts = (cache[..., :512].contiguous(), cache[..., 512:].contiguous())
    for queries in (q, (q[..., :512], q[..., 512:])):
        for rows in (cache, parts, libmla.KvCache("bf16", ckv=parts[0], kpe=parts[1])):
            assert torch.equal(libmla.decode(queries, rows, **batch.pages(), sm_scale=SM_SCALE), wanted)


def test_no_rotary_part():
    batch, cache, q = problem([9, 33], width=512)
    wanted = expected.decode(q, cache, batch.kv_len, batch.tables, SM_SCALE, 512)[0]
    cache = libmla.KvCache("bf16", ckv=cache)
    expected.check(libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE), wanted)


def test_ragged_queries():
    lengths = [2, 0, 5, 1, 3]
    batch, cache, _ = problem([5, 0, 64, 1, 150])
    q = torch.randn(sum(lengths), 4, 576).bfloat16()
    qo_indptr = batches.indptr(lengths)
    for causal in (True, False):
        o, lse = libmla.decode(
            q, cache, **batch.pages(), qo_indptr=qo_indptr, causal=causal, sm_scale=SM_SCALE, return_lse=True
        )
        wanted = expected.decode(
            q, cache, batch.kv_len, batch.tables, SM_SCALE, 512, qo_indptr=qo_indptr.tolist(), causal=causal
        )
        expected.check(o, wanted[0])
        expected.check(lse, wanted[1])


def test_options():
    batch, cache, q = problem(queries=2)
    heads = q.shape[1]
    sink = torch.linspace(-3, 3, heads)
    sink[0] = -math.inf
    slopes = torch.linspace(0.01, 0.2, heads)
    for given, wanted in (
        ({"attn_sink": sink}, {"sink": sink}),
        ({"window_left": 20}, {"window_left": 20}),
        ({"logits_soft_cap": 2.5}, {"soft_cap": 2.5}),
        ({"alibi_slopes": slopes}, {"slopes": slopes}),
    ):
        o, lse = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, return_lse=True, **given)
        right = expected.decode(q, cache, batch.kv_len, batch.tables, SM_SCALE, 512, **wanted)
        expected.check(o, right[0])
        expected.check(lse, right[1])


@pytest.mark.parametrize("kind", [torch.uint8, torch.bool])
def test_draft_trees(kind):
    parents = [[-1, 0, 0, 1], [-1, -1, 1, 2]]
    batch, cache, q = problem([40, 9], queries=4)
    tree = torch.zeros(8, 4, dtype=kind)
    for b, of_request in enumerate(parents):
        for i in range(4):
            j = i
            while j >= 0:
                tree[4 * b + i, j] = 1
                j = of_request[j]
    wanted = expected.decode(q, cache, batch.kv_len, batch.tables, SM_SCALE, 512, tree=tree)[0]
    flat = ints(parents[0] + parents[1])
    for given in ({"tree_mask": tree}, {"tree_parents": flat}):
        expected.check(libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, **given), wanted)


def test_base_2():
    batch, cache, q = problem()
    lse = torch.empty(5, 6)
    _, same = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, lse=lse, lse_base="2")
    assert same is lse
    right = expected.decode(q, cache, batch.kv_len, batch.tables, SM_SCALE, 512)[1]
    expected.check(lse, right / math.log(2))


def test_lse_of_a_query_without_keys():
    batch, cache, q = problem([3, 0, 70], queries=4)
    usual = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, return_lse=True)
    o, lse = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, return_lse=True, lse_inf_without_keys=True)
    assert torch.equal(o, usual[0])
    without = usual[1] == -math.inf
    assert without[0].all() and without[4:8].all() and not without[1:4].any() and not without[8:].any()
    assert torch.equal(lse, usual[1].masked_fill(without, math.inf))


def test_outputs_with_strides():
    batch, cache, q = problem()
    wanted, wanted_lse = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, return_lse=True)
    wide = torch.full((5, 6, 600), 7.0).bfloat16()
    turned = torch.full((6, 5), 7.0)
    o, _ = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, out=wide[..., 20:532], lse=turned.T)
    assert torch.equal(o, wanted) and torch.equal(turned, wanted_lse.T)
    assert (wide[..., :20] == 7).all() and (wide[..., 532:] == 7).all()


def test_strides_of_inputs():
    batch, cache, q = problem()
    wanted = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE)
    layers = torch.full((batch.num_pages, 3, batch.page_size, 600), math.nan).bfloat16()
    layers[:, 1, :, :576] = cache
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    table = torch.full((5, 40), -5, dtype=torch.int32)
    pages = batch.pages()
    table[:, : pages["block_table"].shape[1]] = pages["block_table"]
    pages["block_table"] = table[:, : pages["block_table"].shape[1]]
    assert torch.equal(libmla.decode(heads_first, layers[:, 1, :, :576], **pages, sm_scale=SM_SCALE), wanted)


@pytest.mark.parametrize(("format", "width"), [("fp8", 576), ("fp8_ds_mla", 576), ("fp8_dsv4", 512)])
def test_compute_in_e4m3(format, width):
    batch = batches.paged(RAGGED, 64)
    cache = batches.packed_cache(format, batch, torch.randn(sum(RAGGED), width).bfloat16())
    q = torch.randn(len(RAGGED), 6, width)
    usual, usual_lse = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, return_lse=True, compute="default")
    context = libmla.Context(num_threads=1, backend="reference")
    named = {**batch.pages(), "sm_scale": SM_SCALE, "context": context, "compute": "fp8"}
    plan = libmla.Plan.decode(q, cache, **named)
    assert plan.backend == "reference"
    o, lse = libmla.decode(q, cache, **named, plan=plan, return_lse=True)
    assert 1e-3 < (o - usual).abs().max() < 0.2
    expected.check(lse, usual_lse.double(), 0.1)
    with pytest.raises(ValueError, match="compute: expected fp8 as planned, got default"):
        libmla.decode(q, cache, **{**named, "compute": "default"}, plan=plan)


def test_compute_in_e4m3_needs_a_quantized_cache():
    batch, cache, q = problem()
    with pytest.raises(ValueError, match="compute: expected default, since bf16 caches are not quantized, got fp8"):
        libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, compute="fp8")


@pytest.mark.parametrize("out_dtype", ["f32", torch.float32, "float32", "bf16", "e4m3", torch.float8_e4m3fn])
def test_type_of_the_output(out_dtype):
    batch, cache, q = problem()
    scale = torch.tensor([0.01]) if "e4m3" in str(out_dtype) else None
    o = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, out_dtype=out_dtype, o_scale=scale)
    wanted = expected.decode(q, cache, batch.kv_len, batch.tables, SM_SCALE, 512)[0]
    if scale is None:
        assert o.dtype == (torch.bfloat16 if out_dtype == "bf16" else torch.float32)
        return expected.check(o, wanted)
    assert o.dtype == torch.float8_e4m3fn
    expected.check(o.float() * scale, wanted, 0.07)
    out = torch.empty(o.shape, dtype=torch.uint8)
    libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, out=out, o_scale=scale)
    assert torch.equal(out, o.view(torch.uint8))


def test_e4m3_queries():
    batch, cache, q = problem()
    scale = torch.tensor([0.5])
    stored = expected.e4m3(q.float() / scale)
    right = expected.decode(stored.float() * scale, cache, batch.kv_len, batch.tables, SM_SCALE, 512)[0]
    o = libmla.decode(stored, cache, **batch.pages(), sm_scale=SM_SCALE, q_scale=scale)
    assert o.dtype == torch.bfloat16
    expected.check(o, right, 2e-2)
    same = libmla.decode(stored.view(torch.uint8), cache, **batch.pages(), sm_scale=SM_SCALE, q_scale=scale)
    assert torch.equal(o, same)


@pytest.mark.parametrize("label", [torch.float8_e4m3fn, torch.uint8])
def test_fp8_cache(label):
    batch, cache, q = problem()
    scale = torch.tensor([0.03])
    stored = expected.e4m3(cache.float() / scale)
    meant = (stored.float() * scale).bfloat16()
    right = expected.decode(q, meant, batch.kv_len, batch.tables, SM_SCALE, 512)[0]
    cache = libmla.KvCache("fp8", stored.view(label), ckv_scale=scale)
    expected.check(libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE), right)


@pytest.mark.parametrize("format", [name for name in get_args(CacheFormat) if name not in ("bf16", "f16", "fp8")])
def test_packed_caches(format):
    width = 576 if "ds_mla" in format else 512
    batch = batches.paged(RAGGED, 16)
    cache = batches.packed_cache(format, batch, torch.randn(sum(RAGGED), width).bfloat16())
    q = torch.randn(5, 4, width).bfloat16()
    meant = expected.unpack(cache)
    right = expected.decode(q, meant, batch.kv_len, batch.tables, SM_SCALE, 512)[0]
    o = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE)
    expected.check(o, right)
    relabelled = dataclasses.replace(cache, kv=cache.kv.view(torch.float8_e4m3fn))
    assert torch.equal(libmla.decode(q, relabelled, **batch.pages(), sm_scale=SM_SCALE), o)


def test_context_parallel():
    batch, cache, q = problem([37, 2, 0], heads=4)
    wanted, wanted_lse = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, return_lse=True)
    states = []
    for rank in range(3):
        local = [[slot for j, slot in enumerate(batch.slots(b)) if j // 2 % 3 == rank] for b in range(3)]
        mine = batches.paged([len(slots) for slots in local], 4)
        rows = batches.random_cache(mine)
        rows.view(-1, 576)[mine.all_slots()] = cache.view(-1, 576)[local[0] + local[1] + local[2]]
        pages = mine.pages()
        pages["kv_len"] = ints(batch.kv_len)
        states.append(
            libmla.decode(
                q, rows, **pages, sm_scale=SM_SCALE, context_parallel=(rank, 3, 2), out_dtype="f32", return_lse=True
            )
        )
    o, lse = libmla.merge_states(torch.stack([o for o, _ in states]), torch.stack([lse for _, lse in states]))
    expected.check(o, wanted.double(), 1e-2)
    expected.check(lse, wanted_lse.double())


def test_batch_invariant():
    batch, cache, q = problem([300, 40, 7])
    together = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, batch_invariant=True)
    pages = batch.pages()
    for b in range(3):
        alone = libmla.decode(
            q[b : b + 1],
            cache,
            kv_len=pages["kv_len"][b : b + 1],
            block_table=pages["block_table"][b : b + 1],
            sm_scale=SM_SCALE,
            batch_invariant=True,
        )
        assert torch.equal(alone[0], together[b])


def test_shared_prefix():
    batch, cache, q = problem([300, 200, 45])
    pages = batch.pages()
    pages["block_table"][1, :8] = pages["block_table"][0, :8]  # whole pages, of which each request has more
    wanted, wanted_lse = libmla.decode(q, cache, **pages, sm_scale=SM_SCALE, return_lse=True)
    plan = libmla.Plan.decode(q, cache, **pages, sm_scale=SM_SCALE, shared_prefix=True)
    assert "shared prefixes (1 group, 128 keys saved)" in str(plan), str(plan)
    for made in (None, plan):
        o, lse = libmla.decode(q, cache, **pages, sm_scale=SM_SCALE, shared_prefix=True, return_lse=True, plan=made)
        expected.check(o, wanted.double(), 1e-2)
        expected.check(lse, wanted_lse.double())
    pages["block_table"][1, 0] = pages["block_table"][1, 9]
    with pytest.raises(ValueError, match="shared_prefix: expected requests that share as many pages"):
        libmla.decode(q, cache, **pages, sm_scale=SM_SCALE, shared_prefix=True, plan=plan)
    with pytest.raises(ValueError, match="shared_prefix: expected false with window_left, got true"):
        libmla.decode(q, cache, **pages, sm_scale=SM_SCALE, shared_prefix=True, window_left=5)


@pytest.mark.parametrize("requests", [0, 3])
def test_no_queries(requests):
    batch = batches.paged([4] * requests, 16)
    cache = batches.random_cache(batch)
    o, lse = libmla.decode(
        torch.empty(0, 4, 576).bfloat16(),
        cache,
        **batch.pages(),
        qo_indptr=torch.zeros(requests + 1, dtype=torch.int32),
        sm_scale=SM_SCALE,
        return_lse=True,
    )
    assert o.shape == (0, 4, 512) and lse.shape == (0, 4)


@pytest.mark.parametrize("backend", ["reference", "cpu_portable", "cpu"])
def test_forced_backends(backend):
    batch, cache, q = problem()
    context = libmla.Context(num_threads=2, backend=backend)
    o = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, context=context)
    expected.check(o, expected.decode(q, cache, batch.kv_len, batch.tables, SM_SCALE, 512)[0])
    assert context.backend == backend and context.num_threads == 2


def emulated() -> libmla.Context:
    archs = libmla.info().emulated_archs
    if not archs:
        pytest.skip("this build emulates no GPU")
    return libmla.Context(num_threads=2, device=f"emulated:sm{90 if 90 in archs else archs[0]}")


def test_emulated_gpu():
    batch, cache, q = problem([20, 0, 3], heads=4)
    o, lse = libmla.decode(q, cache, **batch.pages(), sm_scale=SM_SCALE, context=emulated(), return_lse=True)
    right = expected.decode(q, cache, batch.kv_len, batch.tables, SM_SCALE, 512)
    expected.check(o, right[0])
    expected.check(lse, right[1])
