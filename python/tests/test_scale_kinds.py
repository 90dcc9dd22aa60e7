# SPDX-License-Identifier: Apache-2.0
"""Tests caches whose scales are powers of two, and caches whose scales are any numbers."""

from __future__ import annotations

import pytest
import torch

import libmla
from batches import ints

PAGES, PAGE, GROUP = 3, 4, 128
ARCHS = libmla.info().emulated_archs
CONTEXTS = [
    pytest.param({"backend": "reference"}, id="reference"),
    pytest.param({}, id="cpu"),
    *(pytest.param({"device": f"emulated:sm{arch}"}, id=f"sm{arch}") for arch in ARCHS[:1]),
]


def empty_cache(cache_format: str, powers: bool) -> libmla.KvCache:
    if cache_format == "fp8_ds_mla":
        kv = torch.full((PAGES, PAGE, 656), 0xA5, dtype=torch.uint8)
        return libmla.KvCache("fp8_ds_mla", kv=kv, power_of_two_scales=powers)
    return libmla.KvCache(
        "fp8",
        ckv=torch.zeros(PAGES, PAGE, 512, dtype=torch.uint8).view(torch.float8_e4m3fn),
        kpe=torch.zeros(PAGES, PAGE, 64, dtype=torch.uint8).view(torch.float8_e4m3fn),
        ckv_scale=torch.zeros(PAGES, PAGE, 4),
        kpe_scale=torch.ones(1),
        power_of_two_scales=powers,
    )


def contents(cache: libmla.KvCache) -> list[torch.Tensor]:
    tensors = (cache.kv, cache.ckv, cache.kpe, cache.ckv_scale)
    return [tensor.view(torch.uint8) for tensor in tensors if tensor is not None]


def scales(cache: libmla.KvCache) -> torch.Tensor:
    return cache.ckv_scale if cache.kv is None else cache.kv[..., 512:528].contiguous().view(torch.float32)


def rows() -> torch.Tensor:
    """Returns rows of many magnitudes, some of them below 1e-4, and one group zero."""
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(PAGES * PAGE, 576, generator=generator)
    made[:, :512] *= torch.exp2(torch.randint(-30, 12, (PAGES * PAGE, 4), generator=generator)).repeat_interleave(
        GROUP, 1
    )
    made[5, :GROUP] = 0
    return made.bfloat16()


def filled(cache_format: str, powers: bool, written: torch.Tensor, context: libmla.Context) -> libmla.KvCache:
    cache = empty_cache(cache_format, powers)
    libmla.append(written, torch.arange(len(written)), cache, context=context)
    return cache


def are_powers_of_two(values: torch.Tensor) -> bool:
    return bool((torch.frexp(values)[0] == 0.5).all())


@pytest.mark.parametrize("options", CONTEXTS)
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8"])
@pytest.mark.parametrize("from_powers", [True, False])
@pytest.mark.parametrize("to_powers", [True, False])
def test_copies_between_both_kinds(
    options: dict[str, str], cache_format: str, from_powers: bool, to_powers: bool
) -> None:
    context = libmla.Context(2, **options)
    source = filled(cache_format, from_powers, rows(), context)
    assert are_powers_of_two(scales(source)) == from_powers
    pages = ints([2, 0, 1])
    target = empty_cache(cache_format, to_powers)
    libmla.copy_pages(source, pages, target, pages, context=context)
    if from_powers or not to_powers:
        assert all(a.equal(b) for a, b in zip(contents(source), contents(target), strict=True))
        return
    # Quantized anew, from what the source says.
    table, everything = ints([[0, 1, 2]]), ints([PAGES * PAGE])
    said = libmla.gather(
        source, kv_len=everything, block_table=table, out_indptr=ints([0, PAGES * PAGE]), out_dtype="f32"
    )
    expected = filled(cache_format, True, said, context)
    assert are_powers_of_two(scales(target))
    assert all(a.equal(b) for a, b in zip(contents(expected), contents(target), strict=True))


@pytest.mark.parametrize("options", CONTEXTS)
def test_scales_that_writers_choose(options: dict[str, str]) -> None:
    """Scales that are powers of two take magnitudes as at least 1e-4; scales that are any numbers are amax / 448."""
    context = libmla.Context(2, **options)
    amax = rows()[:, :512].double().abs().unflatten(1, (4, GROUP)).amax(2)
    chosen = scales(filled("fp8_ds_mla", False, rows(), context)).reshape(-1, 4)
    smallest = torch.finfo(torch.float32).tiny
    assert ((0 < amax) & (amax < 1e-4)).any() and (amax == 0).any()
    assert chosen.equal((amax / 448).float().clamp(min=smallest))
    powers = scales(filled("fp8_ds_mla", True, rows(), context)).reshape(-1, 4)
    assert powers.double().equal(torch.exp2(torch.ceil(torch.log2(amax.clamp(min=1e-4) / 448))))
