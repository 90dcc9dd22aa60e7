# SPDX-License-Identifier: Apache-2.0
"""The cases in which libmla is compared with its peers: what README's chart shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    group: str  #: the row of the chart
    name: str  #: which case of the group
    operation: str  #: a key of problems.PROBLEMS
    shape: Mapping[str, Any]  #: its arguments


def _length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _decode() -> list[Case]:
    batches = [(1, 32768), (4, 1024), (16, 4096), (32, 8192), (64, 4096), (100, 2047), (128, 8192)]
    shapes = [(heads, 1, batch, kv) for heads in (128, 64, 32) for batch, kv in batches]
    shapes += [(128, 2, batch, 4096) for batch in (4, 32, 128)]
    shapes += [(16, 1, batch, kv) for batch, kv in ((1, 4096), (1, 32768), (16, 4096), (64, 4096), (128, 8192))]
    shapes += [(16, 4, 32, 4096)]
    return [
        Case(
            f"decode bf16, {heads} heads" + (f", {q_len} queries" if q_len > 1 else ""),
            f"batch {batch}, kv {_length(kv_len)}",
            "decode",
            {"batch": batch, "q_len": q_len, "heads": heads, "kv_len": kv_len},
        )
        for heads, q_len, batch, kv_len in shapes
    ]


def _decode_ragged() -> list[Case]:
    return [
        Case(
            f"decode bf16, {heads} heads, ragged",
            f"batch {batch}, kv {_length(median)} in the median",
            "decode",
            {"batch": batch, "q_len": 1, "heads": heads, "kv_len": median, "ragged": True},
        )
        for heads in (128, 64, 16)
        for batch, median in ((8, 4096), (32, 2048), (128, 2048))
    ]


def _decode_fp8() -> list[Case]:
    return [
        Case(
            f"decode fp8, {heads} heads",
            f"batch {batch}, kv {_length(kv_len)}",
            "decode",
            {"batch": batch, "q_len": 1, "heads": heads, "kv_len": kv_len, "cache": "fp8"},
        )
        for heads in (128, 16)
        for batch, kv_len in ((16, 4096), (64, 8192))
    ]


def _decode_sparse() -> list[Case]:
    shapes = [(heads, batch, "fp8_ds_mla", 2048, 0) for heads in (128, 64) for batch in (1, 16, 64, 128)]
    shapes += [(heads, batch, "fp8_dsv4", 512, extra) for heads in (128, 64) for extra in (0, 128) for batch in (1, 64)]
    return [
        Case(
            f"sparse decode {cache}, {heads} heads",
            f"topk {topk}" + (f" and a second pool of {extra}" if extra else "") + f", batch {batch}",
            "decode_sparse",
            {"batch": batch, "heads": heads, "cache": cache, "topk": topk, "extra_topk": extra},
        )
        for heads, batch, cache, topk, extra in shapes
    ]


def _prefill_sparse() -> list[Case]:
    return [
        Case(
            "sparse prefill",
            f"4096 queries of {heads} heads, {d_qk}/512, topk {topk}",
            "prefill_sparse",
            {"queries": 4096, "keys": 32768, "heads": heads, "topk": topk, "d_qk": d_qk},
        )
        for heads, topk, d_qk in ((128, 2048, 576), (64, 2048, 576), (128, 512, 512))
    ]


def _prefill() -> list[Case]:
    shapes = [(8, 1024, 16), (1, 8192, 16), (4, 512, 128), (4, 1024, 128), (1, 4096, 128), (1, 8192, 128)]
    return [
        Case(
            "prefill 192/128, causal",
            f"{batch} x {_length(length)}, {heads} heads",
            "prefill",
            {"batch": batch, "length": length, "heads": heads},
        )
        for batch, length, heads in shapes
    ]


def _indexer() -> list[Case]:
    shapes = [(1, 1, 131072, 64), (16, 1, 8192, 64), (64, 1, 32768, 64), (16, 2, 32768, 64), (64, 1, 32768, 32)]
    return [
        Case(
            "indexer logits" + (", compute = exact" if compute == "exact" else ""),
            f"{heads} heads, " + (f"{q_len} queries, " if q_len > 1 else "") + f"{batch} x {_length(kv_len)}",
            "indexer_logits",
            {"batch": batch, "q_len": q_len, "kv_len": kv_len, "heads": heads, "compute": compute},
        )
        for compute in ("default", "exact")
        for batch, q_len, kv_len, heads in shapes
    ]


CASES = [*_decode(), *_decode_ragged(), *_decode_fp8(), *_decode_sparse(), *_prefill_sparse(), *_prefill(), *_indexer()]
