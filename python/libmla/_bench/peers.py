# SPDX-License-Identifier: Apache-2.0
"""Checks readings of libmla beside its peers, and draws their figure: every case's speed relative to the peer's.

The file is JSON: `device`, `date`, `libmla` (a commit), `method` (a sentence: how the readings were taken), `peers`
(name: version) and `groups`, each with a `label`, its `peer` and `cases` of `case`, `peer_us`, `libmla_us` and, if
need be, a `note`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .drawing import BETTER, INK, MUTED, PAPER, WORSE, Drawing, log_axis, new_axes
from .names import plain_number, slug, time_text
from .results import ResultsError, is_number

_TICKS = (0.1, 0.125, 0.2, 0.25, 0.33, 0.4, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)


@dataclass(frozen=True)
class PeerCase:
    case: str
    peer_us: float
    libmla_us: float
    note: str = ""

    @property
    def speed(self) -> float:
        """Returns the speed of libmla, where the peer's is 1."""
        return self.peer_us / self.libmla_us


@dataclass(frozen=True)
class PeerGroup:
    label: str
    peer: str
    cases: tuple[PeerCase, ...]


@dataclass(frozen=True)
class PeerReadings:
    name: str  #: of the file, without ".json"
    device: str
    date: str
    libmla: str
    method: str
    peers: Mapping[str, str]
    groups: tuple[PeerGroup, ...]


def is_peer_document(document: Any) -> bool:
    return isinstance(document, dict) and "groups" in document and "peers" in document


def parse_peers(document: Mapping[str, Any], name: str, source: str) -> PeerReadings:
    """Returns the readings that a JSON document holds; `source` is what messages call it. Raises ResultsError."""
    strings = {key: _string(document, key, source) for key in ("device", "date", "libmla", "method")}
    peers = document["peers"]
    if not isinstance(peers, dict) or not all(isinstance(version, str) for version in peers.values()):
        raise ResultsError(f"{source}: peers: expected an object of names and versions")
    groups = document["groups"]
    if not isinstance(groups, list) or not groups:
        raise ResultsError(f"{source}: groups: expected a list with at least one group")
    parsed = tuple(_group(one, peers, f"{source}: groups[{i}]") for i, one in enumerate(groups))
    return PeerReadings(name=name, peers=peers, groups=parsed, **strings)


def _string(document: Mapping[str, Any], key: str, where: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise ResultsError(f"{where}: {key}: expected a text, got {json.dumps(value)[:40]}")
    return value


def _group(one: Any, peers: Mapping[str, str], where: str) -> PeerGroup:
    if not isinstance(one, dict):
        raise ResultsError(f"{where}: expected an object, got {type(one).__name__}")
    label, peer = _string(one, "label", where), _string(one, "peer", where)
    if peer not in peers:
        raise ResultsError(f"{where}: peer: expected one of {', '.join(peers)}, got {peer}")
    cases = one.get("cases")
    if not isinstance(cases, list) or not cases:
        raise ResultsError(f"{where}: cases: expected a list with at least one case")
    return PeerGroup(label, peer, tuple(_case(case, f"{where}.cases[{i}]") for i, case in enumerate(cases)))


def _case(one: Any, where: str) -> PeerCase:
    if not isinstance(one, dict):
        raise ResultsError(f"{where}: expected an object, got {type(one).__name__}")
    for key in ("peer_us", "libmla_us"):
        if not is_number(one.get(key)) or one[key] <= 0:
            raise ResultsError(f"{where}: {key}: expected a time above 0, got {json.dumps(one.get(key))[:40]}")
    note = one.get("note", "")
    if not isinstance(note, str):
        raise ResultsError(f"{where}: note: expected a text, got {json.dumps(note)[:40]}")
    return PeerCase(_string(one, "case", where), float(one["peer_us"]), float(one["libmla_us"]), note)


def peers(readings: PeerReadings) -> list[Drawing]:
    """Draws a row for each group, with a mark for each of its cases: right of the line libmla is faster."""
    groups = readings.groups
    cases = [case for group in groups for case in group.cases]
    title = f"libmla beside its peers on one {readings.device}"
    versions = ", ".join(f"{name} ({version})" for name, version in readings.peers.items())
    notes = [
        f"{readings.date}, libmla {readings.libmla}. {readings.method} Peers: {versions}.",
        "A mark is a case; right of the line libmla is faster, left of it the peer.",
    ]
    figure, axes = new_axes(5.4, 0.4 + 0.32 * len(groups), title, notes, note_width=8.6)
    speeds = [case.speed for case in cases]
    low, high = min(0.93, *speeds) / 1.08, max(1.07, *speeds) * 1.08
    axes.set(xscale="log", xlim=(low, high), ylim=(len(groups) - 0.4, -0.6))
    log_axis(axes.xaxis, _ticks(low, high), lambda value: f"{plain_number(value)}×")
    axes.set_yticks(range(len(groups)), [group.label for group in groups])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("speed of libmla, the peer's = 1 (logarithmic)")
    axes.axvline(1, color=INK, linewidth=1.1, zorder=1)
    drawing = Drawing(slug(readings.name, "peers"), title, "", figure)
    for row, group in enumerate(groups):
        ends = min(case.speed for case in group.cases), max(case.speed for case in group.cases)
        axes.plot(ends, [row, row], color=MUTED, linewidth=1, alpha=0.55)
        for case in group.cases:
            faster = case.speed > 1
            look = {"color": BETTER, "marker": ">"} if faster else {"color": WORSE, "marker": "<"}
            (mark,) = axes.plot([case.speed], [row], linestyle="", markersize=7.5, markeredgecolor=PAPER, **look)
            mark.set_markeredgewidth(0.6)
            drawing.tip(mark, _tip(group, case))
        said = f"{ends[0]:.2f}×" if ends[0] == ends[1] else f"{ends[0]:.2f} to {ends[1]:.2f}×"
        axes.annotate(
            f"{said}  {group.peer}", (1, row), xytext=(10, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", annotation_clip=False,
        )  # fmt: skip
    drawing.summary = (
        f"{title}, {readings.date}: libmla is faster in {sum(speed > 1 for speed in speeds)} of {len(speeds)} cases, "
        f"its speed from {min(speeds):.2f} to {max(speeds):.2f} times the peer's."
    )
    return [drawing]


def _ticks(low: float, high: float) -> list[float]:
    """Returns those of _TICKS inside the range, from 1 outwards, that leave room for their texts."""
    kept: list[float] = []
    for tick in sorted(_TICKS, key=lambda tick: abs(math.log(tick))):
        apart = (abs(math.log(tick / other)) for other in kept)
        if low <= tick <= high and min(apart, default=math.inf) > math.log(high / low) / 12:
            kept.append(tick)
    return sorted(kept)


def _tip(group: PeerGroup, case: PeerCase) -> str:
    lines = [
        f"{group.label}, {case.case}",
        f"{group.peer} {time_text(case.peer_us)}, libmla {time_text(case.libmla_us)}",
    ]
    return "\n".join([*lines, case.note] if case.note else lines)
