# SPDX-License-Identifier: Apache-2.0
"""Tests the functions of libmla.flashinfer.mla that need no plan against float64."""

from __future__ import annotations

import math

import pytest
import torch

import batches
import expected
import libmla
from batches import indptr, ints
from libmla.flashinfer import decode as fi

SM_SCALE = 192**-0.5
LN2 = math.log(2.0)
HEADS = 6
E4M3 = torch.float8_e4m3fn
NOWHERE = torch.empty(0, dtype=torch.uint8)  # a workspace that must not be needed


def decode(query, cache, tables, seq_lens, **options):
    width = query.shape[-1]
    return fi.trtllm_batch_decode_with_kv_cache_mla(
        query,
        cache,
        NOWHERE,
        128,
        min(width, 512),
        width - min(width, 512),
        tables,
        seq_lens,
        0,
        **{"bmm1_scale": SM_SCALE} | options,
    )


def problem(kv_len=(5, 64, 150), q_len=2, dtype=torch.bfloat16, page_size=16, width=576):
    batch = batches.paged(kv_len, page_size)
    cache = batches.random_cache(batch, width, dtype)
    return batch, cache, torch.randn(len(kv_len), q_len, HEADS, width).to(dtype)


def wanted(query, cache, batch, qo_indptr=None, **options):
    q = query.reshape(-1, *query.shape[-2:])
    return expected.decode(q, cache, batch.kv_len, batch.tables, SM_SCALE, 512, qo_indptr=qo_indptr, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads_first", [False, True])
def test_dense(dtype, heads_first):
    batch, cache, query = problem(dtype=dtype)
    pages = batch.pages()
    out, lse = decode(
        query, cache[:, None] if heads_first else cache, pages["block_table"], pages["kv_len"], return_lse=True
    )
    o_wanted, lse_wanted = wanted(query, cache, batch)
    assert out.shape == (3, 2, HEADS, 512) and out.dtype == dtype and lse.shape == (6, HEADS)
    expected.check(out.flatten(0, 1), o_wanted)
    expected.check(lse, lse_wanted / LN2)


def test_dense_ragged_with_a_table_for_keys_and_values():
    batch, cache, query = problem(q_len=3)
    pages = batch.pages()
    lengths = [3, 0, 2]
    compact = torch.cat([query[b, :n] for b, n in enumerate(lengths)])
    out, lse = decode(
        compact,
        cache,
        torch.stack([pages["block_table"]] * 2, dim=1),
        pages["kv_len"],
        uses_shared_paged_kv_idx=False,
        cum_seq_lens_q=indptr(lengths),
        max_q_len=3,
        return_lse=True,
    )
    o_wanted, lse_wanted = wanted(compact, cache, batch, indptr(lengths).tolist())
    expected.check(out, o_wanted)
    expected.check(lse, lse_wanted)  # natural: the peer's automatic choice for ragged queries


@pytest.mark.parametrize(
    ("base", "backend", "natural"), [("basee", "auto", True), ("base2", "cute-dsl", False), (None, "cute-dsl", True)]
)
def test_base_of_lse_and_nested_buffer(base, backend, natural):
    batch, cache, query = problem()
    pages = batch.pages()
    lse = torch.empty(3, 2, HEADS)
    out = torch.empty(3, 2, HEADS, 512, dtype=torch.bfloat16)
    options = {"lse": lse, "out": out, "return_lse": True, "return_lse_base": base, "backend": backend}
    result = decode(query, cache, pages["block_table"], pages["kv_len"], **options)
    assert result[0] is out and result[1] is lse
    expected.check(lse.flatten(0, 1), wanted(query, cache, batch)[1] / (1.0 if natural else LN2))


@pytest.mark.parametrize("as_tensors", [False, True])
def test_dense_e4m3(as_tensors):
    batch, cache, query = problem()
    pages = batch.pages()
    query, cache = expected.e4m3(query), expected.e4m3(cache)
    scales = (torch.tensor([SM_SCALE]), torch.tensor([0.5])) if as_tensors else (SM_SCALE, 0.5)
    options = {"bmm1_scale": scales[0], "bmm2_scale": scales[1], "sinks": [torch.zeros(HEADS)]}
    out = decode(query, cache, pages["block_table"], pages["kv_len"], **options)
    assert out.dtype == torch.bfloat16
    expected.check(out.flatten(0, 1), 0.5 * wanted(query.float(), cache.float(), batch, sink=torch.zeros(HEADS))[0])


def test_dense_over_packed_rows():
    batch, _, query = problem()
    pages = batch.pages()
    packed = batches.packed_cache("fp8_ds_mla", batch, torch.randn(sum(batch.kv_len), 576).bfloat16())
    out = decode(query, packed.kv, pages["block_table"], pages["kv_len"])
    expected.check(out.flatten(0, 1), wanted(query, expected.unpack_fp8_ds_mla(packed.kv), batch)[0])


def test_xqa_scales_scores_by_both():
    batch, cache, query = problem(q_len=1)
    pages = batch.pages()
    q8, cache8 = expected.e4m3(query), expected.e4m3(cache / 0.5)
    out = torch.empty(3, HEADS, 512, dtype=torch.bfloat16)
    result = fi.xqa_batch_decode_with_kv_cache_mla(
        q8, cache8, NOWHERE, 128, 512, 64, pages["block_table"], pages["kv_len"], 0, out, SM_SCALE, 0.5
    )
    assert result is out
    expected.check(out, wanted(q8.float(), cache8.float() * 0.5, batch)[0])


def test_ranks_of_a_context_merge_to_the_whole():
    world, page_size = 2, 4
    kv_len = [9, 30, 5]
    batch, cache, query = problem(kv_len, q_len=2, page_size=1)
    states = []
    for rank in range(world):
        local = batches.paged([len(range(rank, n, world)) for n in kv_len], page_size)
        rows = torch.full((local.num_pages, page_size, 576), math.nan, dtype=torch.bfloat16)
        for b, n in enumerate(kv_len):
            rows.view(-1, 576)[local.slots(b)] = cache.view(-1, 576)[batch.slots(b)[rank:n:world]]
        pages = local.pages()
        states.append(
            decode(
                query,
                rows,
                pages["block_table"],
                pages["kv_len"],
                return_lse=True,
                enable_dcp=True,
                cp_world=world,
                cp_rank=rank,
                causal_seqlens_kv_global=ints(kv_len),
                return_lse_base="basee",
            )
        )
    o = torch.stack([out.flatten(0, 1).float() for out, _ in states])
    o, lse = libmla.merge_states(o, torch.stack([lse for _, lse in states]))
    o_wanted, lse_wanted = wanted(query, cache, batch)
    expected.check(o, o_wanted, 1e-2)
    expected.check(lse, lse_wanted)


def slots_of(batch, q_len, topk):
    """Returns random tokens of each request as slots, -1 among them."""
    rows = []
    for b, n in enumerate(batch.kv_len):
        slots = torch.tensor(batch.slots(b) + [-1])
        rows += [slots[torch.randint(0, n + 1, (topk,))] for _ in range(q_len)]
    return torch.stack(rows).to(torch.int32)


def sparse_wanted(q, pools, *, sink=None):
    """Computes o and lse of q [T, H, d] over pools of (rows [N, d], slots [T, topk], lengths [T])."""
    o, lse = [], []
    for t in range(q.shape[0]):
        chosen = [
            rows[slots[t, : max(int(n[t]), 0)].long()][slots[t, : max(int(n[t]), 0)] >= 0] for rows, slots, n in pools
        ]
        rows = torch.cat(chosen)
        here = expected.attend(q[t], rows, rows[:, :512], torch.ones(len(rows)).bool(), SM_SCALE, sink=sink)
        o.append(here[0])
        lse.append(here[1])
    return torch.stack(o), torch.stack(lse)


@pytest.mark.parametrize("ragged", [False, True])
def test_sparse_counts_the_slots_that_a_query_sees(ragged):
    batch, cache, query = problem(kv_len=(3, 64, 150), q_len=2)
    slots = slots_of(batch, 2, 8)
    lengths = torch.tensor([2, 3, 8, 8, 8, 8])  # of 3 keys, the first of two queries sees 2
    options = {"sparse_mla_top_k": 8, "return_lse": True}
    if ragged:
        out, lse = decode(
            query.flatten(0, 1), cache, slots, ints(batch.kv_len), cum_seq_lens_q=ints([0, 2, 4, 6]), **options
        )
    else:
        out, lse = decode(query, cache, slots.view(3, 2, 8), ints(batch.kv_len), **options)
    o_wanted, lse_wanted = sparse_wanted(query.flatten(0, 1), [(cache.view(-1, 576), slots, lengths)])
    expected.check(out.reshape(6, HEADS, 512), o_wanted)
    expected.check(lse, lse_wanted / LN2)


def test_sparse_over_packed_rows_counts_the_sinks_in_lse():
    batch, _, query = problem()
    rows = torch.randn(sum(batch.kv_len), 576).bfloat16()
    packed = batches.packed_cache("fp8_ds_mla", batch, rows)
    meant = expected.unpack_fp8_ds_mla(packed.kv).reshape(-1, 576)
    slots = slots_of(batch, 2, 8)
    lengths, sinks = ints([8, 0, 3, 8, 1, 5]), torch.randn(HEADS)
    out, lse = decode(
        query, packed.kv, slots.view(3, 2, 8), lengths.view(3, 2), sparse_mla_top_k=8, sinks=sinks, return_lse=True
    )
    o_wanted, lse_wanted = sparse_wanted(query.flatten(0, 1), [(meant, slots, lengths)], sink=sinks)
    expected.check(out.flatten(0, 1), o_wanted)
    expected.check(lse, torch.logaddexp(lse_wanted, sinks.double()) / LN2)
    everything = decode(query, packed.kv, slots.view(3, 2, 8), None, sparse_mla_top_k=8)
    o_wanted, _ = sparse_wanted(query.flatten(0, 1), [(meant, slots, ints([8] * 6))])
    expected.check(everything.flatten(0, 1), o_wanted)


# kv_cache_format -> the formats of both pools and the bytes of their rows
V4_FORMATS = {
    "fp8": (("fp8_dsv4", 584), ("fp8_dsv4", 584)),
    "nvfp4": (("nvfp4_dsv4", 384), ("nvfp4_dsv4", 384)),
    "fp8_dsv41": (("fp8_dsv41", 528), ("fp8_dsv41", 528)),
    "fp8_dsv41_fp4_ca": (("fp8_dsv41", 528), ("fp4_dsv41", 288)),
}


def v4_pools(kv_cache_format="fp8"):
    swa = batches.paged([40, 200], 64)
    compressed = batches.paged([30, 90], 2)
    pools = []
    for batch, (name, row) in zip((swa, compressed), V4_FORMATS[kv_cache_format], strict=True):
        packed = batches.packed_cache(name, batch, torch.randn(sum(batch.kv_len), 512).bfloat16())
        meant = expected.unpack(packed).reshape(-1, 512)
        # As the peer shapes it: rows of so many bytes, in pages that may be padded.
        peer = packed.kv.as_strided((batch.num_pages, batch.page_size, 1, row), (packed.kv.stride(0), row, row, 1))
        pools.append((batch, peer, meant))
    return pools


@pytest.mark.parametrize("kv_cache_format", V4_FORMATS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_v4_with_a_table_for_each_pool(layout, kv_cache_format):
    (swa, swa_cache, swa_rows), (other, other_cache, other_rows) = v4_pools(kv_cache_format)
    if layout == "HND":
        swa_cache, other_cache = swa_cache.transpose(1, 2), other_cache.transpose(1, 2)
    q, sinks = torch.randn(4, HEADS, 512).bfloat16(), torch.randn(HEADS)
    slots, more = slots_of(swa, 2, 12), slots_of(other, 2, 20)
    lengths, more_lengths = ints([12, 0, 5, 12]), ints([20, 0, 0, 7])
    out = fi.trtllm_batch_decode_sparse_mla_dsv4(
        q.view(2, 2, HEADS, 512),
        swa_cache,
        NOWHERE,
        slots,
        other_cache,
        bmm1_scale=SM_SCALE,
        sinks=sinks,
        kv_layout=layout,
        swa_topk_lens=lengths,
        extra_sparse_indices=more,
        extra_sparse_topk_lens=more_lengths,
        kv_cache_format=kv_cache_format,
    )
    pools = [(swa_rows, slots, lengths), (other_rows, more, more_lengths)]
    assert out.shape == (2, 2, HEADS, 512)
    expected.check(out.flatten(0, 1), sparse_wanted(q, pools, sink=sinks)[0])
    assert (out[0, 1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_v4_with_a_combined_table(dtype):
    kv_len = [40, 2, 300]
    swa, other = batches.paged(kv_len, 32), batches.paged([10, 1, 75], 64)
    caches = [torch.randn(b.num_pages, b.page_size, 512).bfloat16() for b in (swa, other)]
    q = torch.randn(5, HEADS, 512).bfloat16()
    if dtype == E4M3:
        q, caches = expected.e4m3(q), [expected.e4m3(cache) for cache in caches]
    qo_indptr = [0, 2, 4, 5]
    per_query = [slots_of(b, 2, n)[[0, 1, 2, 3, 4]] for b, n in ((swa, 128), (other, 20))]
    lengths = ints([148, 135, 128, 130, 148])
    out = torch.full((5, HEADS, 512), 7.0, dtype=torch.bfloat16)
    result = fi.trtllm_batch_decode_sparse_mla_dsv4(
        q,
        caches[0][:, None],
        NOWHERE,
        torch.cat(per_query, 1)[:4],
        caches[1][:, None],
        lengths[:4],
        ints(kv_len),
        out,
        SM_SCALE,
        cum_seq_lens_q=ints(qo_indptr),
        max_q_len=2,
    )
    window = ints([39, 40, 1, 2])  # the keys that each query sees
    pools = [
        (caches[0].view(-1, 512).float(), per_query[0], window),
        (caches[1].view(-1, 512).float(), per_query[1], lengths - 128),
    ]
    assert result is out and (out[4] == 7.0).all()
    expected.check(out[:4], sparse_wanted(q[:4].float(), pools)[0])


def test_what_is_refused_says_why():
    batch, cache, query = problem()
    table, lengths = batch.pages()["block_table"], batch.pages()["kv_len"]
    with pytest.raises(ValueError, match="backend.*'fa2'"):
        decode(query, cache, table, lengths, backend="fa2")
    with pytest.raises(ValueError, match="max_q_len"):
        decode(query, cache, table, lengths, max_q_len=2)
    with pytest.raises(ValueError, match="query.*3 dimensions with cum_seq_lens_q"):
        decode(query, cache, table, lengths, cum_seq_lens_q=ints([0, 2]))
    with pytest.raises(ValueError, match="enable_dcp"):
        decode(query, cache, table, lengths, cp_world=2)
    with pytest.raises(ValueError, match="block_tables.*sparse_mla_top_k = 9"):
        decode(query, cache, table, lengths, sparse_mla_top_k=9)
    with pytest.raises(libmla.UnsupportedError, match="528 bytes"):
        rows = torch.zeros(4, 16, 528, dtype=torch.uint8)
        decode(query, rows, torch.zeros(3, 2, 8, dtype=torch.int32), None, sparse_mla_top_k=8)
    v4 = {"query": query[..., :512], "swa_kv_cache": cache[..., :512], "workspace_buffer": NOWHERE}
    slots = torch.zeros(6, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"swa_kv_cache: expected uint8 pages of nvfp4_dsv4, got torch\.bfloat16"):
        fi.trtllm_batch_decode_sparse_mla_dsv4(**v4, sparse_indices=slots, kv_cache_format="nvfp4")
    bytes_of_v4 = {**v4, "swa_kv_cache": torch.zeros(4, 16, 584, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=r"swa_kv_cache.*528 bytes \(fp8_dsv41\), got shape \(4, 16, 584\)"):
        fi.trtllm_batch_decode_sparse_mla_dsv4(**bytes_of_v4, sparse_indices=slots, kv_cache_format="fp8_dsv41_fp4_ca")
    with pytest.raises(ValueError, match="kv_cache_format.*'fp4'"):
        fi.trtllm_batch_decode_sparse_mla_dsv4(**v4, kv_cache_format="fp4")
    with pytest.raises(libmla.UnsupportedError, match="dsv4_inv_rope_cos_sin_cache"):
        fi.trtllm_batch_decode_sparse_mla_dsv4(**v4, dsv4_inv_rope_cos_sin_cache=torch.zeros(4, 64))
    with pytest.raises(ValueError, match="sparse_indices"):
        fi.trtllm_batch_decode_sparse_mla_dsv4(**v4)
