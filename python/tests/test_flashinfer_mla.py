# SPDX-License-Identifier: Apache-2.0
"""Tests libmla.flashinfer.mla.BatchMLAPagedAttentionWrapper against float64, and its conventions."""

from __future__ import annotations

import math

import pytest
import torch

import batches
import expected
import libmla
from batches import indptr, ints
from libmla.flashinfer import BatchMLAPagedAttentionWrapper
from libmla.flashinfer.mla import MLAPlanMetadata

SM_SCALE = 192**-0.5
LN2 = math.log(2.0)
KV_LEN = [5, 0, 64, 1, 150]
QO_LEN = [1, 2, 3, 1, 2]
HEADS = 6
E4M3 = torch.float8_e4m3fn


def wrapper(**options):
    return BatchMLAPagedAttentionWrapper(torch.empty(1, dtype=torch.int8), **options)


def csr(batch, qo_len=QO_LEN):
    pages = batch.pages("csr")
    return MLAPlanMetadata.csr(indptr(qo_len), pages["kv_indptr"], pages["kv_indices"], pages["kv_len"])


def plan(w, metadata, *, causal=True, q_dtype=torch.bfloat16, kv_dtype=None, ckv=512, kpe=64, page_size=16, **options):
    w.plan(
        metadata=metadata,
        num_heads=HEADS,
        head_dim_ckv=ckv,
        head_dim_kpe=kpe,
        page_size=page_size,
        causal=causal,
        sm_scale=SM_SCALE,
        q_data_type=q_dtype,
        kv_data_type=kv_dtype or q_dtype,
        **options,
    )


def problem(dtype=torch.bfloat16, width=576, page_size=16, kv_len=KV_LEN, qo_len=QO_LEN):
    batch = batches.paged(kv_len, page_size)
    cache = batches.random_cache(batch, width, dtype)
    return batch, cache, torch.randn(sum(qo_len), HEADS, width).to(dtype)


def wanted(q, cache, batch, d_v=512, qo_len=QO_LEN, **options):
    return expected.decode(
        q, cache, batch.kv_len, batch.tables, SM_SCALE, d_v, qo_indptr=indptr(qo_len).tolist(), **options
    )


@pytest.mark.parametrize(
    ("backend", "dtype", "causal"),
    [("auto", torch.bfloat16, True), ("fa2", torch.float16, False), ("fa3", torch.float16, True)],
)
def test_split_tensors_and_base_2_lse(backend, dtype, causal):
    batch, cache, q = problem(dtype)
    pages = batch.pages("csr")
    w = wrapper(backend=backend)
    # The flat, positional form of earlier versions, with offsets of a larger batch behind those of this one.
    w.plan(
        indptr(QO_LEN),
        torch.cat([pages["kv_indptr"], ints([9, 9])]),
        pages["kv_indices"],
        pages["kv_len"],
        HEADS,
        512,
        64,
        16,
        causal,
        SM_SCALE,
        dtype,
        dtype,
    )
    o, lse = w.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], return_lse=True)
    o_wanted, lse_wanted = wanted(q, cache, batch, causal=causal)
    assert o.dtype == dtype and o.shape == (9, HEADS, 512) and lse.shape == (9, HEADS)
    expected.check(o, o_wanted)
    expected.check(lse, lse_wanted / LN2)
    assert (o[1:3] == 0).all() and (lse[1:3] == -math.inf).all()


def test_packed_tensors_dense_metadata_and_natural_lse():
    batch, cache, q = problem(page_size=4)
    pages = batch.pages()
    w = wrapper()
    plan(w, MLAPlanMetadata.dense(indptr(QO_LEN), pages["block_table"], pages["kv_len"]), lse_mode="basee", page_size=4)
    o, lse = w.run(query=q, kv_cache=cache, return_lse=True)
    o_wanted, lse_wanted = wanted(q, cache, batch)
    expected.check(o, o_wanted)
    expected.check(lse, lse_wanted)


def test_given_outputs_are_written_and_returned():
    batch, cache, q = problem()
    w = wrapper()
    plan(w, csr(batch))
    out, lse = torch.empty(9, HEADS, 512, dtype=torch.bfloat16), torch.empty(9, HEADS)
    o = w.run(query=q, kv_cache=cache, out=out, lse=lse, return_lse_base_on_e=True)
    assert o is out
    o_wanted, lse_wanted = wanted(q, cache, batch)
    expected.check(out, o_wanted)
    expected.check(lse, lse_wanted)
    wide = w.run(query=q, kv_cache=cache, out=torch.empty(9, HEADS, 512))
    expected.check(wide, o_wanted)


def test_without_rotary_part():
    batch, cache, q = problem(torch.float16, width=512)
    w = wrapper()
    plan(w, csr(batch), q_dtype=torch.float16, kpe=0)
    empty_q, empty_kpe = q[..., 512:], cache[..., 512:]
    o, lse = w.run(q, empty_q, cache, empty_kpe, return_lse=True)
    o_wanted, lse_wanted = wanted(q, cache, batch)
    expected.check(o, o_wanted)
    expected.check(lse, lse_wanted / LN2)


def test_e4m3_cache_with_a_scale_for_each_part():
    batch, cache, q = problem()
    ckv, kpe = expected.e4m3(cache[..., :512] / 0.02), expected.e4m3(cache[..., 512:] / 0.05)
    meant = torch.cat([(ckv.float() * 0.02).bfloat16(), (kpe.float() * 0.05).bfloat16()], -1)
    w = wrapper()
    plan(w, csr(batch), kv_dtype=E4M3)
    o = w.run(q[..., :512], q[..., 512:], ckv, kpe, ckv_scale=0.02, kpe_scale=0.05)
    expected.check(o, wanted(q, meant, batch)[0])


def test_e4m3_cache_with_scales_of_quarters():
    batch, cache, q = problem()
    scales = torch.rand(batch.num_pages, 16, 4) * 0.02 + 0.01
    each = scales.repeat_interleave(128, -1)
    ckv, kpe = expected.e4m3(cache[..., :512] / each), expected.e4m3(cache[..., 512:] / 0.05)
    meant = torch.cat([(ckv.float() * each).bfloat16(), (kpe.float() * 0.05).bfloat16()], -1)
    w = wrapper()
    plan(w, csr(batch), kv_dtype=E4M3)
    o = w.run(query=(q[..., :512], q[..., 512:]), kv_cache=(ckv, kpe), ckv_scale_arr=scales, kpe_scale=0.05)
    expected.check(o, wanted(q, meant, batch)[0])
    with pytest.raises(ValueError, match="ckv_scale_arr.*quarter"):
        w.run(query=q, kv_cache=(ckv, kpe), ckv_scale_arr=scales[..., :3].contiguous(), kpe_scale=0.05)


@pytest.mark.parametrize("bmm1", [2.0 * SM_SCALE, torch.tensor([2.0 * SM_SCALE])])
@pytest.mark.parametrize("bmm2", [0.5, torch.tensor(0.5)])
def test_e4m3_queries_with_the_scales_of_both_products(bmm1, bmm2):
    batch, cache, q = problem()
    q, cache = expected.e4m3(q), expected.e4m3(cache)
    w = wrapper()
    plan(w, csr(batch), q_dtype=E4M3)
    o = w.run(query=q, kv_cache=cache, bmm1_scale=bmm1, bmm2_scale=bmm2)
    o_wanted, _ = wanted(2.0 * q.float(), cache.float(), batch)
    assert o.dtype == torch.bfloat16
    expected.check(o, 0.5 * o_wanted)


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_8_bit_output_is_divided_by_its_scale(dtype):
    batch, cache, q = problem()
    w = wrapper(backend="cutlass")
    plan(w, csr(batch))
    out = w.run(query=q, kv_cache=cache, out=torch.empty(9, HEADS, 512, dtype=dtype), o_scale=0.01)
    o_wanted, _ = wanted(q, cache, batch)
    step = 2**-4 if dtype == E4M3 else 2**-3
    torch.testing.assert_close(out.double() * 0.01, o_wanted, atol=2e-3, rtol=step)
    with pytest.raises(ValueError, match="o_scale"):
        w.run(query=q, kv_cache=cache, o_scale=0.01)
    with pytest.raises(ValueError, match="FP8"):
        w.run(query=q, kv_cache=cache, out=torch.empty(9, HEADS, 512), o_scale=0.01)
    with pytest.raises(ValueError, match="finite positive"):
        w.run(query=q, kv_cache=cache, out=out, o_scale=math.nan)


def test_sinks():
    batch, cache, q = problem()
    sinks = torch.randn(HEADS)
    w = wrapper()
    plan(w, csr(batch), use_sinks=True)
    o, lse = w.run(query=q, kv_cache=cache, sinks=sinks, return_lse=True)
    o_wanted, lse_wanted = wanted(q, cache, batch, sink=sinks)
    expected.check(o, o_wanted)
    expected.check(lse, lse_wanted / LN2)


def test_one_query_each_needs_no_plan():
    kv_len = [5, 70, 33]
    batch, cache, q = problem(kv_len=kv_len, qo_len=[1, 1, 1])
    pages = batch.pages()
    w = wrapper(backend="cutlass")
    o = w.run(
        q[..., :512],
        q[..., 512:],
        cache[..., :512],
        cache[..., 512:],
        kv_len=pages["kv_len"],
        page_table=pages["block_table"],
    )
    expected.check(o, wanted(q, cache, batch, qo_len=[1, 1, 1])[0])
    with pytest.raises(RuntimeError, match="before plan"):
        wrapper().run(query=q, kv_cache=cache)


def test_lengths_of_a_run_replace_the_planned_ones():
    batch, cache, q = problem()
    w = wrapper()
    plan(w, csr(batch))
    shorter = [4, 0, 60, 1, 100]
    o = w.run(query=q, kv_cache=cache, kv_len=ints(shorter))
    expected.check(o, expected.decode(q, cache, shorter, batch.tables, SM_SCALE, 512, qo_indptr=indptr(QO_LEN))[0])
    expected.check(w.run(query=q, kv_cache=cache), wanted(q, cache, batch)[0])


def test_the_buffers_of_a_graph_take_the_next_batch():
    buffers = {
        "qo_indptr": torch.full((6,), -1, dtype=torch.int32),
        "kv_indptr": torch.full((6,), -1, dtype=torch.int32),
        "kv_indices": torch.full((99,), 2147483647, dtype=torch.int32),
        "kv_len_arr": torch.full((5,), -1, dtype=torch.int32),
    }
    w = wrapper(use_cuda_graph=True, **buffers)
    batch, cache, q = problem()
    plan(w, csr(batch))
    expected.check(w.run(query=q, kv_cache=cache), wanted(q, cache, batch)[0])
    memory = torch.from_dlpack(w._kept._plan.workspace).data_ptr()
    assert buffers["kv_len_arr"].tolist() == KV_LEN

    other = [150, 3, 30, 17, 5]
    lengths = [2, 2, 2, 1, 2]
    batch, cache, q = problem(kv_len=other, qo_len=lengths)
    plan(w, csr(batch, lengths))
    assert buffers["kv_len_arr"].tolist() == other
    expected.check(w.run(query=q, kv_cache=cache), wanted(q, cache, batch, qo_len=lengths)[0])
    assert torch.from_dlpack(w._kept._plan.workspace).data_ptr() == memory

    # A batch of more query tokens, and then the first ones again.
    longer = [4, 2, 2, 1, 2]
    batch, cache, q = problem(kv_len=other, qo_len=longer)
    plan(w, csr(batch, longer))
    expected.check(w.run(query=q, kv_cache=cache), wanted(q, cache, batch, qo_len=longer)[0])
    batch, cache, q = problem(kv_len=other, qo_len=lengths)
    plan(w, csr(batch, lengths))
    expected.check(w.run(query=q, kv_cache=cache), wanted(q, cache, batch, qo_len=lengths)[0])
    assert torch.from_dlpack(w._kept._plan.workspace).data_ptr() == memory

    with pytest.raises(ValueError, match="buffer of the CUDA graph"):
        plan(w, csr(batches.paged([3], 16), [1]))


def test_a_plan_is_kept_and_its_memory_reused():
    batch, cache, q = problem(kv_len=[150, 3, 30, 17, 5])
    w = wrapper()
    plan(w, csr(batch))
    first = w.run(query=q, kv_cache=cache)
    kept = w._kept._plan
    assert torch.equal(w.run(query=q, kv_cache=cache), first) and w._kept._plan is kept
    for kv_len, qo_len in ((KV_LEN, QO_LEN), ([3], [2]), ([300] * 6, [4] * 6)):
        batch, cache, q = problem(kv_len=kv_len, qo_len=qo_len)
        plan(w, csr(batch, qo_len))
        expected.check(w.run(query=q, kv_cache=cache), wanted(q, cache, batch, qo_len=qo_len)[0])


def test_a_run_that_fails_leaves_the_wrapper_usable():
    batch, cache, q = problem()
    w = wrapper()
    plan(w, csr(batch))
    with pytest.raises(ValueError, match="d_qk|kv_lora_rank|width|channels"):
        w.run(query=q[..., :300].contiguous(), kv_cache=cache)
    expected.check(w.run(query=q, kv_cache=cache), wanted(q, cache, batch)[0])


def test_what_is_wrong_is_named():
    batch, cache, q = problem()
    w = wrapper()
    with pytest.raises(ValueError, match="backend.*'fa9'"):
        wrapper(backend="fa9")
    with pytest.raises(TypeError, match="num_heads, head_dim_ckv"):
        w.plan(metadata=csr(batch))
    with pytest.raises(TypeError, match="neither in full"):
        plan(w, MLAPlanMetadata(qo_indptr=indptr(QO_LEN)))
    with pytest.raises(libmla.UnsupportedError, match="profile"):
        plan(w, csr(batch), use_profiler=True)
    plan(w, csr(batch), kv_dtype=E4M3)
    with pytest.raises(ValueError, match="kv_cache.dtype.*float8_e4m3fn"):
        w.run(query=q, kv_cache=cache)
    with pytest.raises(ValueError, match="q_pe.dtype.*bfloat16"):
        w.run(q[..., :512], q[..., 512:].half(), cache[..., :512], cache[..., 512:])
    cache = expected.e4m3(cache)
    with pytest.raises(ValueError, match="Exactly one of ckv_scale or ckv_scale_arr"):
        w.run(query=q, kv_cache=cache)
    with pytest.raises(ValueError, match="kpe_scale"):
        w.run(query=q, kv_cache=cache, ckv_scale=1.0)
    with pytest.raises(libmla.UnsupportedError, match="profiler_buffer"):
        w.run(query=q, kv_cache=cache, ckv_scale=1.0, kpe_scale=1.0, profiler_buffer=torch.empty(1))
    with pytest.raises(TypeError, match="query.*q_nope.*both"):
        w.run(q, query=q, kv_cache=cache)
