# SPDX-License-Identifier: Apache-2.0
"""Puts cases and numbers in words, for labels, remarks and tooltips."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .results import Result

# What makes a case, most telling first: labels are cut from the end, figures are split from the front.
CASE_KEYS = (
    "device", "op", "backend", "cache", "heads", "states", "topk", "extra_topk", "extra_cache", "to_cache", "batch", "q_len", "kv_len",
    "lengths", "page_size", "extra_page_size", "to_page_size", "q_dtype", "scales", "d_qk", "d_v", "causal", "sink",
    "window", "soft_cap", "alibi", "compute", "tree", "dcp", "prefix", "shared_prefix", "batch_invariant", "threads",
)  # fmt: skip


def count_text(count: int) -> str:
    """Returns a count as text: 4096 -> "4k", 1000 -> "1000"; k is 1024."""
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)


def time_text(us: float) -> str:
    """Returns a time as text, in three digits and the unit that suits."""
    for unit, scale in (("s", 1e6), ("ms", 1e3), ("µs", 1.0)):
        if us >= scale * 0.9995 or unit == "µs":
            value = us / scale
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"
    raise AssertionError


def percent_text(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def plain_number(value: float) -> str:
    """Returns a number as text that never has an exponent: 1234.0 -> "1,234", 0.25 -> "0.25"."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}" if value >= 1e-3 else f"{value:.6f}".rstrip("0")


_TEXTS: Mapping[str, Callable[[Any], str]] = {
    "heads": lambda value: f"{value} head{'' if value == 1 else 's'}",
    "batch": lambda value: f"batch {value}",
    "q_len": lambda value: f"q_len {value}",
    "kv_len": lambda value: f"kv {count_text(value)}",
    "page_size": lambda value: f"page size {value}",
    "topk": lambda value: f"topk {value}" if value else "",
    "extra_topk": lambda value: f"second pool {value}" if value else "",
    "extra_page_size": lambda value: f"its page size {value}" if value else "",
    "extra_cache": lambda value: f"of {value}" if value else "",
    "to_cache": lambda value: f"to {value}" if value else "",
    "to_page_size": lambda value: f"to page size {value}" if value else "",
    "q_dtype": lambda value: f"{value} queries",
    "scales": lambda value: f"{value} scales",
    "d_qk": lambda value: f"d_qk {value}",
    "d_v": lambda value: f"d_v {value}",
    "states": lambda value: f"{value} states" if value else "",
    "lengths": lambda value: f"{value} lengths",
    "causal": lambda value: "causal" if value else "not causal",
    "sink": lambda value: "sink" if value else "",
    "window": lambda value: f"window {value}" if value >= 0 else "",
    "soft_cap": lambda value: f"soft cap {value:g}" if value else "",
    "alibi": lambda value: "alibi" if value else "",
    "compute": lambda value: f"compute {value}" if value != "default" else "",
    "tree": lambda value: f"tree {value}" if value != "none" else "",
    "dcp": lambda value: f"{value} ranks" if value > 1 else "",
    "prefix": lambda value: f"prefix of {count_text(value)}" if value else "",
    "shared_prefix": lambda value: "prefix read once" if value else "",
    "batch_invariant": lambda value: "batch invariant" if value else "",
    "threads": lambda value: f"{value} thread{'' if value == 1 else 's'}",
}


def key_text(key: str, value: Any) -> str:
    """Returns what a label says of a case's key, an empty text if it says nothing: ("kv_len", 4096) -> "kv 4k"."""
    if value is None:
        return ""
    return _TEXTS[key](value) if key in _TEXTS else str(value)


_ON_A_CACHE = ("decode", "decode_sparse", "append", "append_rope", "gather", "copy_pages", "compress")

# Keys that have no meaning for an operation, or that stand there with whatever the command line's default is.
_NO_HEADS = (
    "append", "gather", "copy_pages", "block_table_to_csr", "physical_slots", "append_indexer", "top_k", "compress",
)  # fmt: skip
_NO_PAGES = ("prefill", "prefill_sparse", "merge_states", "top_k", "finish_output")


def _means_something(key: str, op: str) -> bool:
    return not (key == "heads" and op in _NO_HEADS or key == "page_size" and op in _NO_PAGES)


def varying_keys(results: Sequence[Result], without: Iterable[str] = ()) -> list[str]:
    """Returns the keys that tell the cases apart, most telling first, but none that follows from those before it."""
    skipped = set(without)
    kept: list[str] = []
    parts: list[tuple[str, ...]] = [()] * len(results)
    for key in CASE_KEYS:
        if key in skipped:
            continue
        finer = [
            (*part, repr(one[key]) if _means_something(key, one["op"]) else "")
            for part, one in zip(parts, results, strict=True)
        ]
        if len(set(finer)) > len(set(parts)):
            kept.append(key)
            parts = finer
    return kept


def label(one: Result, keys: Iterable[str], usual: Mapping[str, Any] | None = None) -> str:
    """Returns a text that names the case by the given keys; those that have their usual value are left out."""
    usual = usual or {}
    parts = [
        key_text(key, one[key])
        for key in keys
        if _means_something(key, one["op"]) and (key not in usual or usual[key] != one[key])
    ]
    return ", ".join(part for part in parts if part)


# Rarely asked for: a label names them only where they are not what most cases have.
_MINOR = CASE_KEYS[CASE_KEYS.index("to_cache") :]


def usual_values(results: Sequence[Result], keys: Iterable[str]) -> dict[str, Any]:
    """Returns the value that most cases have, of each varying key that labels may leave out."""
    usual = {}
    for key in keys:
        if key in _MINOR and key != "kv_len":
            counts = Counter(one[key] for one in results if _means_something(key, one["op"]))
            value, count = counts.most_common(1)[0]
            if 3 * count > 2 * counts.total():
                usual[key] = value
    return usual


def common_text(results: Sequence[Result], keys: Iterable[str]) -> str:
    """Returns what all of these cases have in common in the named keys, as a label."""
    constant = [key for key in keys if len({repr(one[key]) for one in results}) == 1]
    return label(results[0], constant)


def length_key(results: Sequence[Result]) -> str:
    """Returns the key of what a query's work grows with: its indices in sparse attention, else the tokens of its
    request."""
    return "topk" if all(one["op"] in ("decode_sparse", "prefill_sparse") for one in results) else "kv_len"


EMULATED = "every result is from the emulator, whose times say nothing about a GPU"
BUSY = "Shares above 100 %: the machine was busy while its ceiling was measured."

CEILINGS: Mapping[str, str] = {
    "amx": "AMX peak",
    "bf16": "bf16 peak",
    "f32": "f32 peak",
    "f32_avx2": "f32 peak of AVX2",
    "memcpy": "copy bandwidth",
    "dram": "DRAM read bandwidth",
    "l3": "L3 read bandwidth",
    "gpu_read": "memory read bandwidth",
    "gpu_copy": "memory copy bandwidth",
    "mma_bf16": "bf16 mma.sync peak",
    "mma_e4m3": "e4m3 mma.sync peak",
    "wgmma_bf16": "bf16 wgmma peak",
}


def gpu_peaks(gpu: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Returns the arithmetic peaks among a GPU's ceilings: kind -> (name, GFLOP/s)."""
    found = {}
    for kind in ("mma_bf16", "mma_e4m3", "wgmma_bf16"):
        if value := gpu.get(f"{kind}_gflops"):
            # On SM90 and SM100 ptxas makes conversions and f16 products of e4m3 ones: the peak is not e4m3's own.
            converted = kind == "mma_e4m3" and gpu.get("mma_e4m3_converted")
            found[kind] = (CEILINGS[kind] + (" (converted to f16)" if converted else ""), value)
    return found


def speed_text(gflops: float) -> str:
    return f"{plain_number(gflops / 1000)} TFLOP/s" if gflops >= 10e3 else f"{plain_number(gflops)} GFLOP/s"


def case_tip(one: Result) -> str:
    """Returns the text of one mark's tooltip, which says everything about the case."""
    keys = ("op", "backend", "cache", "heads", "batch", "q_len", "kv_len", "topk")
    lines = [label(one, keys), f"median {time_text(one['median_us'])}"]
    lines[-1] += f" (p10 {time_text(one['p10_us'])}, p90 {time_text(one['p90_us'])})"
    if one["gflops"] > 0:
        lines.append(f"{speed_text(one['gflops'])}, {plain_number(one['gbps'])} GB/s")
    else:
        lines.append(f"{plain_number(one['gbps'])} GB/s")
    if one.share is not None:
        lines.append(f"{percent_text(one.share, 1)} of the {CEILINGS.get(one['ceiling_kind'], 'ceiling')}")
    return "\n".join(lines)


def remark(usual: Mapping[str, Any]) -> str:
    texts = [text for key, value in usual.items() if (text := key_text(key, value))]
    return f"Unless a label says otherwise: {', '.join(texts)}." if texts else ""


def common_remark(results: Sequence[Result], without: Sequence[str] = ()) -> str:
    shown = ("backend", "cache", "heads", "topk", "batch", "q_len", "kv_len", "page_size")
    text = common_text(results, [key for key in shown if key not in without])
    if results[0]["op"] in _ON_A_CACHE:
        text = re.sub(rf"\b{results[0]['cache']}(?=,|$)", r"\g<0> cache", text)
    return f"All cases: {text}." if text and len(results) > 1 else text


def slug(*parts: str) -> str:
    return "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in part) for part in parts if part)
