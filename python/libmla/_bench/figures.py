# SPDX-License-Identifier: Apache-2.0
"""Draws figures of one run under its ceilings: the roofline, and the share of the ceiling by length."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .drawing import (
    INK,
    MUTED,
    PAPER,
    Drawing,
    EndLabel,
    along_line,
    end_labels,
    log_axis,
    look,
    new_axes,
    ticks_between,
)
from .names import (
    BUSY,
    CEILINGS,
    EMULATED,
    case_tip,
    common_remark,
    count_text,
    gpu_peaks,
    label,
    length_key,
    percent_text,
    plain_number,
    remark,
    slug,
    speed_text,
    usual_values,
    varying_keys,
)
from .results import BenchRun, Result, ResultsError, groups

_SERIES_LIMIT = 14  # lines or colours that a reader still tells apart in one figure


# Roofline.


def _peaks(run: BenchRun, device: str, results: Sequence[Result]) -> list[tuple[str, float]]:
    """Returns the arithmetic ceilings that bound these results: name and GFLOP/s of each."""
    kinds = {one["ceiling_kind"] for one in results}
    if device != "cpu":
        of_gpu = gpu_peaks(run.gpu_ceilings(device) or {})
        # Where nothing multiplies e4m3, its line would only be one more.
        found = [peak for kind, peak in of_gpu.items() if kind != "mma_e4m3" or kind in kinds]
    else:
        found = [
            (CEILINGS[kind], run.ceilings.get(f"{kind}_gflops", 0.0))
            for kind in ("amx", "bf16", "f32", "f32_avx2")
            if kind in kinds
        ]
    peaks: list[tuple[str, float]] = []
    for name, value in found:
        if not value:
            continue
        if peaks and abs(value / peaks[-1][1] - 1) < 0.1:  # one line: their names would cover each other
            peaks[-1] = (f"{peaks[-1][0]} and {name}", peaks[-1][1])
        else:
            peaks.append((name, value))
    return peaks


def _slopes(run: BenchRun, device: str) -> list[tuple[str, float]]:
    """Returns the measured bandwidths: name and GB/s of each."""
    if device != "cpu":
        found = [("memory read", (run.gpu_ceilings(device) or {}).get("read_gbps"))]
    else:
        found = [("DRAM read", run.ceilings.get("dram_gbps")), ("L3 read", run.ceilings.get("l3_gbps"))]
    return [(name, value) for name, value in found if value]


def _draw_roofs(axes: Any, peaks: Sequence[tuple[str, float]], slopes: Sequence[tuple[str, float]], unit: str) -> None:
    """Draws the lines that bound every mark, named along themselves. The limits of the axes must be final."""
    low, high = axes.get_xlim()
    bottom = axes.get_ylim()[0]
    scale = 1e-3 if unit == "TFLOP/s" else 1.0
    top_peak, top_slope = max(value for _, value in peaks), max(value for _, value in slopes)
    for name, peak in peaks:
        axes.plot([peak / top_slope, high], [peak * scale] * 2, color=INK, linewidth=1.1, zorder=1)
        ridge = peak / slopes[0][1]
        at_left = ridge < low**0.35 * high**0.65  # behind that there is too little room
        axes.annotate(
            f"{name}, {plain_number(peak * scale)} {unit}", (ridge if at_left else high, peak * scale),
            xytext=(12 if at_left else -3, 3), ha="left" if at_left else "right", textcoords="offset points",
            color=MUTED,
        )  # fmt: skip
    for name, slope in slopes:
        axes.plot([low, top_peak / slope], [low * slope * scale, top_peak * scale], color=INK, linewidth=1.1, zorder=1)
        start = max(low, bottom / (slope * scale)) * 1.3
        text = f"{name}, {plain_number(slope)} GB/s"
        along_line(axes, (start, start * slope * scale), (top_peak / slope, top_peak * scale), text)


def roofline(run: BenchRun) -> list[Drawing]:
    """Draws one figure for each device. Raises ResultsError if no result has arithmetic and ceilings."""
    if not run.measured:
        raise ResultsError(EMULATED)
    drawings = []
    for (device,), results in groups(run.measured, ("device",)).items():
        usable = [one for one in results if one.intensity is not None]
        if device == "cpu" and run.ceilings.get("threads") is not None:
            usable = [one for one in usable if one["threads"] == run.ceilings["threads"]]
        peaks, slopes = _peaks(run, device, usable), _slopes(run, device)
        if usable and peaks and slopes:
            drawings.append(_roofline(run, device, usable, len(results) - len(usable)))
    if not drawings:
        raise ResultsError("no result has arithmetic and measured ceilings to stand under")
    return drawings


def _roofline(run: BenchRun, device: str, results: Sequence[Result], left_out: int) -> Drawing:
    peaks, slopes = _peaks(run, device, results), _slopes(run, device)
    unit = "TFLOP/s" if max(value for _, value in peaks) >= 20e3 else "GFLOP/s"
    scale = 1e-3 if unit == "TFLOP/s" else 1.0
    keys = varying_keys(results, without=("device", "kv_len", "lengths"))
    while len(groups(results, keys)) > _SERIES_LIMIT:
        keys.pop()
    operations = sorted({one["op"] for one in results})
    title = f"Roofline of {operations[0] if len(operations) == 1 else f'{len(operations)} operations'}"
    omitted = f"{left_out} case{'' if left_out == 1 else 's'} without arithmetic or with other threads left out."
    busy = any(one["gflops"] > 1.02 * max(value for _, value in peaks) or one["noisy"] for one in results)
    notes = [
        f"{run.machine_text(device)}. {omitted if left_out else ''}",
        common_remark(results),
        "Marks above their line: the machine was busy while its ceilings were measured." if busy else "",
        run.busy_text(device),
    ]
    figure, axes = new_axes(7.2, 4.8, title, notes)
    intensities = [one.intensity or 1.0 for one in results]
    speeds = [one["gflops"] * scale for one in results]
    ridges = [peaks[0][1] / slope for _, slope in slopes]
    axes.set(xscale="log", yscale="log")
    axes.set_xlim(min(*intensities, *ridges) / 4, max(*intensities, *ridges) * 3)
    axes.set_ylim(
        min(*speeds, peaks[0][1] * scale / 8) / 1.6, max(*speeds, *(value * scale for _, value in peaks)) * 1.6
    )
    log_axis(axes.xaxis, ticks_between(*axes.get_xlim(), base=2), plain_number)
    log_axis(axes.yaxis, ticks_between(*axes.get_ylim()), plain_number)
    axes.set_xlabel("arithmetic intensity (flop per byte that must move)")
    axes.set_ylabel(f"speed ({unit})")
    _draw_roofs(axes, peaks, slopes, unit)
    drawing = Drawing(slug(run.name, "roofline", "" if device == "cpu" else device), title, "", figure)
    labels = []
    usual = usual_values(results, keys)
    for i, (_, group) in enumerate(groups(results, keys).items()):
        for one in group:
            (mark,) = axes.plot([one.intensity or 1.0], [one["gflops"] * scale], linestyle="", **look(i))
            mark.set_markeredgecolor(PAPER)
            mark.set_markeredgewidth(0.6)
            drawing.tip(mark, case_tip(one))
        best = max(group, key=lambda one: one["gflops"])
        text = label(best, keys, usual)
        if text:
            labels.append(EndLabel(best.intensity or 1.0, best["gflops"] * scale, text, look(i)["color"]))
    end_labels(axes, labels)
    best = max(results, key=lambda one: one["gflops"])
    drawing.summary = (
        f"{title} on {run.machine_text(device)}: {len(results)} cases against the measured ceilings; the fastest reaches "
        f"{speed_text(best['gflops'])}."
    )
    return drawing


# Share of the ceiling.


def _split(results: Sequence[Result], length: str) -> list[tuple[list[str], list[Result]]]:
    """Splits results into parts with few enough lines for one figure, each with the keys that set it apart from the
    others."""
    parts: list[tuple[list[str], list[Result]]] = [([], list(results))] if results else []
    for key in ("backend", "cache", "heads", "batch", "q_len"):
        finer = []
        for apart, part in parts:
            by_key = groups(part, (key,)).values()
            if len(by_key) == 1 or len(groups(part, varying_keys(part, without=(length,)))) <= _SERIES_LIMIT:
                finer.append((apart, part))
            else:
                finer += [([*apart, key], group) for group in by_key]
        parts = finer
    return parts


def share(run: BenchRun) -> list[Drawing]:
    """Draws one figure, or several if it had too many lines, for each device and operation that was measured at two
    lengths. Raises ResultsError if none was."""
    if not run.measured:
        raise ResultsError(EMULATED)
    drawings = []
    for (device, op), results in groups(run.measured, ("device", "op")).items():
        usable = [one for one in results if one.share is not None]
        length = length_key(usable)
        lines = [
            line
            for line in groups(usable, varying_keys(usable, (length,))).values()
            if len({one[length] for one in line}) > 1
        ]
        for apart, part in _split([one for line in lines for one in line], length):
            drawings.append(_share(run, device, op, part, apart))
    if not drawings:
        raise ResultsError("no operation was measured at two lengths with a ceiling")
    several = len({drawing.title for drawing in drawings}) > 1
    for drawing in drawings:
        drawing.name = slug(run.name, "share", drawing.name if several else "")
    return drawings


def _share(run: BenchRun, device: str, op: str, results: Sequence[Result], apart: Sequence[str]) -> Drawing:
    length = length_key(results)
    keys = varying_keys(results, without=(length, "device", "op"))
    usual = usual_values(results, keys)
    kinds = {one["ceiling_kind"] for one in results}
    of_what = CEILINGS.get(kinds.pop(), "ceiling") if len(kinds) == 1 else "ceiling that bounds the case"
    where = "" if device == "cpu" else f" on {device}"
    set_apart = f", {text}" if (text := label(results[0], apart)) else ""
    title = f"{op}{set_apart}{where}: share of the ceiling by {'topk' if length == 'topk' else 'kv length'}"
    noisy = any(one["noisy"] for one in results)
    notes = [
        f"{run.machine_text(device)}. Thin bars: from the slow (p90) to the fast (p10) runs.",
        " ".join(text for text in (common_remark(results, apart), remark(usual)) if text),
        f"Hollow marks: {BUSY[0].lower()}{BUSY[1:]}" if noisy else "",
        run.busy_text(device),
    ]
    figure, axes = new_axes(7.2, 4.2, title, notes)
    lengths = sorted({one[length] for one in results})
    top = min(2.0, max(1.0, *(one.share or 0.0 for one in results)) * 1.06)
    axes.set(xscale="log", xlim=(lengths[0] / 1.25, lengths[-1] * 1.12), ylim=(0, top))
    log_axis(axes.xaxis, _sparse(lengths), count_text)
    ticks = range(0, int(100 * top) + 1, 20)
    axes.set_yticks([tick / 100 for tick in ticks], [f"{tick} %" for tick in ticks])
    axes.set_xlabel(f"{_length_text(op, length)} (k = 1024)")
    axes.set_ylabel(f"share of the {of_what}")
    axes.axhline(1, color=INK, linewidth=1.1, zorder=1)
    drawing = Drawing(
        "-".join([op, *(str(results[0][key]) for key in apart), *([device] if where else [])]), title, "", figure
    )
    labels = []
    lines = groups(results, keys)
    # Side by side, so that the bars of one length do not cover each other.
    step = min(0.006, 0.05 / len(lines)) * math.log(lengths[-1] / lengths[0])
    for i, group in enumerate(lines.values()):
        line = sorted(group, key=lambda one: one[length])
        shift = math.exp((i - (len(lines) - 1) / 2) * step)
        _share_line(axes, drawing, line, [one[length] * shift for one in line], look(i))
        end = (line[-1][length] * shift, min(line[-1].share or 0, top))
        labels.append(EndLabel(*end, label(line[0], keys, usual) or "all cases", look(i)["color"]))
    if len(labels) > 1:
        end_labels(axes, labels)
    low, high = min(one.share or 0 for one in results), max(one.share or 0 for one in results)
    drawing.summary = (
        f"{title}: {percent_text(low)} to {percent_text(high)} of the {of_what} on {run.machine_text(device)}."
    )
    return drawing


def _length_text(op: str, length: str) -> str:
    if length == "topk":
        return "cached tokens that a query attends to, topk"
    return "logits of a row" if op == "top_k" else "tokens of each request, kv_len"


def _sparse(ticks: Sequence[int]) -> list[int]:
    """Leaves out the ticks that would touch their neighbour on a logarithmic axis."""
    kept: list[int] = []
    gap = (ticks[-1] / ticks[0]) ** 0.045
    for tick in ticks:
        if not kept or tick >= kept[-1] * gap:
            kept.append(tick)
    return kept


def _share_line(
    axes: Any, drawing: Drawing, line: Sequence[Result], at: Sequence[float], looks: Mapping[str, Any]
) -> None:
    # A case that was measured twice has two marks; the line runs between them.
    by_x: dict[float, list[float]] = {}
    for x, one in zip(at, line, strict=True):
        by_x.setdefault(x, []).append(one.share or 0.0)
    axes.plot(list(by_x), [statistics.fmean(shares) for shares in by_x.values()], color=looks["color"], zorder=2)
    for x, one in zip(at, line, strict=True):
        axes.plot([x, x], one.share_range, color=looks["color"], linewidth=1, alpha=0.55, zorder=2)
        (mark,) = axes.plot([x], [one.share], linestyle="", zorder=3, **looks)
        mark.set_markerfacecolor(PAPER if one["noisy"] else looks["color"])
        mark.set_markeredgecolor(looks["color"] if one["noisy"] else PAPER)
        mark.set_markeredgewidth(1.4 if one["noisy"] else 0.6)
        drawing.tip(mark, case_tip(one))
