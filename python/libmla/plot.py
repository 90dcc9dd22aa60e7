# SPDX-License-Identifier: Apache-2.0
"""Draws what `libmla bench --json=FILE` measured: the command `libmla plot RESULTS.json...`.

There are five kinds of drawings. Every run has `roofline` (arithmetic intensity against speed, under the measured
ceilings), `share` (share of the ceiling by kv length or topk) and `backends` (time of the same case on each backend).
Two runs have `runs` (how much faster each case became). Readings beside other libraries have `peers`. Each drawing
function returns a `Drawing`, which saves itself as PNG or SVG.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ._arguments import Parser
from ._bench.comparisons import backends, runs
from ._bench.drawing import Drawing, MissingMatplotlib, style
from ._bench.figures import roofline, share
from ._bench.peers import PeerReadings, is_peer_document, parse_peers, peers
from ._bench.results import BenchRun, ResultsError, load_all, parse, read_all

__all__ = ["FORMATS", "KINDS", "draw", "load_all", "main", "save"]

KINDS = ("roofline", "share", "backends", "runs", "peers")
FORMATS = ("png", "svg")
_NO_COMPARISON = "no comparison"


def draw(
    all_runs: Sequence[BenchRun], kinds: Sequence[str] = KINDS, readings: Sequence[PeerReadings] = ()
) -> tuple[list[Drawing], list[str]]:
    """Draws everything of the named kinds that the runs and readings have; returns it with a sentence for each kind
    that a run does not have."""
    of_one: Mapping[str, Callable[[BenchRun], list[Drawing]]] = {
        "roofline": roofline,
        "share": share,
        "backends": backends,
    }
    drawings, missing = [], []
    with style():
        for run in all_runs:
            for kind in kinds:
                if kind in of_one:
                    try:
                        drawings += of_one[kind](run)
                    except ResultsError as error:
                        missing.append(f"{run.name}: no {kind} plot: {error}")
        if "runs" in kinds:
            for other in all_runs[1:]:
                try:
                    drawings += runs(all_runs[0], other)
                except ResultsError as error:
                    missing.append(f"{_NO_COMPARISON} of {all_runs[0].name} and {other.name}: {error}")
        if "peers" in kinds:
            for one in readings:
                drawings += peers(one)
        else:
            missing += [f"{one.name}: readings beside peers have the kind peers only" for one in readings]
    if "peers" in kinds and len(kinds) == 1:
        missing += [f"{run.name}: bench results have no peers" for run in all_runs]
    if "runs" in kinds and len(all_runs) == 1 and len(kinds) == 1:
        missing.append(f"{all_runs[0].name}: a comparison takes the results of two runs")
    return drawings, missing


def save(drawings: Sequence[Drawing], folder: Path, formats: Sequence[str], *, dark: bool = False) -> list[Path]:
    """Writes NAME.FORMAT into the folder, which is made if need be; `dark`: also NAME-dark.svg. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for drawing in drawings:
        for ending in formats:
            paths.append(folder / f"{drawing.name}.{ending}")
            drawing.save(str(paths[-1]))
        if dark:
            paths.append(folder / f"{drawing.name}-dark.svg")
            drawing.save_dark(str(paths[-1]))
    return paths


def _choices(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = [part for part in text.split(",") if part]
        for part in chosen or [text]:
            if part not in allowed:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(allowed)}, got '{part}'")
        return chosen

    return parse


def main(arguments: Sequence[str]) -> int:
    """Runs the command `libmla plot` and returns its exit status."""
    parser = Parser(
        prog="libmla plot",
        description="Draw results of `libmla bench --json=FILE`; several files are also compared with the first. Files "
        "of readings beside other libraries (bench/peers) are drawn, too.",
        epilog="Example: libmla bench --num-heads 16,128 --kv-len 1k:32k:*2 --json=a.json; libmla plot a.json --out plots",
    )
    parser.add_argument(
        "results", nargs="+", metavar="RESULTS.json", help="files of bench results; - is standard input"
    )
    parser.add_argument("--out", default=".", metavar="FOLDER", help="where the files go (default: here)")
    parser.add_argument("--kind", type=_choices(KINDS), help=f"only these: {', '.join(KINDS)}")
    parser.add_argument("--format", type=_choices(FORMATS), default=list(FORMATS), help="png,svg (default: both)")
    parser.add_argument("--dark", action="store_true", help="also NAME-dark.svg, for dark pages")
    options = parser.parse_args(arguments)
    try:
        documents = read_all(options.results)
        runs_of_files = [parse(*one) for one in documents if not is_peer_document(one.content)]
        readings = [parse_peers(*one) for one in documents if is_peer_document(one.content)]
        drawings, missing = draw(runs_of_files, options.kind or KINDS, readings)
        if not drawings:
            raise ResultsError(missing[0])
        # What was asked for by name; else only that files that were named together cannot be compared.
        for text in missing:
            if options.kind or text.startswith(_NO_COMPARISON):
                print(f"libmla plot: {text}", file=sys.stderr)
        for path in save(drawings, Path(options.out), options.format, dark=options.dark):
            print(path)
    except (ResultsError, MissingMatplotlib) as error:
        print(f"libmla plot: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"libmla plot: cannot write to '{error.filename or options.out}': {error.strerror}", file=sys.stderr)
        return 2
    return 0
