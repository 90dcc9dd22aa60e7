# SPDX-License-Identifier: Apache-2.0
"""Tests compress against float64, and against calls that divide a prompt otherwise. What transformers makes of the same
tokens is in test_transformers_compress.py."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, get_args

import pytest
import torch

import batches
import expected
import libmla
from batches import ints
from libmla.types import CacheFormat
from test_cache import rotated
from test_indexer import unpacked

UNTOUCHED = 77.0


def pooled(
    kv: torch.Tensor,
    score: torch.Tensor | None,
    ratio: int,
    overlap: bool = False,
    bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Returns the latents [groups, D] in float64 of a whole request, of which this is every token."""
    groups, width = kv.shape[0] // ratio, kv.shape[1] // (2 if overlap else 1)
    kv = kv.double()
    score = torch.zeros_like(kv) if score is None else score.double()
    if bias is not None:
        score = score + bias.double()[torch.arange(kv.shape[0]) % ratio]
    latents = torch.zeros(groups, width).double()
    for group in range(groups):
        own = slice(group * ratio, (group + 1) * ratio)
        values, scores = kv[own, -width:], score[own, -width:]
        if overlap and group > 0:
            before = slice((group - 1) * ratio, group * ratio)
            values = torch.cat([kv[before, :width], values])
            scores = torch.cat([score[before, :width], scores])
        latents[group] = (values * torch.softmax(scores, 0)).sum(0)
    if weight is not None:
        latents = latents / (latents.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return latents


def check_latents(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Checks latents by the largest magnitude of their row: a sum of at most 16 terms, exponentials and a norm, each
    rounded to f32 a few times, 2^-19 in all; then the latent itself is rounded to its type."""
    half_ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[got.dtype]
    largest = wanted.abs().amax(-1, keepdim=True)
    assert ((got.double() - wanted).abs() <= wanted.abs() * half_ulp + largest * 2.0**-19).all()


@dataclasses.dataclass
class Compressor:
    """Holds what one request, or several, keep between calls.

    Attributes:
        named: arguments that do not change.
        state, state_table: None with a ratio of 1.
    """

    named: dict[str, Any]
    state: torch.Tensor | None
    state_table: torch.Tensor | None

    @classmethod
    def make(cls, ratio: int, overlap: bool, width: int, room: int, form: str = "ring", **named: Any) -> Compressor:
        """Makes the compressor of one request. Its state has room for this many tokens and holds NaN."""
        if ratio == 1:
            return cls(named, None, None)
        named |= {"ratio": ratio, "overlap": overlap}
        if form == "ring":
            return cls(named, torch.full((1, room, 2 * width), torch.nan), torch.zeros(1, 1, dtype=torch.int32))
        columns = -(-room // 4)
        table = torch.randperm(columns + 2)[None, :columns].int()
        return cls(named, torch.full((columns + 2, 4, 2 * width), torch.nan), table)

    def copy(self) -> Compressor:
        return Compressor(self.named, None if self.state is None else self.state.clone(), self.state_table)

    def __call__(self, kv: torch.Tensor, score: torch.Tensor | None, kv_len: int, **more: Any) -> torch.Tensor:
        """Compresses new tokens, the last ones of kv_len, and returns the latents of the groups that end with them."""
        named = {**self.named, "state": self.state, "state_table": self.state_table, **more}
        score = None if self.state is None else score
        latent = libmla.compress(kv, score, kv_len=ints([kv_len]), **named)
        ends = torch.arange(kv_len - kv.shape[0] + 1, kv_len + 1) % self.named.get("ratio", 1) == 0
        return latent[ends]


SHAPES = [(4, True), (2, False), (3, False), (1, False), (2, True)]


@pytest.fixture(params=SHAPES, ids=lambda shape: f"ratio {shape[0]}{' overlap' if shape[1] else ''}")
def shape(request: pytest.FixtureRequest) -> tuple[int, bool]:
    return request.param


def random_tokens(tokens: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, width).to(dtype), (2 * torch.randn(tokens, width)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_norm", [True, False])
def test_a_whole_prompt(shape: tuple[int, bool], dtype: torch.dtype, with_bias: bool, with_norm: bool) -> None:
    ratio, overlap = shape
    width = 96 if overlap else 48
    kv, score = random_tokens(21, width, dtype)
    bias = torch.randn(ratio, width) if with_bias and ratio > 1 else None
    weight = (1 + torch.rand(48)).to(dtype) if with_norm else None
    compressor = Compressor.make(ratio, overlap, width, 8, position_bias=bias, norm_weight=weight, norm_eps=1e-3)
    wanted = pooled(kv, None if ratio == 1 else score, ratio, overlap, bias, weight, 1e-3)
    got = compressor(kv, score, 21)
    assert got.dtype == dtype and got.shape == wanted.shape
    check_latents(got, wanted)
    for name, other in (("f32", torch.float32), (torch.bfloat16, torch.bfloat16)):
        got = compressor(kv, score, 21, latent_dtype=name)
        assert got.dtype == other
        check_latents(got, wanted)


@pytest.mark.parametrize("form", ["ring", "paged"])
def test_every_division_of_a_prompt_gives_the_same_bits(shape: tuple[int, bool], form: str) -> None:
    """The calls of all divisions are the edges of a tree: each call goes on from the state that the one before left."""
    tokens, (ratio, overlap) = 12, shape
    width = 32 if overlap else 16
    if ratio == 1 and form == "paged":
        pytest.skip("a ratio of 1 keeps nothing")
    kv, score = random_tokens(tokens, width, torch.bfloat16)
    bias, weight = torch.randn(ratio, width) if ratio > 1 else None, 1 + torch.rand(16)
    room = tokens if form == "paged" else ratio * (2 if overlap else 1) - 1  # the least that serves
    # Latents of f32 would show a sum in another order.
    named = {"position_bias": bias, "norm_weight": weight, "latent_dtype": "f32"}
    start = Compressor.make(ratio, overlap, width, room, form, **named)
    whole = start.copy()(kv, score, tokens)
    check_latents(whole, pooled(kv, None if ratio == 1 else score, ratio, overlap, bias, weight))

    calls = 0
    pending = [(0, start)]
    while pending:
        first, compressor = pending.pop()
        for end in range(first + 1, tokens + 1):
            following = compressor.copy()
            latents = following(kv[first:end], score[first:end], end)
            assert latents.equal(whole[first // ratio : end // ratio]), (first, end)
            calls += 1
            if end < tokens:
                pending.append((end, following))
    assert calls == 2**tokens - 1


@pytest.mark.parametrize("form", ["ring", "paged"])
def test_rejected_drafts_leave_no_trace(shape: tuple[int, bool], form: str) -> None:
    ratio, overlap = shape
    width, span = (32, 2 * ratio) if overlap else (16, ratio)
    bias = torch.randn(ratio, width) if ratio > 1 else None
    kv, score = random_tokens(24, width, torch.bfloat16)
    drafts = random_tokens(24, width, torch.bfloat16)
    for first, appended in itertools.product(range(8), range(1, 6)):
        for rejected in range(1, appended + 1):
            room = rejected + span - 1 if form == "ring" else 24
            with_drafts = Compressor.make(ratio, overlap, width, room, form, position_bias=bias, latent_dtype="f32")
            without = with_drafts.copy()
            good, end = first + appended - rejected, first + appended
            both = [torch.cat([x[first:good], y[good:end]]) for x, y in zip((kv, score), drafts)]
            for compressor in (with_drafts, without) if first else ():
                compressor(kv[:first], score[:first], first)
            accepted = with_drafts(*both, end)[: good // ratio - first // ratio]
            if good > first:
                assert accepted.equal(without(kv[first:good], score[first:good], good))
            # The request goes on in short calls and in a long one.
            for begin, last in ((good, good + 1), (good + 1, good + 3), (good + 3, 24)):
                latents = [each(kv[begin:last], score[begin:last], last) for each in (with_drafts, without)]
                assert latents[0].equal(latents[1]), (first, appended, rejected, begin)
                assert not latents[0].isnan().any()


def test_rejected_drafts_are_overwritten_in_the_pool() -> None:
    kv, score = random_tokens(16, 64, torch.bfloat16)
    pools = []
    for drafts in (0, 6):
        compressor = Compressor.make(4, True, 64, 16, norm_weight=torch.ones(32))
        pool = torch.full((1, 8, 32), UNTOUCHED).bfloat16()
        steps = [(0, 5, 0), (5, 5 + drafts, drafts), (5, 16, 0)]
        for first, end, wrong in steps:
            if first == end:
                continue
            ends = torch.arange(first + 1, end + 1)
            slots = torch.where(ends % 4 == 0, ends // 4 - 1, -1)
            compressor(kv[first:end] + wrong, score[first:end], end, slot_mapping=slots, cache=pool)
        pools.append(pool)
    assert pools[0].equal(pools[1])
    assert (pools[0][0, :4] != UNTOUCHED).all() and (pools[0][0, 4:] == UNTOUCHED).all()


def test_a_batch_of_requests() -> None:
    """Requests with any number of new tokens stand side by side; rows and slots of others are not touched."""
    ratio, lengths = 4, [9, 0, 5, 30, 1]
    texts = [random_tokens(length, 64, torch.bfloat16) for length in lengths]
    bias, weight = torch.randn(ratio, 64), 1 + torch.rand(32)
    state = torch.full((11, 4, 128), torch.nan)
    table = torch.randperm(10)[:, None].int().view(5, 2)
    table[1] = -1
    pool = torch.full((3, 8, 32), UNTOUCHED).bfloat16()
    found: list[list[torch.Tensor]] = [[] for _ in lengths]
    for before, after in (([0] * 5, [3, 0, 5, 30, 0]), ([3, 0, 5, 30, 0], [9, 0, 5, 30, 1])):
        new = [end - first for first, end in zip(before, after)]
        kv, score = (torch.cat([text[i][f:e] for text, f, e in zip(texts, before, after)]) for i in (0, 1))
        latent = torch.full((sum(new), 32), UNTOUCHED)
        ends = [(b, p) for b, (f, e) in enumerate(zip(before, after)) for p in range(f + 1, e + 1)]
        slots = torch.tensor([8 * (b // 2) + p // 4 - 1 if p % 4 == 0 and b != 2 else -1 for b, p in ends])
        got = libmla.compress(
            kv, score, kv_len=ints(after), qo_indptr=batches.indptr(new), ratio=ratio, overlap=True, state=state,
            state_table=table, position_bias=bias, norm_weight=weight, slot_mapping=slots, cache=pool, latent=latent,
        )  # fmt: skip
        assert got is latent
        for row, (b, position) in zip(latent, ends):
            if position % ratio == 0:
                found[b].append(row)
            else:
                assert (row == UNTOUCHED).all()
    for b, (kv, score) in enumerate(texts):
        wanted = pooled(kv, score, ratio, True, bias, weight)
        assert len(found[b]) == len(wanted)
        if len(wanted):
            check_latents(torch.stack(found[b]), wanted)
    stored = pool.view(-1, 32)
    written = {0: found[0][0], 1: found[0][1], **{8 + i: row for i, row in enumerate(found[3])}}
    for at in range(24):
        assert stored[at].equal(written[at].bfloat16()) if at in written else (stored[at] == UNTOUCHED).all()
    assert state[10].isnan().all()


def test_tokens_before_a_requests_first_one_are_padding() -> None:
    kv, score = random_tokens(10, 64, torch.bfloat16)
    state, latent = torch.full((2, 8, 128), UNTOUCHED), torch.full((10, 32), UNTOUCHED)
    pool = torch.full((1, 2, 32), UNTOUCHED).bfloat16()
    libmla.compress(
        kv, score, kv_len=ints([0, 3]), ratio=2, overlap=True, state=state, state_table=ints([0, 1])[:, None],
        latent=latent, slot_mapping=torch.arange(10) // 8, cache=pool,
    )  # fmt: skip
    assert (latent != UNTOUCHED).any(-1).nonzero().flatten().tolist() == [8]
    check_latents(latent[8:9], pooled(kv[7:9], score[7:9], 2, True))
    assert pool[0, 1].equal(latent[8].bfloat16()) and (pool[0, 0] == UNTOUCHED).all()
    assert (state != UNTOUCHED).any(-1).nonzero().tolist() == [[1, 0], [1, 1], [1, 2]]


def test_requests_share_the_state_of_a_prefix() -> None:
    """A request that begins as another one has its blocks in its table, as it has the pages of the pool."""
    prefix, others = random_tokens(8, 64, torch.bfloat16), [random_tokens(8, 64, torch.bfloat16) for _ in range(2)]
    named = {"ratio": 4, "overlap": True, "latent_dtype": "f32"}
    state = torch.full((6, 4, 128), torch.nan)
    tables = ints([3, 1, 5, 0]), ints([3, 1, 2, 4])
    libmla.compress(*prefix, kv_len=ints([8]), state=state, state_table=tables[0][None], **named)
    both = [torch.cat(parts) for parts in zip(*others)]
    latents = libmla.compress(*both, kv_len=ints([16, 16]), state=state, state_table=torch.stack(tables), **named)
    for b, other in enumerate(others):
        alone = pooled(*(torch.cat(parts) for parts in zip(prefix, other)), 4, True)
        check_latents(latents[8 * b : 8 * b + 8][3::4], alone[2:])


def test_tokens_without_state_are_absent() -> None:
    kv, score = random_tokens(12, 64, torch.bfloat16)
    named = {"ratio": 4, "overlap": True, "latent_dtype": "f32"}
    state = torch.full((1, 8, 128), torch.nan)
    nothing = {"state": state, "state_table": ints([-1])[:, None]}
    libmla.compress(kv[:8], score[:8], kv_len=ints([8]), **named, **nothing)
    assert state.isnan().all()
    latents = libmla.compress(kv[8:], score[8:], kv_len=ints([12]), **named, **nothing)
    alone = pooled(kv[8:, 32:], score[8:, 32:], 4)
    check_latents(latents[3:], alone)


def packed(cache_format: str, rows: int) -> tuple[libmla.KvCache, batches.Paged]:
    batch = batches.paged([rows], 4)
    cache = batches.packed_cache(cache_format, batch, torch.zeros(rows, 512).bfloat16())
    return cache, batch


OF_OTHER_WIDTHS = ("fp8_ds_mla", "nvfp4_ds_mla", "nvfp4_ds_mla_416", "nvfp4_ds_mla_368")
PACKED = [name for name in get_args(CacheFormat) if name not in ("bf16", "f16", *OF_OTHER_WIDTHS)]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("cache_format", PACKED)
def test_rows_are_those_of_the_other_writers(cache_format: str, interleaved: bool) -> None:
    """What compress writes is what append_rope, or append, makes of its latents, bit for bit."""
    kv, score = random_tokens(24, 512, torch.bfloat16)
    cos_sin = torch.rand(24, 64)
    turned = cache_format != "fp8_nope"
    cache, batch = packed(cache_format, 6)
    other = dataclasses.replace(cache, kv=cache.kv.clone())
    slots = torch.full((24,), -1)
    slots[3::4] = torch.tensor(batch.all_slots())
    compressor = Compressor.make(4, False, 512, 4, norm_weight=torch.rand(512) + 1)
    rope = {"cos_sin": cos_sin, "interleaved": interleaved}
    latents = compressor(kv, score, 24, slot_mapping=slots, cache=cache, **(rope if turned else {}))
    if turned:
        ckv, kpe = latents[:, :448].contiguous(), latents[:, 448:].contiguous()
        libmla.append_rope(ckv, kpe, slots[3::4].contiguous(), other, positions=torch.arange(0, 24, 4), **rope)
    else:
        libmla.append(latents, slots[3::4].contiguous(), other)
    assert cache.kv.view(torch.uint8).equal(other.kv.view(torch.uint8))


@pytest.mark.parametrize("with_rope", [True, False])
@pytest.mark.parametrize(("format", "powers"), [("fp8", True), ("fp8", False), ("mxfp4", True)])
def test_keys_of_the_indexer(format: str, powers: bool, with_rope: bool) -> None:
    kv, score = random_tokens(24, 256, torch.bfloat16)
    slots = torch.full((24,), -1)
    slots[3::4] = torch.tensor([5, 17, 0, 31, 2, 8])
    caches = [torch.full((2, libmla.indexer_page_bytes(16, format)), 0xFF, dtype=torch.uint8) for _ in range(2)]
    cos_sin = torch.rand(24, 64)
    compressor = Compressor.make(4, True, 256, 7, norm_weight=torch.rand(128) + 1)
    more = {"indexer_cache": caches[0], "indexer_page_size": 16, "power_of_two_scales": powers}
    more["indexer_format"] = format
    if with_rope:
        more["cos_sin"] = cos_sin
    latents = compressor(kv, score, 24, slot_mapping=slots, **more)
    if with_rope:
        turned = rotated(latents[:, 64:], cos_sin, torch.arange(0, 24, 4), True).bfloat16()
        latents = torch.cat([latents[:, :64], turned], -1)
    keys = {"page_size": 16, "format": format, "power_of_two_scales": powers}
    libmla.append_indexer(latents, slots[3::4].contiguous(), caches[1], **keys)
    if with_rope:
        numbers = [unpacked(cache, 16, format)[slots[3::4]] for cache in caches]
        assert (numbers[0] != numbers[1]).double().mean() < 1e-2  # where a turned channel lies between two bf16
    else:
        assert caches[0].equal(caches[1])


def test_caches_of_any_kind() -> None:
    """A pair of tensors, f16, and latents of a type that is not the cache's."""
    kv, score = random_tokens(8, 96, torch.float32)
    slots = torch.tensor([-1, -1, -1, 6, -1, -1, -1, 1])
    compressor = Compressor.make(4, False, 96, 4)
    pair = torch.zeros(2, 4, 64).half(), torch.zeros(2, 4, 32).half()
    latents = compressor(kv, score, 8, slot_mapping=slots, cache=pair)
    assert torch.cat(pair, -1).view(8, 96)[[6, 1]].equal(latents.half())
    whole = torch.zeros(2, 4, 96).bfloat16()
    compressor(kv, score, 8, slot_mapping=slots, cache=whole)
    assert whole.view(8, 96)[[6, 1]].equal(latents.bfloat16())


# What is refused.


def arguments() -> dict[str, Any]:
    """Returns the arguments of a call whose outputs are UNTOUCHED."""
    return {
        "kv": torch.randn(6, 256).bfloat16(),
        "score": torch.randn(6, 256).bfloat16(),
        "kv_len": ints([5, 12]),
        "ratio": 4,
        "overlap": True,
        "state": torch.full((3, 8, 512), UNTOUCHED),
        "state_table": ints([2, 0])[:, None],
        "position_bias": torch.randn(4, 256),
        "qo_indptr": ints([0, 2, 6]),
        "norm_weight": torch.ones(128),
        "slot_mapping": torch.tensor([-1, -1, -1, -1, -1, 3]),
        "cache": torch.full((2, 4, 128), UNTOUCHED).bfloat16(),
        "cos_sin": torch.rand(12, 64),
        "latent": torch.full((6, 128), UNTOUCHED),
    }


CPU = libmla.Context(num_threads=1, device="cpu")  # where lists are checked
KEYS = {
    "cache": None,
    "indexer_cache": torch.full((2, libmla.indexer_page_bytes(4)), 77, dtype=torch.uint8),
    "indexer_page_size": 4,
}
ALONE = {"ratio": 1, "overlap": False, "score": None, "state": None, "state_table": None, "position_bias": None}
ALONE |= {"norm_weight": None, "latent": None, "cos_sin": None, "slot_mapping": None, "cache": None}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ratio": 0}, ValueError, "ratio: expected at least 1, got 0"),
    ({"ratio": 65537}, ValueError, "ratio: expected at most 65536, got 65537"),
    ({"ratio": 2.5}, TypeError, "ratio: expected an int"),
    ({"ratio": 1}, ValueError, "overlap: expected false, since ratio is 1, got true"),
    ({"overlap": 2.5}, TypeError, "overlap: expected a bool"),
    ({"kv": torch.zeros(6, 255).bfloat16()}, ValueError, "kv: expected an even number of channels, since overlap is"),
    ({"kv": None}, ValueError, "kv: expected a tensor, got none"),
    ({"kv": torch.zeros(6, 256, dtype=torch.int32)}, ValueError, "kv: expected bf16, f16 or f32"),
    ({"score": None}, ValueError, "score: expected a tensor, got none"),
    ({"score": torch.zeros(6, 256)}, ValueError, "score: expected bf16, got f32"),
    ({"score": torch.zeros(6, 254).bfloat16()}, ValueError, "score: expected shape"),
    ({"position_bias": torch.zeros(3, 256)}, ValueError, "position_bias: expected shape"),
    ({"state": None}, ValueError, "state: expected a tensor, got none"),
    ({"state": torch.zeros(3, 8, 256)}, ValueError, "state: expected shape"),
    ({"state": torch.zeros(3, 8, 512).half()}, ValueError, "state: expected f32, got f16"),
    ({"state": torch.zeros(3, 6, 512)}, ValueError, "state_table: expected room for at least 7 tokens of a request"),
    ({"state_table": None}, ValueError, "state_table: expected a tensor, got none"),
    ({"state_table": ints([2, 3])[:, None]}, ValueError, "state_table: expected block numbers below 3, got 3"),
    ({"state_table": [[0], [1]]}, TypeError, "state_table: expected a tensor of int32"),
    ({"state_table": torch.tensor([[0], [1]])}, ValueError, "state_table: expected int32, got int64"),
    ({"kv_len": ints([5, -1])}, ValueError, "kv_len: expected 0 to"),
    ({"qo_indptr": ints([0, 2, 7])}, ValueError, "qo_indptr: expected"),
    ({"qo_indptr": None, "kv_len": ints([5, 12, 3, 1])}, ValueError, "qo_indptr: expected"),
    ({"norm_weight": torch.ones(256)}, ValueError, "norm_weight: expected shape"),
    ({"norm_eps": -1.0}, ValueError, "norm_eps: expected a finite number of at least 0, got -1"),
    ({"norm_eps": "1"}, TypeError, "norm_eps: expected a number"),
    ({"latent": torch.zeros(6, 127)}, ValueError, "latent: expected shape"),
    ({"latent": torch.zeros(6, 128, dtype=torch.int32)}, ValueError, "latent: expected bf16, f16 or f32"),
    ({"latent_dtype": "f8"}, TypeError, "latent_dtype: expected an element type"),
    ({"slot_mapping": None}, ValueError, "slot_mapping: expected a tensor, since cache is given, got none"),
    ({"slot_mapping": None, **KEYS}, ValueError, "slot_mapping: expected a tensor, since indexer_cache is given"),
    ({"cache": None}, ValueError, "slot_mapping: expected either cache or indexer_cache beside it, got none"),
    ({**KEYS, "cache": torch.zeros(2, 4, 128).bfloat16()}, ValueError, "slot_mapping: expected either cache or"),
    ({"slot_mapping": torch.tensor([-1] * 5 + [8])}, ValueError, "slot_mapping: expected slots below 8, got 8 for tok"),
    ({**KEYS, "slot_mapping": torch.tensor([-1] * 5 + [8])}, ValueError, "slot_mapping: expected slots below 8, got 8"),
    ({"cache": torch.zeros(2, 4, 126).bfloat16()}, ValueError, "cache: expected"),
    ({"cache": torch.zeros(2, 4, 128)}, TypeError, "cache: expected a KvCache"),
    ({"cache": libmla.KvCache("bf16")}, ValueError, "slot_mapping: expected either cache or indexer_cache beside it"),
    ({**KEYS, "indexer_page_size": 0}, ValueError, "indexer_page_size: expected at least 1, got 0"),
    ({**KEYS, "indexer_page_size": 8}, ValueError, "indexer_cache: expected"),
    ({**KEYS, "indexer_cache": torch.zeros(2, 528)}, ValueError, "indexer_cache: expected"),
    ({**KEYS, "overlap": False, "norm_weight": None, "latent": None, "state": torch.zeros(3, 8, 512)}, ValueError,
     "indexer_cache: expected latents of 128 channels, got 256"),
    ({"cos_sin": torch.rand(8, 64)}, ValueError, "cos_sin: expected a row for position 8, got 8 rows"),
    ({"cos_sin": torch.rand(12, 130)}, ValueError, "cos_sin: expected an even number of rotary channels from 2 to 128"),
    ({"cos_sin": torch.rand(12, 63)}, ValueError, "cos_sin: expected an even number of rotary channels"),
    ({"slot_mapping": None, "cache": None}, ValueError, "cos_sin: expected none, since neither cache nor indexer_ca"),
    ({"overlap": False, "ratio": 1}, ValueError, "score: expected none, since ratio is 1"),
    ({**ALONE, "position_bias": torch.zeros(1, 256)}, ValueError, "position_bias: expected none, since ratio is 1"),
    ({**ALONE, "state": torch.zeros(3, 8, 512)}, ValueError, "state: expected none, since ratio is 1"),
    ({**ALONE, "state_table": ints([0, 1])[:, None]}, ValueError, "state_table: expected none, since ratio is 1"),
    ({"context": 3}, TypeError, "context: expected"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "kind", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_errors_name_the_argument_and_nothing_is_written(
    changed: dict[str, Any], kind: type[Exception], message: str
) -> None:
    given = arguments()
    written = [given[name] for name in ("state", "cache", "latent")]
    named = {**given, "context": CPU, **changed}
    with pytest.raises(kind) as caught:
        libmla.compress(**named)
    assert str(caught.value).startswith(f"compress: {message}"), str(caught.value)
    assert all((tensor == UNTOUCHED).all() for tensor in written)
    assert (KEYS["indexer_cache"] == 77).all()


def test_the_call_that_is_spoiled_is_right() -> None:
    given = arguments()
    latent = libmla.compress(**given)
    assert (latent != UNTOUCHED).any(-1).nonzero().flatten().tolist() == [0, 5]  # positions 3 and 11
    changed = (given["cache"].view(-1, 128) != UNTOUCHED).any(-1)
    assert changed.nonzero().flatten().tolist() == [3]
    blocks = (given["state"] != UNTOUCHED).any(-1)
    assert [rows.nonzero().flatten().tolist() for rows in blocks] == [[0, 1, 2, 3], [], [3, 4]]


def test_gradients_and_plans_are_refused() -> None:
    given = arguments()
    given["kv"].requires_grad_()
    with torch.enable_grad(), pytest.raises(TypeError, match="compress: .*inference only"):
        libmla.compress(**given)
    with pytest.raises(TypeError, match="plan"):
        libmla.compress(**arguments(), plan=None)


def test_outputs_have_memory_of_their_own() -> None:
    given = arguments()
    given["latent"] = given["kv"][:, :128]
    with pytest.raises(ValueError, match="compress: latent: expected"):
        libmla.compress(**given)


def test_the_pool_is_what_gather_reads() -> None:
    kv, score = random_tokens(16, 512, torch.bfloat16)
    cache, batch = packed("fp8_dsv4", 4)
    slots = torch.full((16,), -1)
    slots[3::4] = torch.tensor(batch.all_slots())
    compressor = Compressor.make(4, False, 512, 4)
    latents = compressor(kv, score, 16, slot_mapping=slots, cache=cache)
    read = libmla.gather(cache, **batch.pages(), out_indptr=batches.indptr([4]))
    expected.check(read, latents.double(), 0.08)
