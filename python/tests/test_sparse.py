# SPDX-License-Identifier: Apache-2.0
"""Tests decode_sparse and prefill_sparse against float64."""

from __future__ import annotations

import math

import pytest
import torch

import batches
import expected
import libmla
from batches import ints

SM_SCALE = 192**-0.5


def right(q, pools, d_v, *, sink=None, soft_cap=0.0):
    """Computes o, the largest score and lse over pools of (rows [S, d], indices [T, topk], lengths [T] or None)."""
    o = torch.zeros(*q.shape[:2], d_v).double()
    lse, largest = (torch.full(q.shape[:2], -math.inf).double() for _ in range(2))
    for t in range(q.shape[0]):
        seen = []
        for rows, indices, lengths in pools:
            of_query = indices[t, : None if lengths is None else max(0, int(lengths[t]))]
            seen.append(rows[of_query[(of_query >= 0) & (of_query < rows.shape[0])].long()])
        keys = torch.cat(seen)
        all_of_them = torch.ones(keys.shape[0]).bool()
        o[t], lse[t] = expected.attend(q[t], keys, keys[:, :d_v], all_of_them, SM_SCALE, sink=sink, soft_cap=soft_cap)
        if keys.shape[0]:
            largest[t] = (q[t].double() @ keys.double().T * SM_SCALE).amax(-1)
    return o, largest, lse


def indices_of(batch, num_queries, topk):
    """Returns slots of tokens in any order, holes, and what is beyond the pool; the last query has none at all."""
    slots = torch.tensor(batch.all_slots())
    indices = slots[torch.randint(len(slots), (num_queries, topk))].int()
    indices[torch.rand(num_queries, topk) < 0.2] = -1
    indices[:, topk // 2] = 2147483647
    indices[-1] = -1
    return indices


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("topk", [1, 5, 130])
def test_slots_in_any_order(dtype, topk):
    batch = batches.paged([40, 100], 16)
    cache = batches.random_cache(batch, dtype=torch.float16 if dtype == torch.float16 else torch.bfloat16)
    q = torch.randn(4, 5, 576).to(dtype)
    indices = indices_of(batch, 4, topk)
    o, lse = libmla.decode_sparse(q, cache, indices, sm_scale=SM_SCALE, return_lse=True)
    wanted = right(q, [(cache.view(-1, 576), indices, None)], 512)
    expected.check(o, wanted[0])
    expected.check(lse, wanted[2])
    assert (o[-1] == 0).all() and (lse[-1] == -math.inf).all()
    _, asked = libmla.decode_sparse(q, cache, indices, sm_scale=SM_SCALE, return_lse=True, lse_inf_without_keys=True)
    assert torch.equal(asked, lse.masked_fill(lse == -math.inf, math.inf))


@pytest.mark.parametrize("format", ["fp8", "fp8_ds_mla", "fp8_dsv4"])
def test_quantized_caches(format):
    width = 512 if format == "fp8_dsv4" else 576
    batch = batches.paged([40, 100], 32)
    cache = batches.packed_cache(format, batch, torch.randn(140, width).bfloat16())
    if format == "fp8":
        meant = (cache.kv.float() * cache.ckv_scale).bfloat16()
    else:
        meant = expected.unpack_fp8_ds_mla(cache.kv) if width == 576 else expected.unpack_fp8_dsv4(cache.kv, 32)
    q = torch.randn(3, 4, width).bfloat16()
    indices = indices_of(batch, 3, 20)
    sink = torch.tensor([-math.inf, 0.0, 1.0, 3.0])
    o, largest, lse = libmla.decode_sparse(q, cache, indices, sm_scale=SM_SCALE, attn_sink=sink, return_max_logits=True)
    wanted = right(q, [(meant.reshape(-1, width), indices, None)], 512, sink=sink)
    expected.check(o, wanted[0])
    expected.check(largest, wanted[1])
    expected.check(lse, wanted[2])
    assert (largest[-1] == -math.inf).all()  # a query without keys


def test_compute_in_e4m3_is_that_of_dense_decode():
    """The same keys in the same order are in the same blocks of 32."""
    batch = batches.paged([70], 16)
    cache = batches.packed_cache("fp8_ds_mla", batch, torch.randn(70, 576).bfloat16())
    q = torch.randn(1, 4, 576)
    named = {"sm_scale": SM_SCALE, "compute": "fp8", "context": libmla.Context(num_threads=1, backend="reference")}
    dense = libmla.decode(q, cache, **batch.pages(), **named)
    assert torch.equal(libmla.decode_sparse(q, cache, ints(batch.slots(0))[None], **named), dense)
    usual = libmla.decode_sparse(q, cache, ints(batch.slots(0))[None], sm_scale=SM_SCALE)
    assert 1e-3 < (dense - usual).abs().max() < 0.2


@pytest.mark.parametrize("per_request", [False, True])
def test_two_pools_and_lengths(per_request):
    first, second = batches.paged([40, 100], 64), batches.paged([30], 2)
    caches = [
        batches.packed_cache("fp8_dsv4", batch, torch.randn(sum(batch.kv_len), 512).bfloat16())
        for batch in (first, second)
    ]
    q = torch.randn(4, 3, 512).bfloat16()
    indices, extra = indices_of(first, 4, 20), indices_of(second, 4, 7)
    lengths, extra_lengths = (
        (ints([5, 20]), ints([0, 30])) if per_request else (ints([20, 0, 3, -1]), ints([7, 7, 0, 9]))
    )
    o, lse = libmla.decode_sparse(
        q,
        caches[0],
        indices,
        topk_length=lengths,
        extra_cache=caches[1],
        extra_indices=extra,
        extra_topk_length=extra_lengths,
        sm_scale=SM_SCALE,
        return_lse=True,
    )
    each = [given.repeat_interleave(2) if per_request else given for given in (lengths, extra_lengths)]
    rows = [expected.unpack_fp8_dsv4(cache.kv, cache.page_size).reshape(-1, 512) for cache in caches]
    wanted = right(q, [(rows[0], indices, each[0]), (rows[1], extra, each[1])], 512)
    expected.check(o, wanted[0])
    expected.check(lse, wanted[2])


def test_ragged_requests():
    batch = batches.paged([40], 16)
    cache = batches.random_cache(batch)
    q = torch.randn(4, 2, 576).bfloat16()
    indices = indices_of(batch, 4, 9)
    o = libmla.decode_sparse(
        q, cache, indices, topk_length=ints([4, 9]), qo_indptr=batches.indptr([1, 3]), sm_scale=SM_SCALE
    )
    expected.check(o, right(q, [(cache.view(-1, 576), indices, ints([4, 9, 9, 9]))], 512)[0])


@pytest.mark.parametrize("per", ["token", "request"])
def test_as_many_tokens_as_requests(per):
    batch = batches.paged([40], 16)
    cache = batches.random_cache(batch)
    q = torch.randn(4, 2, 576).bfloat16()
    indices, lengths = indices_of(batch, 4, 9), ints([4, 9, 1, 7])
    # Two queries are of the first request, none of the second.
    named = {"topk_length": lengths, "qo_indptr": batches.indptr([2, 0, 1, 1]), "sm_scale": SM_SCALE}
    second = {"extra_cache": cache, "extra_indices": indices, "extra_topk_length": lengths}
    with pytest.raises(ValueError, match="topk_length_per: expected token or request, since qo_indptr is given and"):
        libmla.decode_sparse(q, cache, indices, **named)
    with pytest.raises(ValueError, match=r"extra_topk_length_per: expected token or request"):
        libmla.decode_sparse(q, cache, indices, topk_length_per="request", **named, **second)
    o = libmla.decode_sparse(q, cache, indices, topk_length_per="request", extra_topk_length_per=per, **named, **second)
    of_requests = ints([4, 4, 1, 7])
    rows = cache.view(-1, 576)
    pools = [(rows, indices, of_requests), (rows, indices, lengths if per == "token" else of_requests)]
    expected.check(o, right(q, pools, 512)[0])


def test_lengths_of_nobody():
    batch = batches.paged([40], 16)
    with pytest.raises(ValueError, match='topk_length_per: expected "token", "request" or None, got "head"'):
        libmla.decode_sparse(
            torch.randn(4, 2, 576).bfloat16(),
            batches.random_cache(batch),
            indices_of(batch, 4, 9),
            topk_length_per="head",
            sm_scale=SM_SCALE,
        )


def test_parts_and_outputs():
    batch = batches.paged([40], 16)
    cache = batches.random_cache(batch)
    q = torch.randn(4, 2, 576).bfloat16()
    indices = indices_of(batch, 4, 9)
    wanted = libmla.decode_sparse(q, cache, indices, sm_scale=SM_SCALE)
    out, lse = torch.empty(4, 2, 512).bfloat16(), torch.empty(4, 2)
    given = libmla.decode_sparse(
        (q[..., :512], q[..., 512:]),
        (cache[..., :512], cache[..., 512:]),
        indices,
        sm_scale=SM_SCALE,
        out=out,
        lse=lse,
    )
    assert given[0] is out and given[1] is lse and torch.equal(out, wanted)


@pytest.mark.parametrize(("d_qk", "d_v"), [(576, 512), (512, 512), (96, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefill_sparse(dtype, d_qk, d_v):
    kv = torch.randn(50, d_qk).to(dtype)
    kv[7] = math.nan
    q = torch.randn(6, 3, d_qk).to(dtype)
    indices = torch.randint(50, (6, 11), dtype=torch.int32)
    indices[indices == 7] = 8
    indices[2, 3], indices[4, 0], indices[5] = -1, 50, -1
    lengths = ints([11, 3, 11, 0, 20, 11])
    sink = torch.tensor([0.0, -1.0, 2.0])
    o, largest, lse = libmla.prefill_sparse(
        q, kv, indices, topk_length=lengths, d_v=d_v, attn_sink=sink, sm_scale=SM_SCALE, return_max_logits=True
    )
    wanted = right(q, [(kv, indices, lengths)], d_v, sink=sink)
    for got, one in zip((o, largest, lse), wanted, strict=True):
        expected.check(got, one)


def test_what_prefill_sparse_returns():
    kv, q = torch.randn(50, 576).bfloat16(), torch.randn(6, 3, 576).bfloat16()
    indices = torch.randint(50, (6, 11), dtype=torch.int32)

    def run(**more):
        return libmla.prefill_sparse(q, kv, indices, sm_scale=SM_SCALE, **more)

    o, largest, lse = run(return_max_logits=True)
    assert torch.equal(run(), o)
    assert all(map(torch.equal, run(return_lse=True), (o, lse)))
    mine = [torch.empty_like(made) for made in (o, largest, lse)]
    names = ("out", "max_logits", "lse")
    for chosen in range(8):
        given = {name: mine[i] for i, name in enumerate(names) if chosen >> i & 1}
        returned = run(**given, return_max_logits=True)
        assert all(map(torch.equal, returned, (o, largest, lse)))
        assert all(returned[names.index(name)] is tensor for name, tensor in given.items())
