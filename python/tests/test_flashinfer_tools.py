# SPDX-License-Identifier: Apache-2.0
"""Tests libmla.flashinfer's prefill, merges, cache writers and index tools, against float64 or bit for bit."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import batches
import expected
import libmla
from batches import indptr, ints
from libmla import flashinfer as fi

LN2 = math.log(2.0)
E4M3 = torch.float8_e4m3fn


def prefill_wanted(q, k, v, qo_len, kv_len, sm_scale, causal=True, window=-1, sink=None, slopes=None, soft_cap=0.0):
    o, lse = [], []
    for b, (rows, length) in enumerate(zip(qo_len, kv_len)):
        first, key = sum(qo_len[:b]), sum(kv_len[:b])
        keys, values = (x[key : key + length].transpose(0, 1) for x in (k, v))
        at = torch.arange(length)
        for i in range(rows):
            position = length - rows + i
            visible = at <= position if causal else torch.ones(length).bool()
            if window >= 0:
                visible &= at >= position - window
            bias = None if slopes is None else slopes[:, None] * (at - position)
            here = expected.attend(
                q[first + i], keys, values, visible, sm_scale, sink=sink, bias=bias, soft_cap=soft_cap
            )
            o.append(here[0])
            lse.append(here[1])
    return torch.stack(o), torch.stack(lse)


@pytest.mark.parametrize(("d_qk", "d_v", "kv_heads"), [(192, 128, 4), (128, 128, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_single_prefill(d_qk, d_v, kv_heads, causal):
    q, k, v = (torch.randn(n, h, d).half() for n, h, d in ((7, 4, d_qk), (50, kv_heads, d_qk), (50, kv_heads, d_v)))
    o, lse = fi.single_prefill_with_kv_cache(q, k, v, causal=causal, window_left=20, return_lse=True)
    each = [x.repeat_interleave(4 // kv_heads, 1) for x in (k, v)]
    o_wanted, lse_wanted = prefill_wanted(q, *each, [7], [50], d_qk**-0.5, causal, 20)
    assert o.dtype == torch.float16
    expected.check(o, o_wanted)
    expected.check(lse, lse_wanted / LN2)
    heads_first = fi.single_prefill_with_kv_cache(
        q, k.transpose(0, 1), v.transpose(0, 1), causal=causal, window_left=20, kv_layout="HND"
    )
    assert torch.equal(heads_first, o)


def test_single_prefill_options():
    q, k, v = (torch.randn(n, 6, d).bfloat16() for n, d in ((5, 192), (30, 192), (30, 128)))
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    o = fi.single_prefill_with_kv_cache(
        q, k, v, causal=True, pos_encoding_mode="ALIBI", logits_soft_cap=5.0, sm_scale=0.1, k_scale=2.0, v_scale=0.5
    )
    o_wanted, _ = prefill_wanted(q, k, v, [5], [30], 0.2, slopes=slopes, soft_cap=5.0)
    expected.check(o, 0.5 * o_wanted)


def test_single_prefill_of_e4m3():
    q, k, v = (expected.e4m3(torch.randn(n, 4, 128)) for n in (5, 30, 30))
    scales = [torch.rand(4) + 0.5 for _ in range(3)]
    o = fi.single_prefill_with_kv_cache(q, k, v, *scales, o_dtype=torch.bfloat16, causal=True)
    meant = [x.float() * scale[:, None] for x, scale in zip((q, k, v), scales)]
    expected.check(o, prefill_wanted(*meant, [5], [30], 128**-0.5)[0])
    narrow = fi.single_prefill_with_kv_cache(q, k, v, *scales, causal=True)
    assert narrow.dtype == E4M3
    torch.testing.assert_close(narrow.float(), o.float(), atol=2e-2, rtol=2**-4)


def ragged(**options):
    return fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1, dtype=torch.uint8), **options)


def ragged_problem(qo_len, kv_len, dtype=torch.bfloat16):
    q, k = (torch.randn(sum(n), 4, 192).to(dtype) for n in (qo_len, kv_len))
    return q, k, torch.randn(sum(kv_len), 4, 128).to(dtype)


def test_ragged_prefill_in_a_graphs_buffers():
    w = ragged(use_cuda_graph=True, qo_indptr_buf=ints([0] * 4), kv_indptr_buf=ints([0] * 4))
    for qo_len, kv_len in (([3, 0, 4], [10, 5, 4]), ([1, 4, 2], [1, 17, 1])):
        q, k, v = ragged_problem(qo_len, kv_len)
        w.plan(indptr(qo_len), indptr(kv_len), 4, 4, 192, 128, causal=True, q_data_type=torch.bfloat16)
        o, lse = w.run_return_lse(q, k, v)
        o_wanted, lse_wanted = prefill_wanted(q, k, v, qo_len, kv_len, 192**-0.5)
        expected.check(o, o_wanted)
        expected.check(lse, lse_wanted / LN2)
    with pytest.raises(ValueError, match="buffer of the CUDA graph"):
        w.plan(ints([0, 1]), ints([0, 1]), 4, 4, 192, 128)


def test_ragged_prefill_options():
    qo_len, kv_len = [3, 0, 4], [10, 5, 4]
    q, k, v = ragged_problem(qo_len, kv_len, torch.float16)
    w = ragged()
    w.plan(
        indptr(qo_len), indptr(kv_len), 4, 4, 192, head_dim_vo=128, causal=False, sm_scale=0.1, disable_split_kv=True
    )
    w._sinks = torch.randn(4)
    lse, out = torch.empty(4, 7), torch.empty(7, 4, 128, dtype=torch.float16)
    scales = {"q_scale": 2.0, "k_scale": 0.5, "v_scale": 3.0, "o_scale": 2.0}
    o = w.run(q, k, v, out=out, lse=lse, lse_base="ln", lse_layout="HN", **scales)
    o_wanted, lse_wanted = prefill_wanted(q, k, v, qo_len, kv_len, 0.1, causal=False, sink=w._sinks)
    assert o is out
    expected.check(out, 1.5 * o_wanted, 5e-3)
    expected.check(lse.t(), lse_wanted)
    w._sinks = None
    o, lse = w.forward_return_lse(q, k, v, causal=True, sm_scale=0.2)
    o_wanted, lse_wanted = prefill_wanted(q, k, v, qo_len, kv_len, 0.2)
    expected.check(o, o_wanted)
    expected.check(lse, lse_wanted / LN2)


def test_prefill_refuses_with_a_reason():
    q, k, v = ragged_problem([3], [5])
    with pytest.raises(libmla.UnsupportedError, match="custom_mask.*libmla masks"):
        fi.single_prefill_with_kv_cache(q, k, v, custom_mask=torch.ones(3, 5).bool())
    with pytest.raises(libmla.UnsupportedError, match="ROPE_LLAMA|rotate"):
        fi.single_prefill_with_kv_cache(q, k, v, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(RuntimeError, match="before plan"):
        ragged().run(q, k, v)
    w = ragged()
    with pytest.raises(libmla.UnsupportedError, match="prefix_len_ptr"):
        w.plan(ints([0, 3]), ints([0, 5]), 4, 4, 192, 128, prefix_len_ptr=ints([1]))
    w.plan(ints([0, 3]), ints([0, 5]), 4, 4, 192, 128)
    with pytest.raises(ValueError, match="q: expected dtype torch.float16, as planned"):
        w.run(q, k, v)
    with pytest.raises(ValueError, match="v: expected 4 heads of 128"):
        w.run(q.half(), k.half(), k.half())


def merged(v, s):
    """Merges states [T, N, H, d], with lse in base 2, in float64."""
    s = s.double()
    total = torch.logsumexp(s * LN2, 1) / LN2
    weights = torch.exp2(s - total[:, None]).nan_to_num(0.0)
    return (weights[..., None] * v.double()).sum(1), total


def test_merging_states():
    v, s = torch.randn(5, 3, 4, 128).half(), torch.randn(5, 3, 4) * 3
    s[0], s[1, 0] = -math.inf, -math.inf
    v_wanted, s_wanted = merged(v, s)
    v_merged, s_merged = fi.merge_states(v, s)
    expected.check(v_merged, v_wanted)
    expected.check(s_merged, s_wanted)
    assert (v_merged[0] == 0).all() and (s_merged[0] == -math.inf).all()

    a, b = (v[:, 0].clone(), s[:, 0].clone()), (v[:, 1], s[:, 1])
    v_wanted, s_wanted = merged(v[:, :2], s[:, :2])
    v_merged, s_merged = fi.merge_state(*a, *b)
    expected.check(v_merged, v_wanted)
    expected.check(s_merged, s_wanted)
    assert torch.equal(a[0], v[:, 0]) and torch.equal(a[1], s[:, 0])

    mask = torch.tensor([False, True, False, True, True])
    fi.merge_state_in_place(*a, *b, mask=mask)
    expected.check(a[0][mask], v_wanted[mask])
    assert torch.equal(a[0][~mask], v[:, 0][~mask]) and torch.equal(a[1][~mask], s[:, 0][~mask])
    fi.merge_state_in_place(*a, *b, mask=~mask)
    expected.check(a[0], v_wanted)
    expected.check(a[1], s_wanted)
    with pytest.raises(TypeError, match="s: expected float32"):
        fi.merge_state_in_place(a[0], a[1].half(), *b)


def test_indices_and_lengths():
    positions = torch.full((12,), 9, dtype=torch.int32)
    request, position = fi.get_batch_indices_positions(ints([0, 1, 3, 3, 10]), ints([5, 5, 7, 7]), 12, None, positions)
    assert request.tolist() == [0, 1, 1, 3, 3, 3, 3, 3, 3, 3, -1, -1] and request.dtype == torch.int32
    assert position is positions and position.tolist() == [4, 3, 4, 0, 1, 2, 3, 4, 5, 6, 0, 0]
    assert fi.get_seq_lens(ints([0, 2, 2, 3]), ints([3, 0, 16]), 16).tolist() == [19, 0, 16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3])
def test_append(dtype):
    kv_len, new = [5, 20, 1], [3, 20, 0]
    batch = batches.paged(kv_len, 8)
    pages = batch.pages("csr")
    ckv_cache, kpe_cache = (torch.zeros(batch.num_pages, 8, width).to(dtype) for width in (512, 64))
    ckv, kpe = torch.randn(25, 512).to(dtype), torch.randn(25, 64).to(dtype)
    request, position = fi.get_batch_indices_positions(indptr(new), pages["kv_len"], 25)  # two of no request
    fi.append_paged_mla_kv_cache(
        ckv, kpe, request, position, ckv_cache, kpe_cache, pages["kv_indices"], pages["kv_indptr"], ints([5, 4, 1])
    )
    slots = batch.slots(0)[2:] + batch.slots(1)
    for cache, rows in ((ckv_cache, ckv), (kpe_cache, kpe)):
        untouched = torch.ones(batch.num_pages * 8).bool()
        untouched[slots] = False
        flat = cache.view(-1, rows.shape[1])
        assert torch.equal(flat[slots].float(), rows[:23].float())
        assert (flat[untouched].float() == 0).all()


def test_concatenated_keys():
    k_nope, k_rope = torch.randn(5, 3, 128).bfloat16(), torch.randn(5, 1, 64).bfloat16()
    k = torch.empty(5, 3, 200, dtype=torch.bfloat16)[..., :192]
    assert fi.concat_ops.concat_mla_k(k, k_nope, k_rope) is None
    assert torch.equal(k, torch.cat([k_nope, k_rope.expand(5, 3, 64)], -1))
    with pytest.raises(TypeError, match="k_rope"):
        fi.concat_ops.concat_mla_k(k, k_nope, k_rope.half())


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_rope_and_quantize(dtype, adjacent, is_neox):
    tokens, heads = 4, 3
    q_rope, k_rope = torch.randn(tokens, heads, 64).bfloat16(), torch.randn(tokens, 64).bfloat16()
    q_nope, k_nope = torch.randn(tokens, heads, 512).bfloat16(), torch.randn(tokens, 512).bfloat16()
    k_nope[0, 0] = 1e5
    angles = torch.rand(32, 32).double() * 6
    positions = torch.tensor([3, 0, 31, 3])
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float()
    outputs = {"quantize_dtype": dtype}
    if adjacent:
        both = torch.empty(tokens, heads, 576, dtype=dtype)
        outputs = {"q_nope_out": both[..., :512], "q_rope_out": both[..., 512:]}
    made = fi.rope.mla_rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin, positions, is_neox, quant_scale_q=0.5, quant_scale_kv=4.0, **outputs
    )

    def rotated(x):
        a = angles[positions].view(tokens, *[1] * (x.ndim - 2), 32)
        x = x.double()
        x, y = (x[..., :32], x[..., 32:]) if is_neox else (x[..., 0::2], x[..., 1::2])
        parts = [x * a.cos() - y * a.sin(), x * a.sin() + y * a.cos()]
        return torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)

    wanted = (rotated(q_rope) * 0.5, rotated(k_rope) * 4.0, q_nope.double() * 0.5, k_nope.double() * 4.0)
    limits = torch.finfo(dtype)
    for got, value in zip(made, wanted):
        assert got.dtype == dtype and got.shape == value.shape
        torch.testing.assert_close(got.double(), value.clamp(limits.min, limits.max), atol=2**-9, rtol=limits.eps / 2)
    assert torch.equal(made[2].float(), (q_nope.float() * 0.5).to(dtype).float())
    if adjacent:
        assert made[2] is outputs["q_nope_out"] and made[0] is outputs["q_rope_out"]
    else:
        assert all(tensor.is_contiguous() for tensor in made)
    with pytest.raises(ValueError, match="quantize_dtype"):
        fi.rope.mla_rope_quantize_fp8(q_rope, k_rope, q_nope, k_nope, cos_sin, positions, quantize_dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_top_k(dtype):
    scores = torch.randn(6, 300).to(dtype)
    values, indices = fi.top_k(scores, 40, sorted=True)
    assert indices.dtype == torch.int64 and values.dtype == dtype
    assert torch.equal(values, scores.topk(40).values) and torch.equal(scores.gather(1, indices), values)
    unsorted = fi.top_k(scores, 40)[1]
    assert torch.equal(unsorted.sort(1).values, indices.sort(1).values)
    with pytest.raises(ValueError, match="k from 1"):
        fi.top_k(scores, 301)


def test_ties():
    scores = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0]])
    assert fi.top_k(scores, 2, tie_break=fi.TopKTieBreak.SMALL)[1].tolist() == [[0, 1], [0, 1]]
    assert fi.top_k(scores, 2, tie_break=fi.TopKTieBreak.LARGE)[1].tolist() == [[1, 3], [3, 4]]
    lengths = ints([3, 1])
    rows = fi.top_k_ragged_transform(scores, ints([10, 20]), lengths, 2, tie_break=2)
    assert rows.tolist() == [[11, 12], [20, -1]]


def test_top_k_of_windows_in_pages():
    scores = torch.randn(3, 64)
    starts, lengths = ints([4, 30, 0]), ints([20, 34, 3])
    table = torch.randperm(200)[:80].view(2, 40).to(torch.int32)
    row_to_batch, entries = ints([1, 0, 1]), ints([2, 0, 7])
    raw = torch.empty(3, 5, dtype=torch.int32)
    out = fi.top_k_page_table_transform(
        scores,
        table,
        lengths,
        5,
        row_to_batch,
        row_starts=starts,
        page_table_row_starts=entries,
        page_size=4,
        out_raw_indices=raw,
    )
    shifted = fi.top_k_ragged_transform(scores, ints([100, 0, 50]), lengths, 5, row_starts=starts)
    for t in range(3):
        window = scores[t, starts[t] : starts[t] + lengths[t]]
        count = min(5, int(lengths[t]))
        chosen = window.topk(count).indices.sort().values.tolist()
        rest = [-1] * (5 - count)
        pages = [int(table[row_to_batch[t], entries[t] + i // 4]) * 4 + i % 4 for i in chosen]
        assert raw[t].tolist() == chosen + rest
        assert out[t].tolist() == pages + rest
        assert shifted[t].tolist() == [i + [100, 0, 50][t] for i in chosen] + rest
    flat = fi.top_k_page_table_transform(scores[:2], table, ints([40, 40]), 5)
    wanted = table.gather(1, scores[:2, :40].topk(5).indices)
    assert torch.equal(flat.sort(1).values, wanted.sort(1).values)
    with pytest.raises(ValueError, match="page_table_row_starts"):
        fi.top_k_page_table_transform(scores, table, lengths, 5, row_starts=starts, page_size=4)


def test_names_of_the_package():
    for module, names in {
        fi: "BatchMLAPagedAttentionWrapper BatchPrefillWithRaggedKVCacheWrapper TopKTieBreak append_paged_mla_kv_cache "
        "get_batch_indices_positions get_seq_lens merge_state merge_state_in_place merge_states "
        "single_prefill_with_kv_cache single_prefill_with_kv_cache_return_lse top_k top_k_page_table_transform "
        "top_k_ragged_transform",
        fi.mla: "BatchMLAPagedAttentionWrapper MLAPlanMetadata deepseek_mla_dimensions "
        "trtllm_batch_decode_with_kv_cache_mla trtllm_batch_decode_sparse_mla_dsv4 xqa_batch_decode_with_kv_cache_mla",
        fi.decode: "trtllm_batch_decode_with_kv_cache_mla xqa_batch_decode_with_kv_cache_mla",
        fi.concat_ops: "concat_mla_k",
        fi.rope: "mla_rope_quantize_fp8",
        fi.topk: "top_k topk TopKTieBreak",
        fi.prefill: "trtllm_prefill_with_kv_cache_mla",
    }.items():
        assert [name for name in names.split() if not hasattr(module, name)] == []
    run = inspect.signature(fi.BatchMLAPagedAttentionWrapper.run).parameters
    keyword_only = [name for name, p in run.items() if p.kind is p.KEYWORD_ONLY]
    assert list(run)[1:5] == ["q_nope", "q_pe", "ckv_cache", "kpe_cache"]
    assert {"query", "kv_cache", "ckv_scale", "ckv_scale_arr", "kpe_scale"} <= set(keyword_only)
    with pytest.raises(AttributeError, match="append_paged_kv_cache.*MLA part"):
        _ = fi.append_paged_kv_cache
