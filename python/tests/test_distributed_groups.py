# SPDX-License-Identifier: Apache-2.0
"""Tests libmla.distributed with 1 to 4 processes: their results together are those of one process, and of float64."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import batches
import expected
import libmla
from distributed_ranks import SM_SCALE, Case, Crash, RefusedStates, States, groups, spawn

HEADS = 12  # of all ranks: as many for each of 1, 2, 3 or 4
RAGGED = [150, 0, 1, 37, 5, 210]
METHODS = ("all_to_all", "all_gather")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def case(kv_len=RAGGED, qo_len=1, width=576, dtype=torch.bfloat16, sparse=0, **named: Any) -> Case:
    qo_len = [qo_len] * len(kv_len) if isinstance(qo_len, int) else qo_len
    made = Case(
        q=torch.randn(sum(qo_len), HEADS, width).to(dtype),
        rows=torch.randn(sum(kv_len), width).to(torch.float16 if dtype == torch.float16 else torch.bfloat16),
        kv_len=kv_len,
        qo_len=qo_len,
        **named,
    )
    if sparse:
        made.indices = torch.stack(
            [torch.randperm(250)[:sparse].int() for _ in range(sum(qo_len))]  # some beyond kv_len
        )
        made.indices[:, 3] = -1
    return made


@functools.cache
def decode_cases() -> dict[str, Case]:
    torch.manual_seed(6)
    cases: dict[str, Case] = {}
    for method in METHODS:
        for interleave in (1, 16, 64):
            name, settings = f"{method} interleave {interleave}", {"method": method, "interleave": interleave}
            cases[f"{name}"] = case(settings=settings)
            cases[f"{name} q_len 4"] = case([150, 4, 37, 210, 0], 4, settings=settings)
        other = {"method": method, "interleave": 16}
        cases |= {
            f"{method} ragged queries": case(qo_len=[3, 0, 1, 2, 5, 4], settings=other),
            f"{method} f32": case(dtype=torch.float32, settings=other),
            f"{method} f16": case(dtype=torch.float16, cache_format="f16", settings=other),
            f"{method} bf16 partials": case(settings={**other, "partial_dtype": torch.bfloat16}),
            f"{method} sink": case(settings=other, sink=sinks()),
            f"{method} no request has keys": case([0, 0], settings=other, sink=sinks()),
            f"{method} no queries": case([5, 9], 0, settings=other),
            f"{method} sparse": case(sparse=40, settings=other),
        }
    for number, cache_format in enumerate(("fp8", "fp8_ds_mla", "fp8_dsv4")):
        named: Any = {"cache_format": cache_format, "width": 512 if cache_format == "fp8_dsv4" else 576}
        settings = {"method": METHODS[number % 2], "interleave": 64}
        cases[cache_format] = case(settings=settings, **named)
        cases[f"{cache_format} q_len 4"] = case([150, 4, 37], 4, settings=settings, **named)
        cases[f"{cache_format} sparse"] = case(sparse=40, settings=settings, **named)
    cases |= {
        "window": case([150, 40, 3], 2, options={"window_left": 20}),
        "soft cap": case(options={"logits_soft_cap": 2.5}),
        "not causal": case([150, 40, 3], 3, options={"causal": False}),
        "draft tree": case([40, 9], 4, options={"tree_parents": batches.ints([-1, 0, 0, 1, -1, -1, 1, 2])}),
        "e4m3 queries": case(options={"q_scale": torch.tensor([0.5])}),
        "parts": case(in_parts=True, settings={"interleave": 16}),
        "csr": case(table="csr", page_size=3),
        "plan": case([150, 40, 3], 2, with_plan=True, sink=sinks()),
        "appended in steps": case(steps=5, settings={"interleave": 16}),
        "sparse, counted": case(sparse=40, options={"topk_length": batches.ints([40, 9, 3, 0, 17, 39])}),
    }
    for method in METHODS:
        for arch in libmla.info().emulated_archs[:1]:
            settings = {"method": method, "interleave": 4}
            cases[f"{method} emulated GPU"] = case([20, 0, 3], 2, settings=settings, emulated=f"sm{arch}")
    cases["e4m3 queries"].q = expected.e4m3(cases["e4m3 queries"].q.float() * 2)
    return cases


def sinks() -> torch.Tensor:
    sink = torch.linspace(-2, 8, HEADS)
    sink[0], sink[1] = -math.inf, math.inf
    return sink


@functools.cache
def state_cases(world_size: int) -> dict[str, States]:
    """Returns cases of partial results by themselves; one token has keys on no rank, another not on all."""
    torch.manual_seed(7)
    cases = {}
    for method in METHODS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            o, lse = torch.randn(world_size, 5, HEADS, 40).to(dtype), 3 * torch.randn(world_size, 5, HEADS)
            lse[:, 2] = -math.inf
            lse[0, 3] = -math.inf
            o[lse == -math.inf] = math.nan
            sink = sinks() if dtype == torch.float32 else None
            cases[f"{method} {str(dtype)[6:]}"] = States(o, lse, sink, {"method": method})
    return cases


@functools.cache
def refused_cases(world_size: int) -> dict[str, RefusedStates]:
    """Returns cases of 25 heads, which only one rank or five could share."""
    o, lse = torch.zeros(world_size, 1, 25, 8), torch.zeros(world_size, 1, 25)
    return {f"{method} 25 heads": RefusedStates(o, lse, None, {"method": method}) for method in METHODS}


def whole_cache(c: Case) -> tuple[Any, torch.Tensor, batches.Paged]:
    """Returns what one process would have: the cache, the numbers that it means, and its pages."""
    torch.manual_seed(8)
    batch = batches.paged(c.kv_len, c.page_size)
    if c.cache_format in ("bf16", "f16"):
        cache = batches.random_cache(batch, c.rows.shape[1], c.rows.dtype)
        cache.view(-1, c.rows.shape[1])[batch.all_slots()] = c.rows
        return cache, cache, batch
    cache = batches.packed_cache(c.cache_format, batch, c.rows)
    if c.cache_format == "fp8":
        return cache, (cache.kv.float() * cache.ckv_scale).bfloat16(), batch
    if c.cache_format == "fp8_ds_mla":
        return cache, expected.unpack_fp8_ds_mla(cache.kv), batch
    return cache, expected.unpack_fp8_dsv4(cache.kv, c.page_size), batch


def of_one_process(c: Case) -> tuple[torch.Tensor, torch.Tensor]:
    cache, _, batch = whole_cache(c)
    context = libmla.Context(num_threads=1)
    named = dict(c.options, attn_sink=c.sink, sm_scale=SM_SCALE, return_lse=True, context=context)
    if c.indices is not None:
        slots = libmla.physical_slots(
            c.indices, **batch.pages(), page_size=c.page_size, topk_length=named.pop("topk_length", None)
        )
        return libmla.decode_sparse(c.q, cache, slots, **named)
    return libmla.decode(c.q, cache, **batch.pages(), qo_indptr=c.qo_indptr, **named)


def in_float64(c: Case) -> tuple[torch.Tensor, torch.Tensor]:
    _, meant, batch = whole_cache(c)
    q = c.q.float() * c.options["q_scale"] if "q_scale" in c.options else c.q
    if c.indices is None:
        named: dict[str, Any] = {"sink": c.sink, "qo_indptr": c.qo_indptr.tolist()}
        named |= {"window_left": c.options.get("window_left", -1), "causal": c.options.get("causal", True)}
        named["soft_cap"] = c.options.get("logits_soft_cap", 0.0)
        if "tree_parents" in c.options:
            named["tree"] = tree_mask(c.options["tree_parents"].tolist(), 4)
        return expected.decode(q, meant, c.kv_len, batch.tables, SM_SCALE, 512, **named)
    o, lse = [], []
    for t, chosen in enumerate(c.indices.tolist()):
        b = next(b for b in range(len(c.kv_len)) if sum(c.qo_len[: b + 1]) > t)
        count = int(c.options["topk_length"][t]) if "topk_length" in c.options else len(chosen)
        rows = expected.rows_of(meant, batch.tables[b], c.kv_len[b])
        rows = rows[[j for j in chosen[:count] if 0 <= j < c.kv_len[b]]]
        visible = torch.ones(rows.shape[0]).bool()
        for results, value in zip((o, lse), expected.attend(q[t], rows, rows[:, :512], visible, SM_SCALE), strict=True):
            results.append(value)
    return torch.stack(o), torch.stack(lse)


def tree_mask(parents: list[int], each: int) -> torch.Tensor:
    tree = torch.zeros(len(parents), each).bool()
    for t in range(len(parents)):
        j = t % each
        while j >= 0:
            tree[t, j] = True
            j = parents[t // each * each + j]
    return tree


class Ranks:
    """Runs all processes and holds their results."""

    def __init__(self, folder: Path, device_type: str) -> None:
        self.device_type = device_type
        self.count = 4 if device_type == "cpu" else min(4, GPUS)
        sizes = range(1, self.count + 1)
        cases = {size: {**decode_cases(), **state_cases(size), **refused_cases(size)} for size in sizes}
        torch.save(cases, folder / "cases.pt")
        spawn(self.count, folder, device_type)
        self._results = [torch.load(folder / f"results{rank}.pt", weights_only=False) for rank in range(self.count)]

    def of(self, size: int, name: str) -> list[dict[str, Any]]:
        """Returns what the ranks of the group of that size computed, in their order."""
        return [self._results[rank][size, name] for rank in groups(self.count)[size]]

    def together(self, size: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns o and lse of all heads."""
        results = self.of(size, name)
        assert [result["unowned"] for result in results] == [0] * size
        return torch.cat([result["o"] for result in results], 1), torch.cat([result["lse"] for result in results], 1)


@pytest.fixture(scope="module", params=["cpu", "cuda"] if GPUS > 1 else ["cpu"])
def ranks(request, tmp_path_factory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("ranks"), request.param)


@pytest.mark.parametrize("name", decode_cases())
def test_decode(ranks, name):
    c = decode_cases()[name]
    one, wanted = of_one_process(c), in_float64(c)
    for size in range(1, ranks.count + 1):
        o, lse = ranks.together(size, name)
        assert o.dtype == one[0].dtype and lse.dtype == torch.float32
        tolerance = 2e-2 if "e4m3" in name or c.cache_format.startswith("fp8") else None
        for got in ((o, lse), one):
            expected.check(got[0], wanted[0], tolerance)
            expected.check(got[1], wanted[1])
        expected.check(o, one[0].double())
        empty = wanted[1] == -math.inf
        assert (o[empty] == 0).all() and (lse[empty] == -math.inf).all()


@pytest.mark.parametrize("name", state_cases(1))
def test_combine(ranks, name):
    for size in range(1, ranks.count + 1):
        c = state_cases(size)[name]
        o, lse = ranks.together(size, name)
        wanted = torch.logsumexp(c.lse.double(), 0)
        weight = torch.exp(c.lse.double() - wanted).nan_to_num(0).unsqueeze(-1)
        wanted_o = torch.where(weight > 0, c.o.double() * weight, 0).sum(0)
        if c.sink is not None:
            share = torch.where(c.sink == -math.inf, 1, 1 / (1 + torch.exp(c.sink.double() - wanted)))
            wanted_o *= share.unsqueeze(-1)
        assert o.dtype == c.o.dtype
        expected.check(o, wanted_o)
        expected.check(lse, wanted)
        assert (o[2] == 0).all() and (lse[2] == -math.inf).all()


@pytest.mark.parametrize("method", METHODS)
def test_captured_in_a_graph(ranks, method):
    if ranks.device_type == "cpu":
        pytest.skip("needs 2 GPUs")
    for size in range(1, ranks.count + 1):
        name = f"captured {method}"
        o, lse = ranks.together(size, name)
        given = ranks.of(size, name)[0]
        rows = given["rows"].unsqueeze(0)
        wanted = expected.decode(given["q"], rows, [77, 0], [[0], []], SM_SCALE, 512, sink=given["sink"])
        expected.check(o, wanted[0])
        expected.check(lse, wanted[1])


@pytest.mark.parametrize("method", METHODS)
def test_heads_that_cannot_be_shared(ranks, method):
    for size in range(2, ranks.count + 1):
        for result in ranks.of(size, f"{method} 25 heads"):
            wanted = f"partial_o: expected a number of heads that {size} ranks can share equally, got 25; "
            assert result["error"].startswith(wanted)


def test_a_rank_that_crashes_is_named(tmp_path: Path) -> None:
    torch.save({1: {"a case": Crash()}}, tmp_path / "cases.pt")
    with pytest.raises(RuntimeError, match="rank 0 of 1, at a case, in a group of 1: .*SIGSEGV"):
        spawn(1, tmp_path, "cpu")
