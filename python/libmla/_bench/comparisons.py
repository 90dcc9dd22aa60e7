# SPDX-License-Identifier: Apache-2.0
"""Draws figures that compare the same cases: on each backend of one run, and in two runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .drawing import (
    BETTER,
    FONT_SIZE,
    INK,
    MUTED,
    PAPER,
    WORSE,
    Drawing,
    log_axis,
    look,
    new_axes,
    ticks_between,
)
from .names import (
    BUSY,
    CASE_KEYS,
    EMULATED,
    case_tip,
    common_remark,
    label,
    plain_number,
    remark,
    slug,
    time_text,
    usual_values,
    varying_keys,
)
from .results import BenchRun, Result, ResultsError, groups

_ROW_LIMIT = 60  # cases of one figure


# Backends.


def backends(run: BenchRun) -> list[Drawing]:
    """Draws the time of every case that ran on two backends. Raises ResultsError if none did."""
    if not run.measured:
        raise ResultsError(EMULATED)
    keys = [key for key in CASE_KEYS if key not in ("device", "backend")]
    shared = [group for group in groups(run.measured, keys).values() if len({_runner(one) for one in group}) > 1]
    if not shared:
        raise ResultsError("no case was measured on two backends")
    return [_backends(run, shared[:_ROW_LIMIT], len(shared))]


def _runner(one: Result) -> str:
    return one["backend"] if one["device"] == "cpu" else f"{one['backend']} on {one['device']}"


def _backends(run: BenchRun, cases: Sequence[Sequence[Result]], total: int) -> Drawing:
    results = [one for case in cases for one in case]
    keys = varying_keys(results, without=("device", "backend"))
    usual = usual_values(results, keys)
    # Alphabetical colours and marks, so that two runs of the same backends look alike.
    names = sorted({_runner(one) for one in results})
    title = "Time of the same case on each backend"
    notes = [
        f"{_machines(run, results)}. Median of the runs, less is better; lines: from p10 to p90.",
        " ".join(text for text in (common_remark(results, ("backend",)), remark(usual), _cut(cases, total)) if text),
        _busy(run, results),
    ]
    figure, axes = new_axes(7.2, 0.8 + 0.3 * len(cases), title, notes)
    times = [one["median_us"] for one in results]
    axes.set(xscale="log", xlim=(min(times) / 1.35, max(times) * 1.35), ylim=(len(cases) - 0.4, -0.6))
    log_axis(axes.xaxis, ticks_between(*axes.get_xlim()), lambda us: time_text(us).replace(".00", "").replace(".0", ""))
    axes.set_yticks(range(len(cases)), [label(case[0], keys, usual) or case[0]["op"] for case in cases])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time of one run (logarithmic)")
    drawing = Drawing(slug(run.name, "backends"), title, "", figure)
    for row, case in enumerate(cases):
        for one in case:
            looks = look(names.index(_runner(one)))
            axes.plot([one["p10_us"], one["p90_us"]], [row, row], color=looks["color"], linewidth=1, alpha=0.55)
            (mark,) = axes.plot([one["median_us"]], [row], linestyle="", **looks)
            mark.set_markeredgecolor(PAPER)
            mark.set_markeredgewidth(0.6)
            drawing.tip(mark, case_tip(one))
        first, second = sorted(case, key=lambda one: one["median_us"])[:2]
        axes.annotate(
            _verdict(first, second), (1, row), xytext=(10, 0), va="center",
            xycoords=("axes fraction", "data"), textcoords="offset points", annotation_clip=False,
        )  # fmt: skip
    for i, name in enumerate(names):
        axes.plot([], [], linestyle="", markeredgecolor=PAPER, label=name, **look(i))
    _legend_below(axes, columns=3)
    fastest = statistics.mode(_runner(min(case, key=lambda one: one["median_us"])) for case in cases)
    drawing.summary = f"{title}: {len(cases)} cases, {len(names)} backends; {fastest} is the fastest most often."
    return drawing


def _verdict(first: Result, second: Result) -> str:
    ratio = f"{second['median_us'] / first['median_us']:.1f}"
    return f"{_runner(first)}: {'' if ratio == '1.0' else f'{ratio}× '}as fast as {_runner(second)}"


def _busy(run: BenchRun, results: Sequence[Result]) -> str:
    return next((text for one in results if (text := run.busy_text(one["device"]))), "")


def _legend_below(axes: Any, columns: int = 1) -> None:
    # Room for the axis' own texts, however high the axes are.
    below = FONT_SIZE * 4.2 / 72 / axes.figure.get_size_inches()[1]
    axes.legend(loc="upper left", bbox_to_anchor=(0, -below), ncols=columns, borderaxespad=0)


def _machines(run: BenchRun, results: Sequence[Result]) -> str:
    return "; ".join(run.machine_text(device) for device in dict.fromkeys(one["device"] for one in results))


def _cut(cases: Sequence[Any], total: int) -> str:
    return f"The first {len(cases)} of {total} cases." if total > len(cases) else ""


# Two runs.


def _matched(before: BenchRun, after: BenchRun) -> list[tuple[Result, Result]]:
    """Returns pairs of the cases that both runs have: on the same backend; if there are none, whatever the backend,
    device and threads."""
    for apart in ((), ("backend", "device", "threads")):
        keys = [key for key in CASE_KEYS if key not in apart]
        theirs = groups(before.measured, keys)
        # A case that was measured twice goes with its like, in order.
        pairs: list[tuple[Result, Result]] = []
        for values, ours in groups(after.measured, keys).items():
            pairs += zip(theirs.get(values, ()), ours, strict=False)
        if pairs:
            return pairs
    return []


def speed_up(before: Result, after: Result) -> float:
    return before["median_us"] / after["median_us"]


def certain(before: Result, after: Result) -> bool:
    """Returns whether the runs' times differ beyond their spread: the ranges from p10 to p90 do not meet."""
    return before["p10_us"] > after["p90_us"] or after["p10_us"] > before["p90_us"]


def runs(before: BenchRun, after: BenchRun) -> list[Drawing]:
    """Draws how much faster each case is in `after`, and the shares in both. Raises ResultsError without a common
    case."""
    if not before.measured or not after.measured:
        raise ResultsError(EMULATED)
    pairs = _matched(before, after)
    if not pairs:
        raise ResultsError(f"{before.name} and {after.name} have no case in common")
    shown = pairs[:_ROW_LIMIT]
    figure_notes = _runs_notes(before, after, pairs, len(shown))
    title = f"{after.name} against {before.name}"
    height = 0.8 + 0.3 * len(shown)
    figure, axes = new_axes(4.6, height, title, figure_notes, note_width=7.2, lift=10)
    drawing = Drawing(slug(before.name, "vs", after.name), title, "", figure)
    results = [one for pair in shown for one in pair]
    keys = varying_keys([after_one for _, after_one in shown])
    usual = usual_values(results, keys)
    axes.set(ylim=(len(shown) - 0.4, -0.6))
    axes.set_yticks(range(len(shown)), [label(one, keys, usual) or one["op"] for _, one in shown])
    axes.tick_params(axis="y", length=0)
    _draw_ratios(axes, drawing, shown)
    axes.set_xlabel(f"speed, {before.name} = 1")
    heading = f"{before.name} → {after.name}"
    if len(heading) <= 24:  # wider ones would reach into the other pair of axes
        axes.annotate(heading, (1, 1), xytext=(8, 3), xycoords="axes fraction", textcoords="offset points", color=MUTED)
    # new_axes made the first pair the whole figure: the second stands right of the first one's numbers.
    shares = figure.add_axes((1.42, 0, 0.62, 1), sharey=axes)
    shares.tick_params(axis="y", length=0, labelleft=False)
    _draw_shares(shares, shown, before.name, after.name)
    middle = statistics.median(speed_up(*pair) for pair in pairs)
    drawing.summary = (
        f"{title}: {len(pairs)} common case{'' if len(pairs) == 1 else 's'}, median speed {_times(middle)}; "
        f"{sum(certain(*pair) and speed_up(*pair) > 1 for pair in pairs)} faster and "
        f"{sum(certain(*pair) and speed_up(*pair) < 1 for pair in pairs)} slower beyond the spread of the runs."
    )
    return [drawing]


def _runs_notes(before: BenchRun, after: BenchRun, pairs: Sequence[tuple[Result, Result]], shown: int) -> list[str]:
    machines = [_machines(run, [pair[i] for pair in pairs]) for i, run in enumerate((before, after))]
    where = machines[0] if machines[0] == machines[1] else f"{before.name}: {machines[0]}; {after.name}: {machines[1]}"
    results = [one for pair in pairs for one in pair]
    other = len(before.results) + len(after.results) - 2 * len(pairs)
    left_out = f"{other} results have no partner and are left out." if other else ""
    noisy = any(one["noisy"] for one in results)
    changed = {(one["backend"], two["backend"]) for one, two in pairs if one["backend"] != two["backend"]}
    swaps = ", ".join(f"{one} against {two}" for two, one in sorted(changed))
    return [
        f"{where}. Grey: the ranges from p10 to p90 meet, so the difference may be noise.",
        " ".join(
            text
            for text in (common_remark(results, ("backend",) if swaps else ()), swaps and f"Backends: {swaps}.")
            if text
        ),
        " ".join(text for text in (left_out, _cut(range(shown), len(pairs)), BUSY if noisy else "") if text),
        " ".join(
            f"{run.name}: {text}"
            for i, run in enumerate((before, after))
            if (text := _busy(run, [pair[i] for pair in pairs]))
        ),
    ]


def _times(ratio: float) -> str:
    return f"1/{1 / ratio:.0f}" if ratio < 0.1 else f"{ratio:.{2 if ratio < 10 else 0}f}×"


def _draw_ratios(axes: Any, drawing: Drawing, pairs: Sequence[tuple[Result, Result]]) -> None:
    ratios = [speed_up(*pair) for pair in pairs]
    low, high = (
        min(0.93, *(ratio**1.12 / 1.04 for ratio in ratios)),
        max(1.07, *(ratio**1.12 * 1.04 for ratio in ratios)),
    )
    axes.set(xscale="log", xlim=(low, high))
    if high / low > 4:
        ticks = sorted({*ticks_between(low, high), 1.0})
    else:
        near = (0.95, 1, 1.05, 1.1) if high / low < 1.25 else (0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2)
        ticks = [tick for tick in near if low <= tick <= high]
    log_axis(axes.xaxis, ticks, lambda value: f"{plain_number(value)}×")
    axes.axvline(1, color=INK, linewidth=1.1, zorder=1)
    for row, (before, after) in enumerate(pairs):
        ratio = ratios[row]
        color = MUTED if not certain(before, after) else BETTER if ratio > 1 else WORSE
        axes.plot([1, ratio], [row, row], color=color, linewidth=2.2, solid_capstyle="butt")
        marker = "o" if color == MUTED else ">" if ratio > 1 else "<"
        (mark,) = axes.plot([ratio], [row], linestyle="", marker=marker, markersize=7, color=color)
        drawing.tip(mark, f"before: {case_tip(before)}\nafter: {case_tip(after)}")
        axes.annotate(
            f"{_times(ratio)}  {time_text(before['median_us'])} → {time_text(after['median_us'])}", (1, row),
            xytext=(8, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center",
            annotation_clip=False,
        )  # fmt: skip


def _draw_shares(axes: Any, pairs: Sequence[tuple[Result, Result]], before: str, after: str) -> None:
    axes.set_xlabel("share of the ceiling")
    top = min(2.0, max([1.0, *(one.share for pair in pairs for one in pair if one.share)]) * 1.04)
    axes.set(xlim=(0, top))
    step = 25 if top < 1.3 else 50
    ticks = range(0, int(100 * top) + 1, step)
    axes.set_xticks([tick / 100 for tick in ticks], [f"{tick} %" for tick in ticks])
    axes.axvline(1, color=INK, linewidth=1.1, zorder=1)
    for row, pair in enumerate(pairs):
        if None in (pair[0].share, pair[1].share):
            continue
        axes.plot([pair[0].share, pair[1].share], [row, row], color=MUTED, linewidth=1.2, zorder=1)
        axes.plot([pair[0].share], [row], "o", color=PAPER, markeredgecolor=INK, markeredgewidth=1.3, markersize=6.5)
        axes.plot([pair[1].share], [row], "o", color=INK, markersize=6.5)
    looks: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 6.5, "markeredgecolor": INK}
    axes.plot([], [], color=PAPER, label=before, **looks)
    axes.plot([], [], color=INK, label=after, **looks)
    _legend_below(axes)
