# SPDX-License-Identifier: Apache-2.0
"""Tests libmla.flash_mla against float64, and its conventions: names, shapes, lse, rows without keys."""

import inspect
import math
import os

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode

import libmla
from flash_mla_problems import (
    GARBAGE_PAGE,
    dense_problem,
    indptr,
    packed_cache,
    randn,
    random_indices,
    sparse_fwd_call,
)
from flash_mla_reference import Expected, attend, beside, check, stack
from libmla import flash_mla
from libmla.flash_mla import flash_mla_interface
from processes import python_with_torch

INF = math.inf


def spread(tensor):
    """Returns the same values with gaps between the rows of every dimension."""
    big = torch.full([n + 1 for n in tensor.shape[:-1]] + [tensor.shape[-1] + 64], 7, dtype=tensor.dtype)
    view = big[tuple(slice(0, n) for n in tensor.shape)]
    view.copy_(tensor)
    return view


# Signatures: (name, default) of every argument, as in the peer.
REQUIRED = inspect.Parameter.empty
TAIL = [("dropout_p", 0.0), ("softmax_scale", None), ("causal", False), ("deterministic", False), ("is_varlen", True)]
SIGNATURES = {
    "flash_mla_with_kvcache": [
        *((n, REQUIRED) for n in ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v")),
        ("tile_scheduler_metadata", REQUIRED),
        ("num_splits", None),
        ("softmax_scale", None),
        ("causal", False),
        ("is_fp8_kvcache", False),
        *((n, None) for n in ("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache")),
        *((n, None) for n in ("topk_length", "extra_topk_length", "out")),
        ("enable_batch_invariant", False),
    ],
    "flash_mla_sparse_fwd": [
        *((n, REQUIRED) for n in ("q", "kv", "indices", "sm_scale")),
        *(("d_v", 512), ("attn_sink", None), ("topk_length", None), ("out", None)),
    ],
    "flash_attn_varlen_func": [
        *((n, REQUIRED) for n in ("q", "k", "v", "cu_seqlens_qo", "cu_seqlens_kv", "max_seqlen_qo", "max_seqlen_kv")),
        *TAIL,
    ],
    "flash_attn_varlen_qkvpacked_func": [
        *((n, REQUIRED) for n in ("qkv", "cu_seqlens", "max_seqlen", "head_dim_qk")),
        *TAIL,
    ],
    "flash_attn_varlen_kvpacked_func": [
        *((n, REQUIRED) for n in ("q", "kv", "cu_seqlens_qo", "cu_seqlens_kv", "max_seqlen_qo", "max_seqlen_kv")),
        ("head_dim_qk", REQUIRED),
        *TAIL,
    ],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(flash_mla, name)).parameters.values()
    positional = [(p.name, p.default) for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert positional == SIGNATURES[name]
    assert getattr(flash_mla_interface, name) is getattr(flash_mla, name)


def test_get_mla_metadata_takes_any_arguments():
    meta, nothing = flash_mla.get_mla_metadata(torch.zeros(2), 128, 1, num_heads_q=128)
    assert isinstance(meta, flash_mla_interface.FlashMLASchedMeta) and nothing is None
    assert not meta.have_initialized and meta.config is None and meta.tile_scheduler_metadata is None
    assert flash_mla.get_mla_metadata()[0] is not meta


# Dense decode


def dense_expected(q, cache, table, lens, d_v, scale, causal, sink=None):
    s_q, h_q, d_qk = q.shape[1:]
    group = h_q // cache.shape[2]
    requests = []
    for i, length in enumerate(lens.tolist()):
        used = math.ceil(length / cache.shape[1])
        rows = cache[table[i, :used].long()].reshape(-1, cache.shape[2], d_qk)[:length]
        visible = torch.ones(s_q, length, dtype=torch.bool)
        if causal:
            visible = visible.tril(length - s_q)
        groups = []
        for g in range(cache.shape[2]):
            heads, k = slice(g * group, (g + 1) * group), rows[:, g]
            groups.append(attend(q[i][:, heads], k, k[:, :d_v], scale, visible, None if sink is None else sink[heads]))
        requests.append(beside(groups))
    expected = stack(requests)
    expected.lse = expected.lse.transpose(1, 2)
    return expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lens", "s_q", "h_q", "h_k", "page_size", "d_qk", "dtype"),
    [
        ([20, 140, 0, 64], 1, 16, 1, 64, 576, torch.bfloat16),
        ([3, 0, 129], 4, 9, 3, 64, 576, torch.bfloat16),
        ([65, 700], 2, 63, 1, 64, 576, torch.float16),
        ([33, 100], 2, 5, 1, 7, 512, torch.bfloat16),
        ([40], 3, 4, 2, 1, 576, torch.float16),
    ],
)
def test_dense_decode(lens, s_q, h_q, h_k, page_size, d_qk, dtype, causal):
    q, cache, table, seqlens = dense_problem(lens, s_q, h_q, h_k, page_size, d_qk, dtype)
    meta, splits = flash_mla.get_mla_metadata()
    arguments = (cache, table, seqlens, 512, meta, splits)
    out, lse = flash_mla.flash_mla_with_kvcache(q, *arguments, causal=causal)
    assert out.shape == (len(lens), s_q, h_q, 512) and out.dtype == dtype and out.is_contiguous()
    assert lse.shape == (len(lens), h_q, s_q) and lse.is_contiguous()
    check(out, lse, dense_expected(q, cache, table, seqlens, 512, d_qk**-0.5, causal))
    assert meta.have_initialized and meta.num_splits.shape == (1,)
    assert isinstance(meta.tile_scheduler_metadata, torch.Tensor)
    plan = meta.plan
    again = flash_mla.flash_mla_with_kvcache(spread(q), *arguments, causal=causal)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    assert meta.plan is plan


def test_dense_decode_takes_a_scale_and_a_sink():
    q, cache, table, seqlens = dense_problem([100, 0], 2, 4, 1, 16, 576)
    sink = torch.tensor([0.5, INF, -INF, 3.0])
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, table, seqlens, 512, None, softmax_scale=0.02, causal=True, attn_sink=sink
    )
    check(out, lse, dense_expected(q, cache, table, seqlens, 512, 0.02, True, sink))
    assert torch.all(out[:, :, 1] == 0)


# Packed caches: random bytes, and what they mean


def named_by(indices, length, slots):
    """Returns [n]: the valid slots that one query names, as rows to gather, each as often as it is named."""
    indices = indices if length is None else indices[:length]
    return indices[(indices >= 0) & (indices < slots)].long()


def sparse_expected(q, pools, scale, sink=None):
    """Computes sparse attention over pools.

    Each pool is (rows [slots, d_qk], indices [b, s_q, topk], lengths [b], [b, s_q] or None).
    """
    b, s_q = q.shape[:2]
    queries = []
    for i in range(b):
        for j in range(s_q):
            lengths = [None if n is None else n[i] if n.dim() == 1 else n[i, j] for _, _, n in pools]
            parts = [r[named_by(x[i, j], n, len(r))] for (r, x, _), n in zip(pools, lengths, strict=True)]
            keys = torch.cat(parts)
            queries.append(attend(q[i, j][None], keys, keys[:, :512], scale, sink=sink))
    expected = stack(queries)
    for field in ("out", "lse", "magnitude"):
        value = getattr(expected, field)
        setattr(expected, field, value.reshape(b, s_q, *value.shape[2:]))
    expected.lse = expected.lse.transpose(1, 2)
    return expected


@pytest.mark.parametrize("byte_type", [torch.float8_e4m3fn, torch.uint8, torch.int8])
@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_dsv4"])
def test_sparse_decode(layout, byte_type):
    b, s_q, h_q, page_size = 3, 2, 12, 61
    cache, rows = packed_cache(layout, 4, page_size)
    q = randn(b, s_q, h_q, rows.shape[1], seed=6)
    indices = random_indices(b, s_q, 96, len(rows), seed=7)
    indices[1, 0] = -1
    indices[2, 1, :2] = torch.tensor([len(rows), 2147483647])
    meta, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        spread(q), cache.view(byte_type), None, None, 512, meta, None, 0.03, False, True, spread(indices)
    )
    assert out.shape == (b, s_q, h_q, 512) and out.dtype == torch.bfloat16
    assert lse.shape == (b, h_q, s_q) and lse.transpose(1, 2).is_contiguous()
    check(out, lse, sparse_expected(q, [(rows, indices, None)], 0.03))
    assert torch.all(lse[1, :, 0] == INF) and torch.all(out[1, 0] == 0)


@pytest.mark.parametrize("extra_length", [None, [0, 40, 7]])
@pytest.mark.parametrize("length", [None, [64, 0, 5]])
@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_dsv4"])
def test_sparse_decode_in_two_pools(layout, length, extra_length):
    b, s_q, h_q = 3, 2, 8
    cache, rows = packed_cache(layout, 5, 64)
    extra_cache, extra_rows = packed_cache(layout, 40, 2, seed=8)
    q = randn(b, s_q, h_q, rows.shape[1], seed=9)
    indices = random_indices(b, s_q, 64, len(rows), seed=10)
    extra_indices = random_indices(b, s_q, 40, len(extra_rows), seed=11)
    sink = torch.tensor([0.0, -3.0, INF, -INF, 5.0, 0.1, 1.0, 2.0])
    length, extra_length = (None if n is None else torch.tensor(n, dtype=torch.int32) for n in (length, extra_length))
    scale = rows.shape[1] ** -0.55
    out, lse = flash_mla.flash_mla_with_kvcache(
        *(q, cache, None, None, 512, flash_mla.get_mla_metadata()[0], None, scale, False, True, indices, sink),
        *(extra_cache, extra_indices, length, extra_length),
    )
    pools = [(rows, indices, length), (extra_rows, extra_indices, extra_length)]
    check(out, lse, sparse_expected(q, pools, scale, sink))
    assert torch.all(out[:, :, 2] == 0) and torch.all(lse[0] < INF)


def named_cache(layout, num_pages, page_size):
    """Returns (a cache of the bytes that libmla writes, [num_pages, page_size, 1, width], the bf16 rows it means)."""
    count = num_pages * page_size
    page = libmla.page_bytes(layout, 512, page_size)
    storage = torch.full((num_pages, page), 0xFF, dtype=torch.uint8)
    if layout == "fp8_nope":
        cache = libmla.KvCache(layout, kv=storage.view(num_pages, page_size, -1))
    else:
        cache = libmla.KvCache(layout, kv=storage, page_size=page_size)
    libmla.append(randn(count, 512, seed=40), torch.arange(count), cache)
    ends, table = torch.tensor([0, count], dtype=torch.int32), torch.arange(num_pages, dtype=torch.int32)[None]
    rows = libmla.gather(cache, kv_len=ends[1:], out_indptr=ends, block_table=table)
    return storage.view(num_pages, page_size, 1, page // page_size), rows


@pytest.mark.parametrize(
    ("kv_format", "layout", "extra_layout"),
    [("V32_NO_ROPE", "fp8_nope", "fp8_nope"), ("V41", "fp8_dsv41", "fp8_dsv41"), ("V41", "fp8_dsv41", "fp4_dsv41")],
)
def test_sparse_decode_of_named_rows(kv_format, layout, extra_layout):
    """Rows of 528 bytes are of two kinds, so they have to be named."""
    cache, rows = named_cache(layout, 3, 64)
    extra_cache, extra_rows = named_cache(extra_layout, 2, 32)
    q = randn(2, 1, 5, 512, seed=41)
    indices, extra_indices = random_indices(2, 1, 40, 192, seed=42), random_indices(2, 1, 30, 64, seed=43)
    call = {"is_fp8_kvcache": True, "indices": indices, "extra_k_cache": extra_cache}
    call |= {"extra_indices_in_kvcache": extra_indices, "softmax_scale": 0.05}
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, None, kv_format=kv_format, **call)
    check(out, lse, sparse_expected(q, [(rows, indices, None), (extra_rows, extra_indices, None)], 0.05))
    with pytest.raises(
        ValueError, match="k_cache: .* got 528, which would be .*: these have to be named, by kv_format"
    ):
        flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, None, **call)


@pytest.mark.parametrize(("layout", "kv_format"), [("fp8_ds_mla", "V32"), ("fp8_dsv4", "V4")])
def test_naming_what_the_width_says_changes_nothing(layout, kv_format):
    cache, rows = packed_cache(layout, 2, 64)
    q, indices = randn(2, 1, 4, rows.shape[1]), random_indices(2, 1, 32, 128, seed=1)
    named, unnamed = (
        flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, None, is_fp8_kvcache=True, indices=indices, kv_format=name
        )
        for name in (kv_format, None)
    )
    assert torch.equal(named[0], unnamed[0]) and torch.equal(named[1], unnamed[1])


@pytest.mark.parametrize("s_q", [1, 2])
def test_decode_into_an_output(s_q):
    """The caller's tensor, with gaps around its heads."""
    q, cache, table, seqlens = dense_problem([50, 9], s_q, 6, 2, 16, 576)
    expected, _ = flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, None)
    around = torch.full((2, s_q, 8, 520), 7.0, dtype=torch.bfloat16)
    out, _ = flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, None, out=around[:, :, 1:7, :512])
    assert torch.equal(out, expected) and torch.equal(around[:, :, 1:7, :512], expected)
    around[:, :, 1:7, :512] = 7.0
    assert torch.all(around == 7.0)


def test_sparse_prefill_into_an_output():
    expected, given = sparse_fwd_call()[0], torch.zeros(5, 4, 512, dtype=torch.bfloat16)
    out = sparse_fwd_call(out=given)[0]
    assert out is given and torch.equal(given, expected) and given.any()


def test_batch_invariant_decode():
    """A request alone and among others gives the same bits; calls that share a plan agree about it."""
    q, cache, table, seqlens = dense_problem([700, 9, 300], 1, 6, 1, 16, 576)
    meta, _ = flash_mla.get_mla_metadata()
    whole, _ = flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta, enable_batch_invariant=True)
    for i in range(3):
        alone, _ = flash_mla.flash_mla_with_kvcache(
            q[i : i + 1], cache, table[i : i + 1], seqlens[i : i + 1], 512, None, enable_batch_invariant=True
        )
        assert torch.equal(alone[0], whole[i])
    with pytest.raises(ValueError, match="planned for enable_batch_invariant True, used with False"):
        flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta)


def test_sparse_decode_without_keys_and_with_a_sink():
    cache, _ = packed_cache("fp8_dsv4", 1, 64)
    q = randn(2, 1, 3, 512, seed=12)
    indices = torch.full((2, 1, 8), -1, dtype=torch.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, None, is_fp8_kvcache=True, indices=indices, attn_sink=torch.tensor([-INF, 0.0, INF])
    )
    assert torch.all(out == 0) and torch.all(lse == INF)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sparse_decode_of_an_unquantized_cache(dtype):
    cache = randn(6, 16, 1, 576, seed=13, dtype=dtype)
    q = randn(2, 2, 20, 576, seed=14, dtype=dtype)
    indices = random_indices(2, 2, 50, 96, seed=15)
    lengths = torch.tensor([[50, 3], [0, 20]], dtype=torch.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, None, indices=indices, topk_length=lengths)
    assert out.dtype == dtype
    check(out, lse, sparse_expected(q, [(cache.view(-1, 576), indices, lengths)], 1 / 24))


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_dsv4"])
def test_dense_decode_of_a_packed_cache(layout):
    cache, rows = packed_cache(layout, 6, 32)
    d_qk = rows.shape[1]
    q = randn(2, 2, 7, d_qk, seed=16)
    table = torch.tensor([[4, 0, 2], [1, GARBAGE_PAGE, GARBAGE_PAGE]], dtype=torch.int32)
    seqlens = torch.tensor([70, 31], dtype=torch.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, None, causal=True, is_fp8_kvcache=True)
    expected = dense_expected(q, rows.view(6, 32, 1, d_qk), table, seqlens, 512, d_qk**-0.5, True)
    check(out, lse, expected)


def test_decode_of_one_scale_and_e4m3_queries():
    q, cache, table, seqlens = dense_problem([50, 9], 1, 6, 1, 16, 576, torch.float32)
    q8, cache8 = q.to(torch.float8_e4m3fn), cache.to(torch.float8_e4m3fn)
    descale_q, descale_k = torch.tensor([0.5]), torch.tensor([0.25])
    out, lse = flash_mla.flash_mla_with_kvcache(
        q8, cache8, table, seqlens, 512, None, is_fp8_kvcache=True, descale_q=descale_q, descale_k=descale_k
    )
    assert out.dtype == torch.bfloat16
    expected = dense_expected(q8.float() * 0.5, cache8.float() * 0.25, table, seqlens, 512, 1 / 24, False)
    check(out, lse, expected)


def test_metadata_of_another_shape_is_refused():
    q, cache, table, seqlens = dense_problem([50, 9], 1, 6, 1, 16, 576)
    meta, _ = flash_mla.get_mla_metadata()
    flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta)
    with pytest.raises(ValueError, match="planned for h_q 6, used with 3"):
        flash_mla.flash_mla_with_kvcache(q[:, :, :3], cache, table, seqlens, 512, meta)
    with pytest.raises(ValueError, match="planned for causal False, used with True"):
        flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta, causal=True)


@pytest.mark.skipif("MLA_EMULATE" in os.environ, reason="lengths in a GPU's memory are not checked")
def test_metadata_of_other_lengths_is_refused_until_it_is_cleared():
    q, cache, table, seqlens = dense_problem([50, 9], 1, 6, 1, 16, 576)
    meta, _ = flash_mla.get_mla_metadata()
    flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta)
    seqlens[0] = 40
    with pytest.raises(ValueError, match="cache_seqlens: expected 50 as planned, got 40"):
        flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta)
    for clear in ({"tile_scheduler_metadata": None, "num_splits": None}, {"have_initialized": False}):
        for field, value in clear.items():
            setattr(meta, field, value)
        out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta)
        check(out, lse, dense_expected(q, cache, table, seqlens, 512, 1 / 24, False))
        seqlens[0] += 1


# Sparse prefill


@pytest.mark.parametrize(("d_qk", "h_q", "h_kv"), [(576, 12, 1), (512, 6, 2)])
def test_sparse_prefill(d_qk, h_q, h_kv):
    s_q, s_kv, topk = 9, 95, 128
    q, kv = randn(s_q, h_q, d_qk, seed=17), randn(s_kv, h_kv, d_qk, seed=18)
    indices = torch.randint(-20, s_kv + 20, (s_q, h_kv, topk), generator=torch.Generator().manual_seed(19))
    indices = indices.to(torch.int32)
    indices[3] = torch.tensor([-2147483648, 2147483647]).repeat(topk // 2)
    lengths = torch.tensor([topk, 1, 60, topk, 0, 30, 5, 100, topk], dtype=torch.int32)
    sink = torch.linspace(-2, 2, h_q)
    sink[1] = -INF
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        spread(q), spread(kv), spread(indices), 0.1, attn_sink=sink, topk_length=lengths
    )
    assert out.shape == (s_q, h_q, 512) and out.dtype == torch.bfloat16
    assert max_logits.shape == lse.shape == (s_q, h_q) and max_logits.dtype == torch.float32
    group = h_q // h_kv
    for g in range(h_kv):
        heads = slice(g * group, (g + 1) * group)
        expected = []
        for t in range(s_q):
            keys = kv[named_by(indices[t, g], int(lengths[t]), s_kv), g]
            expected.append(attend(q[t, heads][None], keys, keys[:, :512], 0.1, sink=sink[heads]))
        expected = stack(expected)
        check(out[:, heads], lse[:, heads], Expected(*(getattr(expected, f)[:, 0] for f in vars(expected))))
        torch.testing.assert_close(max_logits[:, heads].double(), expected.max_logits[:, 0], atol=2e-4, rtol=2e-4)
    for t in (3, 4):
        assert torch.all(out[t] == 0) and torch.all(lse[t] == INF) and torch.all(max_logits[t] == -INF)


# Ragged prefill


def ragged_expected(q, k, v, q_lens, kv_lens, scale, causal):
    group = q.shape[1] // k.shape[1]
    pieces = []
    for q_one, k_one, v_one in zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), strict=True):
        visible = torch.ones(len(q_one), len(k_one), dtype=torch.bool)
        visible = visible.tril(len(k_one) - len(q_one)) if causal else visible
        groups = []
        for g in range(k.shape[1]):
            heads = slice(g * group, (g + 1) * group)
            groups.append(attend(q_one[:, heads], k_one[:, g], v_one[:, g], scale, visible, empty_lse=-INF))
        pieces.append(beside(groups))
    return Expected(*(torch.cat([getattr(e, f) for e in pieces]) for f in vars(pieces[0])))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("h_q", "h_kv", "d_qk", "dtype"),
    [(4, 4, 192, torch.bfloat16), (6, 2, 192, torch.bfloat16), (3, 3, 128, torch.float16), (4, 1, 128, torch.bfloat16)],
)
def test_ragged_prefill(h_q, h_kv, d_qk, dtype, causal):
    q_lens, kv_lens = [5, 70, 0, 8], [5, 130, 3, 0 if not causal else 4]
    q = randn(sum(q_lens), h_q, d_qk, seed=20, dtype=dtype)
    kv = randn(sum(kv_lens), h_kv, d_qk + 128, seed=21, dtype=dtype)
    k, v = kv[..., :d_qk], kv[..., d_qk:]
    lens = (indptr(q_lens), indptr(kv_lens), max(q_lens), max(kv_lens))
    out, lse = flash_mla.flash_attn_varlen_func(spread(q), k, v, *lens, causal=causal)
    assert out.shape == (len(q), h_q, 128) and out.dtype == dtype
    assert lse.shape == (len(q), h_q) and lse.T.is_contiguous()
    check(out, lse, ragged_expected(q, k, v, q_lens, kv_lens, d_qk**-0.5, causal))
    packed = flash_mla.flash_attn_varlen_kvpacked_func(q, kv, *lens, d_qk, causal=causal)
    assert torch.equal(packed[0], out) and torch.equal(packed[1], lse)


def test_ragged_prefill_of_packed_qkv():
    lens = [17, 40]
    qkv = randn(sum(lens), 3, 192 + 192 + 128, seed=22)
    q, k, v = qkv.split([192, 192, 128], -1)
    out, lse = flash_mla.flash_attn_varlen_qkvpacked_func(
        qkv, indptr(lens), 40, 192, softmax_scale=0.1, causal=True, deterministic=True, is_varlen=False
    )
    check(out, lse, ragged_expected(q, k, v, lens, lens, 0.1, True))


def test_gradients_are_refused_when_they_are_asked_for():
    q, k, v = randn(5, 2, 192, seed=23), randn(5, 2, 192, seed=24), randn(5, 2, 128, seed=25)
    plain = flash_mla.flash_attn_varlen_func(q, k, v, indptr([5]), indptr([5]), 5, 5)
    with torch.enable_grad():
        out, lse = flash_mla.flash_attn_varlen_func(q.requires_grad_(), k, v, indptr([5]), indptr([5]), 5, 5)
        total = out.sum()
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
    with pytest.raises(NotImplementedError, match="for inference: it has no backward pass"):
        total.backward()


class NotedTorchCalls(TorchDispatchMode):
    """Notes what torch computes: its calls but for those that make views and new tensors, which launch no kernel."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_is_left_to_torch():
    q, cache, table, seqlens = dense_problem([50, 0], 1, 6, 1, 16, 576)
    packed, rows = packed_cache("fp8_ds_mla", 2, 64)
    rows = rows[:, None]
    indices = random_indices(2, 1, 32, len(rows), seed=1)
    indices[1] = -1
    meta, sparse_meta = (flash_mla.get_mla_metadata()[0] for _ in range(2))
    calls = [
        lambda: flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta),
        lambda: flash_mla.flash_mla_with_kvcache(
            q, packed, None, None, 512, sparse_meta, is_fp8_kvcache=True, indices=indices
        ),
        lambda: flash_mla.flash_mla_sparse_fwd(q[:, 0], rows, indices, 0.1),
    ]
    for call in calls:
        wanted = call()  # which plans
        with NotedTorchCalls() as noted:
            given = call()
            meta.have_initialized = sparse_meta.have_initialized = False
            call()  # which plans again
        assert noted.names == []
        assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))
        assert torch.all(given[-1][1] == INF) and torch.all(given[-1][0] < INF)


def test_on_an_emulated_gpu(emulated_sm90: str):
    """Host memory stands for that of an sm90, where planning, splitting and merging work as on the GPU."""
    program = """
import torch
from libmla import flash_mla
q = torch.randn(2, 2, 16, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
cache = torch.randn(6, 64, 1, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
table = torch.tensor([[3, 1, 5], [0, 2147480000, 2147480000]], dtype=torch.int32)
lens = torch.tensor([150, 0], dtype=torch.int32)
meta, _ = flash_mla.get_mla_metadata()
for _ in range(2):
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, lens, 512, meta, causal=True)
keys = cache[table[0].long()].reshape(-1, 576)[:150].double()
scores = torch.einsum("qhd,kd->qhk", q[0].double(), keys) / 24
scores[0, :, 149:] = -torch.inf
error = (out[0].double() - scores.softmax(-1) @ keys[:, :512]).abs().max().item()
assert error < 0.02, error
assert (lse[0].T - scores.logsumexp(-1)).abs().max() < 1e-3
assert torch.all(out[1] == 0) and torch.all(lse[1] == torch.inf)
assert meta.plan.backend.startswith("cuda"), meta.plan.backend
"""
    done = python_with_torch("-c", program, MLA_EMULATE=emulated_sm90.removeprefix("emulated:"))
    assert done.returncode == 0, done.stderr
