# SPDX-License-Identifier: Apache-2.0
"""Tests prefill against float64."""

from __future__ import annotations

import math

import pytest
import torch

import batches
import expected
import libmla

SM_SCALE = 192**-0.5


def right(q, k, v, qo, kv, *, causal=True, window_left=-1, slopes=None, sink=None, soft_cap=0.0):
    """Computes o and lse; qo and kv are the first query and key of each request, and the ends."""
    o = torch.zeros(*q.shape[:2], v.shape[-1]).double()
    lse = torch.full(q.shape[:2], -math.inf).double()
    for b in range(len(qo) - 1):
        keys, values = k[kv[b] : kv[b + 1]].transpose(0, 1), v[kv[b] : kv[b + 1]].transpose(0, 1)
        at = torch.arange(keys.shape[1])
        for i, t in enumerate(range(qo[b], qo[b + 1])):
            position = keys.shape[1] - (qo[b + 1] - qo[b]) + i
            visible = at <= position if causal else torch.ones(len(at)).bool()
            if window_left >= 0:
                visible &= at >= position - window_left
            bias = None if slopes is None else slopes[:, None] * (at - position)[None, :]
            o[t], lse[t] = expected.attend(
                q[t], keys, values, visible, SM_SCALE, sink=sink, soft_cap=soft_cap, bias=bias
            )
    return o, lse


def problem(dtype=torch.bfloat16, qo_len=(3, 0, 17, 1), kv_len=(3, 9, 40, 0), heads=3, d_qk=192, d_v=128):
    qo, kv = batches.indptr(qo_len), batches.indptr(kv_len)
    q = torch.randn(sum(qo_len), heads, d_qk).to(dtype)
    k, v = (torch.randn(sum(kv_len), heads, width).to(dtype) for width in (d_qk, d_v))
    return q, k, v, {"qo_indptr": qo, "kv_indptr": kv}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ragged_batches(dtype, causal):
    q, k, v, ranges = problem(dtype)
    o, lse = libmla.prefill(q, k, v, **ranges, causal=causal, sm_scale=SM_SCALE, return_lse=True)
    wanted = right(q, k, v, *(part.tolist() for part in ranges.values()), causal=causal)
    assert o.dtype == dtype
    expected.check(o, wanted[0])
    expected.check(lse, wanted[1])


@pytest.mark.parametrize(("d_qk", "d_v"), [(128, 128), (192, 192), (40, 24)])
def test_widths(d_qk, d_v):
    q, k, v, ranges = problem(d_qk=d_qk, d_v=d_v)
    o = libmla.prefill(q, k, v, **ranges, sm_scale=SM_SCALE)
    expected.check(o, right(q, k, v, *(part.tolist() for part in ranges.values()))[0])


def test_options():
    q, k, v, ranges = problem()
    sink = torch.tensor([-math.inf, 0.0, 2.0])
    slopes = torch.tensor([0.01, 0.1, 0.3])
    for given, wanted in (
        ({"attn_sink": sink}, {"sink": sink}),
        ({"window_left": 4}, {"window_left": 4}),
        ({"logits_soft_cap": 1.5}, {"soft_cap": 1.5}),
        ({"alibi_slopes": slopes}, {"slopes": slopes}),
    ):
        o, lse = libmla.prefill(q, k, v, **ranges, sm_scale=SM_SCALE, return_lse=True, **given)
        result = right(q, k, v, *(part.tolist() for part in ranges.values()), **wanted)
        expected.check(o, result[0])
        expected.check(lse, result[1])


E4M3_SCALES = {"q_scale": 0.07, "k_scale": 0.05, "v_scale": 0.11}


def e4m3_problem():
    """Returns q, k and v of e4m3, their values in float64, and the other arguments."""
    *given, ranges = problem(torch.float32)
    scales = {name: torch.tensor([scale]) for name, scale in E4M3_SCALES.items()}
    stored = [(x / scale).to(torch.float8_e4m3fn) for x, scale in zip(given, scales.values(), strict=True)]
    values = [x.double() * scale for x, scale in zip(stored, scales.values(), strict=True)]
    return stored, values, {**ranges, **scales, "sm_scale": SM_SCALE}


def test_e4m3_tensors():
    stored, values, given = e4m3_problem()
    wanted = right(*values, given["qo_indptr"].tolist(), given["kv_indptr"].tolist())
    o, lse = libmla.prefill(*stored, **given, return_lse=True)
    assert o.dtype == torch.bfloat16
    expected.check(o, wanted[0])
    expected.check(lse, wanted[1])
    in_bytes = libmla.prefill(*(x.view(torch.uint8) for x in stored), **given)
    assert torch.equal(in_bytes, o)
    o_scale = torch.tensor([0.01])
    narrow = libmla.prefill(*stored, **given, out_dtype="e4m3", o_scale=o_scale)
    assert narrow.dtype == torch.float8_e4m3fn
    expected.check(narrow.double() * o_scale, wanted[0], 2**-4)


def test_e4m3_products():
    stored, values, given = e4m3_problem()
    wanted = right(*values, given["qo_indptr"].tolist(), given["kv_indptr"].tolist())
    context = libmla.Context(backend="reference")
    o, lse = libmla.prefill(*stored, **given, compute="fp8", out_dtype="f32", return_lse=True, context=context)
    expected.check(lse, wanted[1], 1e-5)  # sums are unrounded
    expected.check(o, wanted[0], 2**-4)
    exact = libmla.prefill(*stored, **given, out_dtype="f32", context=context)
    expected.check(exact, wanted[0], 1e-5)
    assert not torch.equal(o, exact)


def test_e4m3_and_other_types_do_not_mix():
    (q, k, v), _, given = e4m3_problem()
    with pytest.raises(ValueError, match="prefill: v: expected e4m3, got bf16"):
        libmla.prefill(q, k, v.bfloat16(), **given)
    with pytest.raises(ValueError, match="prefill: k_scale: expected a tensor, since k is e4m3, got none"):
        libmla.prefill(q, k, v, **{**given, "k_scale": None})
    q, k, v, ranges = problem()
    with pytest.raises(ValueError, match="prefill: compute: expected default, since keys are bf16, not e4m3, got fp8"):
        libmla.prefill(q, k, v, **ranges, sm_scale=SM_SCALE, compute="fp8")


def test_outputs_of_the_caller():
    q, k, v, ranges = problem()
    wanted, wanted_lse = libmla.prefill(q, k, v, **ranges, sm_scale=SM_SCALE, return_lse=True)
    out, lse = torch.empty(21, 3, 128).bfloat16(), torch.empty(21, 3)
    given = libmla.prefill(q, k, v, **ranges, sm_scale=SM_SCALE, out=out, lse=lse)
    assert given[0] is out and given[1] is lse
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    one, other = libmla.prefill(q, k, v, **ranges, sm_scale=SM_SCALE, lse=lse)
    assert other is lse and torch.equal(one, wanted)
    one, other = libmla.prefill(q, k, v, **ranges, sm_scale=SM_SCALE, out=out, return_lse=True)
    assert one is out and torch.equal(other, wanted_lse)
    exact = libmla.prefill(q, k, v, **ranges, sm_scale=SM_SCALE, out_dtype="f32")
    assert exact.dtype == torch.float32
    expected.check(exact, wanted.double(), 1e-2)


def test_a_chunk_of_context_and_the_new_tokens():
    q, k, v, _ = problem(qo_len=(6,), kv_len=(30,))
    whole = libmla.prefill(
        q, k, v, qo_indptr=batches.indptr([6]), kv_indptr=batches.indptr([30]), sm_scale=SM_SCALE, return_lse=True
    )
    parts = [
        libmla.prefill(
            q,
            k[rows],
            v[rows],
            qo_indptr=batches.indptr([6]),
            kv_indptr=batches.indptr([rows.stop - rows.start]),
            causal=causal,
            sm_scale=SM_SCALE,
            out_dtype="f32",
            return_lse=True,
        )
        for rows, causal in ((slice(0, 24), False), (slice(24, 30), True))
    ]
    o, lse = libmla.merge_states(*(torch.stack(states) for states in zip(*parts, strict=True)))
    expected.check(o, whole[0].double(), 1e-2)
    expected.check(lse, whole[1].double())
