# SPDX-License-Identifier: Apache-2.0
"""Tests `libmla plot` of readings beside peers, and the chart of README.md."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from bench_results import MEASURED, result, write
from libmla import plot, report
from libmla._bench import drawing, peers
from test_plot import marks, texts

ROOT = Path(__file__).parents[2]

DOCUMENT: dict[str, Any] = {
    "device": "Test GPU",
    "date": "2026-01-31",
    "libmla": "0123abc",
    "method": "In turns.",
    "peers": {"Peer A": "1.0", "Peer B": "2.0"},
    "groups": [
        {"label": "decode", "peer": "Peer A", "cases": [
            {"case": "batch 1", "peer_us": 20.0, "libmla_us": 10.0},
            {"case": "batch 64", "peer_us": 50.0, "libmla_us": 100.0, "note": "a busy day"},
        ]},
        {"label": "prefill", "peer": "Peer B", "cases": [{"case": "8k", "peer_us": 1200.0, "libmla_us": 1500.0}]},
    ],
}  # fmt: skip


def drawn(document: dict[str, Any] = DOCUMENT) -> drawing.Drawing:
    with drawing.style():
        (only,) = peers.peers(peers.parse_peers(document, "some", "some.json"))
    return only


def test_marks_stand_at_the_speed_and_say_who_is_faster() -> None:
    one = drawn()
    assert marks(one) == [(2.0, 0.0), (0.5, 0.0), (0.8, 1.0)]
    lines = {line.get_gid(): line for axes in one.figure.axes for line in axes.lines}
    looks = [(lines[gid].get_color(), lines[gid].get_marker()) for gid in one.tooltips]
    assert looks == [(drawing.BETTER, ">"), (drawing.WORSE, "<"), (drawing.WORSE, "<")]
    written = texts(one.figure)
    assert {"decode", "prefill", "0.50 to 2.00× Peer A", "0.80× Peer B", "1×"} <= {*written}
    assert any("2026-01-31, libmla 0123abc. In turns. Peers: Peer A (1.0), Peer B (2.0)." in text for text in written)
    assert one.summary.endswith("faster in 1 of 3 cases, its speed from 0.50 to 2.00 times the peer's.")
    assert [*one.tooltips.values()][1] == "decode, batch 64\nPeer A 50.0 µs, libmla 100 µs\na busy day"


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("device",), None, "device: expected a text, got null"),
        (("peers",), ["Peer A"], "peers: expected an object of names and versions"),
        (("groups",), [], "groups: expected a list with at least one group"),
        (("groups", 0), "decode", "groups[0]: expected an object, got str"),
        (("groups", 0, "peer"), "Peer C", "groups[0]: peer: expected one of Peer A, Peer B, got Peer C"),
        (("groups", 1, "cases"), [], "groups[1]: cases: expected a list with at least one case"),
        (("groups", 1, "cases", 0), 7, "groups[1].cases[0]: expected an object, got int"),
        (("groups", 1, "cases", 0, "case"), "", 'groups[1].cases[0]: case: expected a text, got ""'),
        (("groups", 0, "cases", 1, "peer_us"), 0, "groups[0].cases[1]: peer_us: expected a time above 0, got 0"),
        (
            ("groups", 0, "cases", 1, "libmla_us"),
            "5",
            'groups[0].cases[1]: libmla_us: expected a time above 0, got "5"',
        ),
        (("groups", 0, "cases", 1, "note"), 5, "groups[0].cases[1]: note: expected a text, got 5"),
    ],
)
def test_unusable_readings_get_one_sentence(
    path: tuple[Any, ...], value: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(changed(path, value)), encoding="utf-8")
    assert plot.main([os.fspath(file), "--out", os.fspath(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"libmla plot: {file}: {message}\n"
    assert not (tmp_path / "out").exists()


def test_readings_and_bench_results_are_drawn_together(tmp_path: Path) -> None:
    (tmp_path / "readings.json").write_text(json.dumps(DOCUMENT), encoding="utf-8")
    files = [os.fspath(tmp_path / "readings.json"), os.fspath(write(tmp_path / "run.json", result()))]
    out = tmp_path / "out"
    assert plot.main([*files, "--out", os.fspath(out), "--format", "svg", "--dark"]) == 0
    assert {path.stem for path in out.iterdir()} == {
        "readings-peers", "readings-peers-dark", "run-roofline", "run-roofline-dark",
    }  # fmt: skip
    light, dark = ((out / f"readings-peers{ending}.svg").read_text(encoding="utf-8") for ending in ("", "-dark"))
    assert drawing.PAPER in light and not [color for color in drawing.CSS_NAMES if color in dark]


def test_a_kind_that_a_file_does_not_have_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "readings.json").write_text(json.dumps(DOCUMENT), encoding="utf-8")
    assert plot.main([os.fspath(MEASURED), "--kind", "peers", "--out", os.fspath(tmp_path)]) == 2
    assert capsys.readouterr().err == "libmla plot: bench_cpu: bench results have no peers\n"
    assert plot.main([os.fspath(tmp_path / "readings.json"), "--kind", "share", "--out", os.fspath(tmp_path)]) == 2
    assert capsys.readouterr().err == "libmla plot: readings: readings beside peers have the kind peers only\n"
    assert report.main([os.fspath(tmp_path / "readings.json"), "--out", os.fspath(tmp_path / "page.html")]) == 2
    assert "they are readings beside peers, which only `libmla plot` draws" in capsys.readouterr().err


# README.md.


def chart_of_readme() -> tuple[str, str, str]:
    """Returns the chart's files for dark and light pages, and the text that stands for them where they are not seen."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (found,) = re.findall(
        r'<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*<img src="([^"]+)" alt="([^"]+)"', text
    )
    return found


def test_the_chart_of_the_readme_is_drawn_from_the_readings(tmp_path: Path) -> None:
    dark, light, alternative = chart_of_readme()
    name = Path(light).stem
    readings = ROOT / "bench" / "peers" / f"{name.removesuffix('-peers')}.json"
    assert plot.main([os.fspath(readings), "--format", "svg", "--dark", "--out", os.fspath(tmp_path)]) == 0
    for path in (dark, light):
        assert (ROOT / path).read_bytes() == (tmp_path / Path(path).name).read_bytes(), "refresh it with `make docs`"
    one = drawn(json.loads(readings.read_text(encoding="utf-8")))
    assert alternative == one.summary
    assert {path.name for path in (ROOT / "docs" / "img").iterdir()} == {Path(dark).name, Path(light).name}
