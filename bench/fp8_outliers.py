# SPDX-License-Identifier: Apache-2.0
"""Measures what compute="fp8" does to the output of decode where a few channels are much larger than the others.

    python bench/fp8_outliers.py [--heads 16] [--kv-len 512] [--queries 16] [--channels 4] [--factors 30 1000]
                                 [--spread 2] [--seed 1] [--json FILE]

Queries and rows are of normal distribution, rounded to bf16. Outliers are latent channels that are FACTOR times as large:

    queries, keys, both  in the one, in the other, in the same channels of both
    cancelling           in queries, in pairs of channels: keys are equal in the two, queries opposite, but for a
                         difference of about the usual size, so that little of the large numbers is in a score

Scores have the same standard deviation in every line, --spread, so that softmax is as sharp with outliers as without.

Everything is computed by the float64 reference, so that errors are those of the method and of the format alone:

    fp8 / default    compute="fp8" against compute="default" over the same cache: what the rounded products cost
    default / exact  compute="default" against float64 over the rows before they were quantized: what the cache costs
    fp8 / exact      both together

An error is ||a - b|| / ||b|| of one query's head, each channel in units of its size in the rows, so that large channels do
not hide the others: root mean square over queries and heads. "worst" is the largest of the column before it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import libmla

FORMATS = {"fp8": (512, 576), "fp8_ds_mla": (512, 576), "fp8_dsv4": (448, 512)}
"""Holds the latent channels and the channels of a row of each format; fp8_dsv4's value is the whole row."""
PLACES = ("queries", "keys", "both", "cancelling")
D_V, PAGE_SIZE = 512, 64


@dataclass(frozen=True)
class Problem:
    """Holds queries [T, H, d_qk] f32 and rows [kv_len, d_qk] bf16 of one request, both without a causal limit."""

    q: torch.Tensor
    rows: torch.Tensor
    sizes: torch.Tensor  #: [d_qk]: how much larger than usual a channel of the rows is
    sm_scale: float


@dataclass(frozen=True)
class Line:
    """Holds the errors of one format and kind of outliers; README of the columns: the head of this file."""

    cache: str
    outliers: str  #: "none", or one of PLACES
    factor: float  #: 1 for none
    fp8_default: float
    fp8_default_worst: float
    default_exact: float
    fp8_exact: float
    fp8_exact_worst: float


def problem(options: argparse.Namespace, cache: str, place: str, factor: float) -> Problem:
    """Returns the same numbers for each place and factor, but for the channels that are larger."""
    latent, width = FORMATS[cache]
    generator = torch.Generator().manual_seed(options.seed)
    q = torch.randn(options.queries, options.heads, width, generator=generator)
    rows = torch.randn(options.kv_len, width, generator=generator)
    chosen = torch.randperm(latent, generator=generator)[: options.channels]
    of_queries, of_keys = torch.ones(width), torch.ones(width)
    if place in ("queries", "both"):
        of_queries[chosen] = factor
    if place in ("keys", "both"):
        of_keys[chosen] = factor
    if place == "cancelling":
        one, other = chosen[::2], chosen[1::2]
        rows[:, other] = rows[:, one]
        q[..., one] *= factor
        q[..., other] -= q[..., one]
    q, rows = (q * of_queries).bfloat16().float(), (rows * of_keys).bfloat16()
    spread = (q.double() @ rows.double().T).std(-1).mean().item()
    return Problem(q, rows, of_keys, options.spread / spread)


def exact(one: Problem) -> torch.Tensor:
    """Returns the attention over the rows as they are, in float64."""
    rows = one.rows.double()
    return (one.q.double() @ rows.T * one.sm_scale).softmax(-1) @ rows[:, :D_V]


def filled_cache(name: str, rows: torch.Tensor) -> libmla.KvCache:
    """Returns a cache that holds the rows; fp8 has the scale that calibration on them would give."""
    pages = -(-len(rows) // PAGE_SIZE)
    if name == "fp8_dsv4":
        data = torch.zeros(pages, libmla.page_bytes(name, rows.shape[1], PAGE_SIZE, padded=True), dtype=torch.uint8)
        cache = libmla.KvCache(name, data, page_size=PAGE_SIZE)
    elif name == "fp8_ds_mla":
        data = torch.zeros(pages, PAGE_SIZE, libmla.row_bytes(name, rows.shape[1]), dtype=torch.uint8)
        cache = libmla.KvCache(name, data)
    else:
        data = torch.zeros(pages, PAGE_SIZE, rows.shape[1], dtype=torch.uint8)
        cache = libmla.KvCache(name, data, ckv_scale=(rows.float().abs().max() / 448).reshape(1))
    libmla.append(rows, torch.arange(len(rows)), cache)
    return cache


def computed(one: Problem, cache: libmla.KvCache, compute: str) -> torch.Tensor:
    """Returns what the reference computes of queries that all see every key."""
    pages = -(-len(one.rows) // PAGE_SIZE)
    return libmla.decode(
        one.q,
        cache,
        kv_len=torch.tensor([len(one.rows)], dtype=torch.int32),
        block_table=torch.arange(pages, dtype=torch.int32)[None],
        sm_scale=one.sm_scale,
        causal=False,
        compute=compute,
        d_v=D_V,
        context=libmla.Context(backend="reference"),
    ).double()


def error(got: torch.Tensor, wanted: torch.Tensor, sizes: torch.Tensor) -> tuple[float, float]:
    """Returns the root mean square and the largest error of a query's head."""
    of_heads = ((got - wanted) / sizes).norm(dim=-1) / (wanted / sizes).norm(dim=-1)
    return of_heads.square().mean().sqrt().item(), of_heads.max().item()


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """Yields a line for each format and kind of outliers."""
    for cache in FORMATS:
        for place, factor in [("none", 1.0), *((place, f) for place in PLACES for f in options.factors)]:
            one = problem(options, cache, place, factor)
            stored = filled_cache(cache, one.rows)
            fp8, default = (computed(one, stored, compute) for compute in ("fp8", "default"))
            true, sizes = exact(one), one.sizes[:D_V].double()
            yield Line(
                cache,
                place,
                factor,
                *error(fp8, default, sizes),
                error(default, true, sizes)[0],
                *error(fp8, true, sizes),
            )


def markdown(found: Sequence[Line]) -> str:
    header = ("cache", "outliers", "fp8 / default", "worst", "default / exact", "fp8 / exact", "worst")
    rows = [header, ("---", "---", *["---:"] * 5)]
    for line in found:
        where = line.outliers if line.factor == 1 else f"{line.outliers}, {line.factor:g}x"
        numbers = (line.fp8_default, line.fp8_default_worst, line.default_exact, line.fp8_exact, line.fp8_exact_worst)
        rows.append((f"`{line.cache}`", where, *(f"{100 * number:.1f} %" for number in numbers)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    add = parser.add_argument
    add("--heads", type=int, default=16, help="query heads")
    add("--kv-len", type=int, default=512, help="keys")
    add("--queries", type=int, default=16, help="query tokens")
    add("--channels", type=int, default=4, help="outlier channels, an even number")
    add("--factors", type=float, nargs="+", default=[30, 1000], help="how many times as large they are")
    add("--spread", type=float, default=2.0, help="standard deviation of the scores of a query")
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="write the lines there, too")
    options = parser.parse_args(arguments)
    found = list(lines(options))
    print(markdown(found))
    if options.json:
        options.json.write_text(json.dumps([asdict(line) for line in found], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
