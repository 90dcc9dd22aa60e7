# SPDX-License-Identifier: Apache-2.0
"""Writes bench results as one HTML page that needs nothing else: the command `libmla report RESULTS.json...`.

Figures are inline SVG, style and script stand in the page, and nothing is fetched: the page can be mailed, kept beside
a build, or opened from a disk. Without scripts the tables still stand there, unsorted.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ._arguments import Parser
from ._bench.drawing import Drawing, MissingMatplotlib
from ._bench.names import (
    CASE_KEYS,
    CEILINGS,
    common_text,
    gpu_peaks,
    percent_text,
    plain_number,
    speed_text,
    time_text,
    varying_keys,
)
from ._bench.results import BenchRun, Result, ResultsError, load_all
from .plot import KINDS, draw

_READING = """
<h2 id="reading">How to read this</h2>
<dl>
<dt>median, p10, p90</dt><dd>time of one run; the plan is not part of it. A p90 far above the median: other work ran on
the machine.</dd>
<dt>GFLOP/s</dt><dd>two flops for every multiply-add of a visible key, score and value</dd>
<dt>GB/s</dt><dd>every input read once and every output written once</dd>
<dt>share, of</dt><dd>what was reached of the ceiling that bounds the case, measured in the same process between its
runs. Compare shares, rather than times, between machines. A share above 100 % says that the ceiling was measured while
the machine was busy.</dd>
<dt>roofline</dt><dd>a case cannot be faster than the lines above it: to the left the memory's bandwidth, to the right
the arithmetic peak. Data that stay in a nearer cache may pass a slower memory's line.</dd>
</dl>
"""


@dataclass(frozen=True)
class _Column:
    """Describes one column of the table of results. `sort` gives what it sorts by, None if a case has no value."""

    title: str
    text: Callable[[Result], str]
    sort: Callable[[Result], float | str | None]
    number: bool = True
    html: Callable[[Result], str] | None = None  #: instead of the escaped text


def _value_text(one: Result, key: str) -> str:
    value = one[key]
    return "-" if value is None or value == "" else ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _case_column(key: str, results: Sequence[Result]) -> _Column:
    numeric = all(isinstance(one[key], (int, float)) and not isinstance(one[key], bool) for one in results)
    sort = (lambda one: one[key]) if numeric else (lambda one: _value_text(one, key))
    return _Column(key, lambda one: _value_text(one, key), sort, numeric)


def _share_html(one: Result) -> str:
    if one.share is None:
        return "-"
    filled = max(0.0, min(1.0, one.share))
    mark = "*" if one["noisy"] else ""
    return f'{percent_text(one.share, 1)}{mark}<span class="bar"><i style="width: {filled:.1%}"></i></span>'


def _met_html(one: Result) -> str:
    return "-" if one["met"] is None else '<span class="yes">yes</span>' if one["met"] else '<span class="no">no</span>'


# What names a case; what else the cases differ in stands behind the numbers.
_NAMING = ("label", "device", "op", "backend", "cache", "heads", "batch", "q_len", "kv_len", "topk")


def _measured_columns(results: Sequence[Result]) -> list[_Column]:
    columns: list[_Column] = []

    def add(title: str, key: str, text: Callable[[Any], str], number: bool = True) -> None:
        if any(one[key] is not None for one in results):
            columns.append(
                _Column(
                    title,
                    text=lambda one: "-" if one[key] is None else text(one[key]),
                    sort=lambda one: one[key] if number or one[key] is None else text(one[key]),
                    number=number,
                )
            )

    for title in ("median", "p10", "p90"):
        add(title, f"{title}_us", time_text)
    add("GFLOP/s", "gflops", lambda value: plain_number(value) if value else "-")
    add("GB/s", "gbps", plain_number)
    if any(one.share is not None for one in results):
        columns.append(_Column("share", lambda one: "", lambda one: one.share, html=_share_html))
        add("of", "ceiling_kind", lambda kind: CEILINGS.get(kind, "-").removesuffix(" bandwidth"), number=False)
    add("plan", "plan_us", time_text)
    add("ratio", "ratio", lambda value: f"{value:.2f}")
    add("error", "error", lambda value: f"{value:.1e}")
    if any(one["target"] for one in results):
        add("target", "target", str, number=False)
        columns.append(_Column("met", lambda one: "", lambda one: _value_text(one, "met"), False, _met_html))
    return columns


def _columns(results: Sequence[Result]) -> list[_Column]:
    keys = (
        varying_keys(results) if len(results) > 1 else ["op", "backend", "cache", "heads", "batch", "q_len", "kv_len"]
    )
    if any(one["label"] for one in results):
        keys.insert(0, "label")
    return [
        *(_case_column(key, results) for key in keys if key in _NAMING),
        *_measured_columns(results),
        *(_case_column(key, results) for key in keys if key not in _NAMING),
    ]


def _table(results: Sequence[Result]) -> str:
    columns = _columns(results)
    classes = [' class="number"' if column.number else "" for column in columns]
    head = "".join(
        f'<th scope="col"{kind}>{escape(column.title)}</th>' for column, kind in zip(columns, classes, strict=True)
    )
    rows = []
    for one in results:
        cells = []
        for column, kind in zip(columns, classes, strict=True):
            value = column.sort(one)
            shown = column.html(one) if column.html else escape(column.text(one))
            cells.append(f'<td{kind} data-value="{"" if value is None else escape(str(value))}">{shown}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    common = common_text(results, [key for key in CASE_KEYS if key not in ("lengths", "scales", "q_dtype")])
    note = f'<p class="muted">All cases: {escape(common)}.</p>' if common and len(results) > 1 else ""
    body = "\n".join(rows)
    return (
        f'{note}\n<div class="scroll"><table class="results">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _list(title: str, facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts if value)
    return f"<div><h3>{escape(title)}</h3><dl>{items}</dl></div>" if items else ""


def _machine(run: BenchRun) -> str:
    machine, settings, ceilings = run.machine, run.settings, run.ceilings
    facts = [
        ("processor", str(machine.get("cpu", ""))),
        ("threads", str(machine.get("threads", ""))),
        ("instruction sets", ", ".join(map(str, machine.get("isa") or ()))),
        ("GPUs", ", ".join(map(str, machine.get("gpus") or ())) or "none"),
        ("libmla", run.version),
    ]
    if "min_time_s" in settings:
        facts.append(("each case", f"at least {settings['min_time_s']} s of runs, seed {settings.get('seed')}"))
        facts.append(("caches", "flushed before every run" if settings.get("cold") else "warm"))

    def amount(key: str, unit: str, remark: str = "") -> str:
        value = ceilings.get(key)
        return f"{plain_number(value)} {unit}{f' ({remark})' if remark else ''}" if value else ""

    lists = [_list("Machine", facts)]
    threads = ceilings.get("threads")
    lists.append(
        _list(
            f"Ceilings, {threads} thread{'' if threads == 1 else 's'}",
            [
                ("AMX peak", amount("amx_gflops", "GFLOP/s", "tdpbf16ps")),
                ("bf16 peak", amount("bf16_gflops", "GFLOP/s", str(machine.get("bf16_instruction", "")))),
                ("f32 peak", amount("f32_gflops", "GFLOP/s", str(machine.get("f32_instruction", "")))),
                ("f32 peak of AVX2", amount("f32_avx2_gflops", "GFLOP/s")),
                ("DRAM read", amount("dram_gbps", "GB/s")),
                ("L3 read", amount("l3_gbps", "GB/s")),
            ],
        )
    )
    for gpu in ceilings.get("gpus") or ():
        device = str(gpu.get("device", ""))
        rates = [("memory read", "read_gbps"), ("memory copy", "copy_gbps")]
        texts = [(name, f"{plain_number(gpu[key])} GB/s") for name, key in rates if gpu.get(key)]
        texts += [(name, speed_text(gflops)) for name, gflops in gpu_peaks(gpu).values()]
        lists.append(_list(f"Ceilings, {run.machine_text(device)}", texts))
    return f'<div class="facts">{"".join(lists)}</div>'


def _tiles(run: BenchRun) -> str:
    tiles = [(str(len(run.results)), "case" if len(run.results) == 1 else "cases")]
    shares = [one.share for one in run.measured if one.share is not None and not one["noisy"]]
    if shares:
        tiles.append((percent_text(statistics.median(shares)), "median share of the ceiling"))
        tiles.append((percent_text(max(shares)), "best share of the ceiling"))
    speeds = [one["gflops"] for one in run.measured if one["gflops"] > 0]
    if speeds:
        tiles.append((speed_text(max(speeds)), "fastest case"))
    judged = [one for one in run.results if one["met"] is not None]
    if judged:
        tiles.append((f"{sum(bool(one['met']) for one in judged)} of {len(judged)}", "targets met"))
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for value, name in tiles)
    return f'<ul class="tiles">{items}</ul>'


def _notices(run: BenchRun) -> str:
    notices = []
    if run.interrupted:
        notices.append("The bench was interrupted: only the cases that were done are here.")
    wrong = [one for one in run.results if one["error_text"]]
    if wrong:
        notices.append(f"{len(wrong)} of {len(run.results)} cases gave wrong results: {wrong[0]['error_text']}")
    if busy := run.busy_text():
        notices.append(f"{busy} Times on the CPU are too long.")
    disturbed = sum(one.disturbed for one in run.measured)
    if disturbed:
        notices.append(
            f"Other work ran on the machine during {disturbed} of {len(run.results)} cases (a share above 100 %, "
            "marked *, or a p90 above 1.5 times the median). Measure again on an idle machine before you compare."
        )
    emulated = len(run.results) - len(run.measured)
    if emulated:
        notices.append(
            f"{emulated} of {len(run.results)} cases ran in the emulator: their times say nothing about a GPU."
        )
    return "".join(f'<p class="notice">{escape(text)}</p>' for text in notices)


def _figures(drawings: Sequence[Drawing]) -> str:
    return "\n".join(
        f"<figure><div>{one.svg()}</div><figcaption>{escape(one.summary)}</figcaption></figure>" for one in drawings
    )


def page(runs: Sequence[BenchRun]) -> str:
    """Returns the page of one or more runs; later ones are also compared with the first. Raises MissingMatplotlib."""
    sections = []
    comparisons = draw(runs, ("runs",))[0] if len(runs) > 1 else []
    if comparisons:
        sections.append(f"<h2>Compared with {escape(runs[0].name)}</h2>\n{_figures(comparisons)}")
    for run in runs:
        heading = f"<h2>{escape(run.name)}</h2>" if len(runs) > 1 else ""
        drawings = draw([run], [kind for kind in KINDS if kind != "runs"])[0]
        parts = (
            _notices(run),
            _tiles(run),
            _machine(run),
            _figures(drawings),
            "<h3>All cases</h3>",
            _table(run.results),
        )
        sections.append("\n".join((heading, *parts)))
    title = f"Bench: {', '.join(run.name for run in runs)}"
    devices = dict.fromkeys(run.machine_text(one["device"]) for run in runs for one in run.results)
    style, script = ((Path(__file__).parent / "_bench" / name).read_text("utf-8") for name in _PARTS)
    return _PAGE.format(
        title=escape(title),
        devices=escape("; ".join(devices)),
        style=style,
        script=script,
        sections="\n".join(sections),
        reading=_READING,
    )


_PARTS = ("report.css", "report.js")
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1><p class="muted">{devices}. <a href="#reading">How to read this</a></p></header>
<main>
{sections}
{reading}
</main>
<script>
{script}</script>
</body>
</html>
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command `libmla report` and returns its exit status."""
    parser = Parser(
        prog="libmla report",
        description="Write results of `libmla bench --json=FILE` as one HTML page; several files are also compared.",
        epilog="Example: libmla bench --num-heads 16,128 --json=a.json; libmla report a.json --out a.html",
    )
    parser.add_argument(
        "results", nargs="+", metavar="RESULTS.json", help="files of bench results; - is standard input"
    )
    parser.add_argument("--out", metavar="FILE", help="the page (default: named like the first file, here)")
    options = parser.parse_args(arguments)
    out = options.out
    try:
        runs = load_all(options.results)
        out = out or f"{runs[0].name}.html"
        Path(out).write_text(page(runs), encoding="utf-8")
        print(out)
    except (ResultsError, MissingMatplotlib) as error:
        print(f"libmla report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"libmla report: cannot write '{out}': {error.strerror}", file=sys.stderr)
        return 2
    return 0
