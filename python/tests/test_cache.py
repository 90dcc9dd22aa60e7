# SPDX-License-Identifier: Apache-2.0
"""Tests merge_states, the writers, gather and copy_pages against float64."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

import batches
import expected
import libmla
from batches import ints
from libmla.types import CacheFormat


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("base", ["e", "2"])
def test_merge_states(dtype, base):
    states = torch.randn(3, 5, 2, 24).to(dtype)
    lse = torch.randn(3, 5, 2) * 3
    lse[:, 1] = -math.inf
    lse[0, 2] = -math.inf
    natural = lse.double() * (math.log(2) if base == "2" else 1)
    together = torch.logsumexp(natural, 0)
    weights = torch.exp(natural - together).nan_to_num(0)
    wanted = (weights[..., None] * states.double()).sum(0)
    o, merged = libmla.merge_states(states, lse, lse_base=base)
    expected.check(o, wanted)
    expected.check(merged, together / (math.log(2) if base == "2" else 1))
    assert o.dtype == dtype and (o[1] == 0).all()
    o32, _ = libmla.merge_states(states, lse, lse_base=base, out_dtype="f32")
    expected.check(o32, wanted)
    # One state that lies in the outputs already.
    out, out_lse = states[0].clone(), lse[0].clone()
    given = libmla.merge_states(states[1:], lse[1:], lse_base=base, out=out, lse=out_lse, in_place=True)
    assert given[0] is out and given[1] is out_lse
    expected.check(out, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("split", [False, True])
def test_append_and_gather(dtype, split):
    batch = batches.paged([7, 0, 33], 8)
    rows = torch.randn(40, 576).to(dtype)
    slots = torch.tensor(batch.all_slots())
    cache = torch.zeros(batch.num_pages, 8, 576).bfloat16()
    target = (cache[..., :512], cache[..., 512:]) if split else cache
    libmla.append((rows[:, :512], rows[:, 512:]) if split else rows, slots, target)
    assert torch.equal(cache.view(-1, 576)[slots], rows.bfloat16())
    libmla.append(rows[:2] + 1, torch.tensor([-1, -7]), target)
    assert torch.equal(cache.view(-1, 576)[slots], rows.bfloat16())
    back = libmla.gather(target, **batch.pages(), out_indptr=batches.indptr([7, 0, 33]))
    assert torch.equal(back, rows.bfloat16())


def test_gather_ranges():
    batch = batches.paged([7, 20, 33], 8)
    cache = batches.random_cache(batch)
    flat = cache.view(-1, 576)
    ranges = {"token_start": ints([2, 0, 30]), "out_indptr": batches.indptr([4, 0, 3])}
    wanted = torch.cat([flat[batch.slots(0)[2:6]], flat[batch.slots(2)[30:33]]])
    assert torch.equal(libmla.gather(cache, **batch.pages("csr"), **ranges), wanted)
    assert torch.equal(libmla.gather(cache, **batch.pages(), **ranges, num_rows=7, out_dtype="f32"), wanted.float())
    out = torch.zeros(7, 576).half()
    assert libmla.gather(cache, **batch.pages(), **ranges, out=out) is out
    assert torch.equal(out, wanted.half())
    parts = (torch.empty(7, 512).bfloat16(), torch.empty(7, 64).bfloat16())
    assert libmla.gather(cache, **batch.pages(), **ranges, out=parts) is parts
    assert torch.equal(torch.cat(parts, -1), wanted)


@pytest.mark.parametrize("format", [name for name in get_args(CacheFormat) if name not in ("bf16", "f16")])
def test_quantized_rows(format):
    width = 576 if format == "fp8" or "ds_mla" in format else 512
    batch = batches.paged([7, 20], 8)
    rows = torch.randn(27, width).bfloat16()
    cache = batches.packed_cache(format, batch, rows)
    if format == "fp8":
        stored = expected.e4m3(rows.float() / cache.ckv_scale)
        assert torch.equal(cache.kv.view(torch.uint8).view(-1, width)[batch.all_slots()], stored.view(torch.uint8))
        meant = (stored.float() * cache.ckv_scale).bfloat16()
    else:
        meant = expected.unpack(cache).reshape(-1, width)[batch.all_slots()]
    assert torch.equal(libmla.gather(cache, **batch.pages(), out_indptr=batches.indptr([7, 20])), meant)
    tolerance = 0.4 if "fp4" in format else 0.08
    torch.testing.assert_close(meant, rows, atol=tolerance, rtol=tolerance)


def test_scales_of_the_writer():
    rows = torch.randn(3, 576).bfloat16()
    slots = torch.arange(3)
    for powers in (True, False):
        kv = torch.zeros(1, 4, 656, dtype=torch.uint8)
        libmla.append(rows, slots, libmla.KvCache("fp8_ds_mla", kv, power_of_two_scales=powers))
        scales = kv[0, :3, 512:528].contiguous().view(torch.float32)
        largest = rows[:, :512].float().view(3, 4, 128).abs().amax(-1) / 448
        wanted = torch.exp2(torch.ceil(torch.log2(largest))) if powers else largest
        torch.testing.assert_close(scales, wanted, atol=0, rtol=1e-6)
    quarter = torch.zeros(1, 4, 4)
    kv = torch.zeros(1, 4, 576, dtype=torch.uint8)
    cache = libmla.KvCache("fp8", ckv=kv[..., :512], kpe=kv[..., 512:], ckv_scale=quarter, kpe_scale=torch.ones(1))
    libmla.append((rows[:, :512], rows[:, 512:]), slots, cache)
    assert (quarter[0, :3] > 0).all()
    read = libmla.gather(
        cache, kv_len=ints([3]), block_table=torch.zeros(1, 1, dtype=torch.int32), out_indptr=ints([0, 3])
    )
    torch.testing.assert_close(read, rows, atol=0.1, rtol=0.1)


def rotated(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Returns x [T, ..., d] turned by the angles of each token's position."""
    half = x.shape[-1] // 2
    cos, sin = (part.double() for part in cos_sin[positions].split(half, -1))
    while cos.ndim < x.ndim:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    a, b = a.double(), b.double()
    turned = a * cos - b * sin, a * sin + b * cos
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


@pytest.mark.parametrize("format", ["fp8_dsv41", "fp4_dsv41"])
def test_append_rope_of_rows_that_end_with_the_rotary_channels(format):
    batch = batches.paged([9], 4)
    ckv, kpe = torch.randn(9, 448).bfloat16(), torch.randn(9, 64).bfloat16()
    positions, cos_sin = torch.arange(9), torch.rand(20, 64)
    turned = rotated(kpe, cos_sin, positions, True).bfloat16()
    wanted = batches.packed_cache(format, batch, torch.cat([ckv, turned], -1))
    got = batches.packed_cache(format, batch, torch.zeros(9, 512).bfloat16())
    slots = torch.tensor(batch.all_slots(), dtype=torch.int64)
    q = torch.randn(9, 3, 448).bfloat16(), torch.randn(9, 3, 64).bfloat16()
    out = libmla.append_rope(ckv, kpe, slots, got, cos_sin=cos_sin, positions=positions, q=q)
    assert out.shape == (9, 3, 512)
    assert torch.equal(out[..., :448], q[0])
    difference = (expected.unpack(got).float() - expected.unpack(wanted).float()).abs().nan_to_num()
    assert (difference > 0).float().mean() < 1e-3  # where the turned channel itself lies between two bf16
    with pytest.raises(ValueError, match="kpe: expected none, since the rows of cache.format have no rotary channels"):
        nope = libmla.KvCache("fp8_nope", torch.zeros(1, 16, 528, dtype=torch.uint8))
        rows = torch.cat([ckv, kpe], -1)
        libmla.append_rope(rows, kpe, torch.arange(9), nope, cos_sin=cos_sin, positions=positions)


@pytest.mark.parametrize("format", ["fp8_nope", "bf16"])
def test_append_rope_of_rows_without_rotary_channels(format):
    batch = batches.paged([9], 4)
    ckv, q, weight = torch.randn(9, 512).bfloat16(), torch.randn(9, 3, 512).bfloat16(), torch.rand(512) + 0.5
    normalized = (ckv.double() / (ckv.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight).float()

    def cache_of(rows):
        if format == "fp8_nope":
            return batches.packed_cache(format, batch, rows)
        pool = torch.zeros(batch.num_pages * 4, 512, dtype=torch.bfloat16)
        pool[torch.tensor(batch.all_slots())] = rows.bfloat16()
        return pool.view(-1, 4, 512)

    wanted, got = cache_of(normalized), cache_of(torch.zeros(9, 512))
    slots = torch.tensor(batch.all_slots(), dtype=torch.int64)
    out = libmla.append_rope(ckv, None, slots, got, q=(q, None), q_norm=True, norm_weight=weight)
    assert out.shape == (9, 3, 512)
    assert torch.allclose(out.float(), q.float() / (q.float().square().mean(-1, keepdim=True) + 1e-6).sqrt(), rtol=1e-2)
    rows = [expected.unpack(cache).float() if format == "fp8_nope" else cache.float() for cache in (got, wanted)]
    written = rows[1].flatten(0, 1)[torch.tensor(batch.all_slots())]
    assert written.isfinite().all() and torch.equal(rows[0].isnan(), rows[1].isnan())  # others hold what they held
    difference = (rows[0] - rows[1]).abs().nan_to_num()
    assert (difference > 0).float().mean() < 1e-3  # where a channel itself lies between two numbers of the cache
    message = (
        "cos_sin: expected none, since the rows of" if format == "fp8_nope" else "kpe: expected a tensor, got none"
    )
    with pytest.raises(ValueError, match=message):
        libmla.append_rope(ckv, None, slots, got, cos_sin=torch.rand(20, 64), positions=torch.arange(9))


def test_rotary_channels_of_e4m3_have_a_scale_in_their_row():
    batch = batches.paged([9], 4)
    ckv, kpe = torch.randn(9, 512).bfloat16(), (torch.randn(9, 64) * torch.logspace(-3, 3, 9)[:, None]).bfloat16()
    positions, cos_sin = torch.arange(9), torch.rand(20, 64)
    turned = rotated(kpe, cos_sin, positions, True).bfloat16()
    wanted = batches.packed_cache("nvfp4_ds_mla_368", batch, torch.cat([ckv, turned], -1))
    got = batches.packed_cache("nvfp4_ds_mla_368", batch, torch.zeros(9, 576).bfloat16())
    slots = torch.tensor(batch.all_slots(), dtype=torch.int64)
    libmla.append_rope(ckv, kpe, slots, got, cos_sin=cos_sin, positions=positions)
    difference = (expected.unpack(got).float() - expected.unpack(wanted).float()).abs().nan_to_num()
    assert (difference > 0).float().mean() < 1e-3  # where the turned channel itself lies between two bf16
    rows = expected.unpack(got).view(-1, 576)[batch.all_slots()]
    largest = turned.float().abs().amax(-1, keepdim=True)
    assert ((rows[:, 512:].float() - turned.float()).abs() <= largest / 16).all()


def test_rows_of_bytes_have_to_be_named():
    rows = torch.zeros(2, 8, 368, dtype=torch.uint8)
    with pytest.raises(TypeError, match="rows of 368 bytes may be those of nvfp4_ds_mla_368 or mxfp4_dsv4"):
        libmla.append(torch.zeros(1, 576), torch.zeros(1, dtype=torch.int64), rows)
    with pytest.raises(TypeError, match="rows of 528 bytes may be those of fp8_dsv41 or fp8_nope"):
        libmla.append(torch.zeros(1, 512), torch.zeros(1, dtype=torch.int64), rows.new_zeros(2, 8, 528))
    with pytest.raises(ValueError, match="ckv_scale: expected none for nvfp4_dsv4, got a tensor"):
        v4 = libmla.KvCache("nvfp4_dsv4", rows.new_zeros(2, 8 * 384), page_size=8, ckv_scale=torch.ones(1))
        libmla.append(torch.zeros(1, 512), torch.zeros(1, dtype=torch.int64), v4)
    with pytest.raises(ValueError, match="kpe_scale: expected none for nvfp4_ds_mla_368, got a tensor"):
        compact = libmla.KvCache("nvfp4_ds_mla_368", rows, kpe_scale=torch.ones(1))
        libmla.append(torch.zeros(1, 576), torch.zeros(1, dtype=torch.int64), compact)


@pytest.mark.parametrize("interleaved", [True, False])
def test_append_rope(interleaved):
    tokens, heads = 5, 3
    angles = torch.rand(20, 32) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    positions = torch.tensor([0, 19, 4, 4, 11])
    q_nope, q_pe = torch.randn(tokens, heads, 512).bfloat16(), torch.randn(tokens, heads, 64).bfloat16()
    ckv, kpe = torch.randn(tokens, 512).bfloat16(), torch.randn(tokens, 64).bfloat16()
    cache = torch.zeros(2, 4, 576).bfloat16()
    slots = torch.tensor([6, 0, -1, 3, 7])
    more = {"cos_sin": cos_sin, "positions": positions, "interleaved": interleaved}
    queries = libmla.append_rope(ckv, kpe, slots, cache, q=(q_nope, q_pe), **more)
    wanted = torch.cat([q_nope.double(), rotated(q_pe, cos_sin, positions, interleaved)], -1)
    expected.check(queries, wanted)
    rows = torch.cat([ckv.double(), rotated(kpe, cos_sin, positions, interleaved)], -1)
    written = slots >= 0
    expected.check(cache.view(-1, 576)[slots[written]], rows[written])
    scale = torch.tensor([0.02])
    stored = libmla.append_rope(ckv, kpe, slots, cache, q=(q_nope, q_pe), q_scale=scale, **more)
    assert stored.dtype == torch.float8_e4m3fn
    expected.check(stored.float() * scale, wanted, 0.08)
    out = torch.empty(tokens, heads, 576)
    assert libmla.append_rope(ckv, kpe, slots, cache, q=(q_nope, q_pe), q_out=out, **more) is out
    expected.check(out, wanted)
    before = cache.clone()
    assert libmla.append_rope(ckv, kpe, slots, cache, **more) is None
    assert torch.equal(cache, before)


def test_copy_pages_into_other_formats():
    rows = torch.randn(32, 576).bfloat16()
    source = rows.view(4, 8, 576)
    kv = torch.zeros(8, 4, 656, dtype=torch.uint8)
    packed = libmla.KvCache("fp8_ds_mla", kv)
    libmla.copy_pages(source, ints([2, 0]), packed, ints([7, 1, 0, 3]))
    meant = expected.unpack_fp8_ds_mla(kv)
    wanted = torch.cat([rows[16:24], rows[:8]])
    torch.testing.assert_close(meant[[7, 1, 0, 3]].reshape(16, 576), wanted, atol=0.08, rtol=0.08)
    back = torch.zeros(3, 16, 576).bfloat16()
    libmla.copy_pages(packed, ints([7, 1, 0, 3]), back, ints([1]))
    assert torch.equal(back[1], meant[[7, 1, 0, 3]].reshape(16, 576)) and (back[[0, 2]] == 0).all()
