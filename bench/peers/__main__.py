# SPDX-License-Identifier: Apache-2.0
"""Compares libmla on this GPU with the other libraries that are installed, on the same tensors, in turns.

    python bench/peers                                  # all cases, all peers that can be imported
    python bench/peers --out a.json --chart charts      # readings, and their chart (needs matplotlib)
    python bench/peers --peer FlashMLA --case 'decode bf16, 128' --sustained 7

Every side of a case is a CUDA graph of at least 16 calls, over copies of the cache that pass the L2 cache; a time is the
median of several turns. Each output is compared with libmla's; where they differ, the case has no reading, and the
command ends with 1. docs/peers.md says more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import torch
    from cases import CASES, Case
    from peers import PEERS, Peer, Unsupported, installed
    from problems import PROBLEMS
    from turns import Timer, in_turns, sustained

    import libmla
except ImportError as error:
    sys.exit(f"bench/peers: {error}. It needs torch, and libmla (pip install . in the checkout).")

METHOD = "Medians; libmla and the peer measured in one process, in turns, as CUDA graphs."
METHOD_OF_ZEROS = METHOD + " All keys and values are 0, which takes little power."
# Both outputs are rounded to bf16, and P between the products is, too: they differ by some 0.4 %. e4m3 products of the
# indexer differ by less.
LARGEST_DIFFERENCE = 0.02


class PeerError(Exception):
    """Says how a peer refused a case."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python bench/peers", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--peer", action="append", metavar="NAME", help="only this peer; may be repeated")
    parser.add_argument("--case", metavar="TEXT", default="", help="only cases whose group and name contain the text")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each case (9)")
    parser.add_argument(
        "--sustained",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="also run each side for so long: times, clocks and joules at a stretch",
    )
    parser.add_argument(
        "--zeros",
        action="store_true",
        help="time keys and values of 0, whose products take so little power that clocks hardly depend on it",
    )
    parser.add_argument("--out", metavar="FILE", help="write the readings as JSON, which `libmla plot` draws")
    parser.add_argument("--chart", metavar="FOLDER", help="draw the readings there, as SVG")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the scripts (cuda)")
    parser.add_argument("--list", action="store_true", help="say what is installed and list the cases, measure nothing")
    options = parser.parse_args(arguments)
    names = [kind.name for kind in PEERS]
    for name in options.peer or []:
        if name not in names:
            parser.error(f"--peer: expected one of {', '.join(names)}, got {name}")
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    try:
        device = torch.device(options.device)
    except RuntimeError:
        parser.error(f"--device: expected cuda, cuda:N or cpu, got {options.device}")
    if device.type == "cuda" and not options.list and not torch.cuda.is_available():
        parser.error("--device: torch finds no GPU here")
    if device.type != "cuda" and options.sustained:
        parser.error("--sustained: needs a GPU")
    if options.out and not Path(options.out).absolute().parent.is_dir():
        parser.error(f"--out: there is no folder {Path(options.out).absolute().parent}")
    if options.chart and not options.out:
        parser.error("--chart: draws the file of --out, which is missing")
    return options


def difference(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """Returns the norm of what the outputs differ by, relative to libmla's. It is NaN if one of them has a NaN."""
    return float((theirs.double() - ours.double()).norm() / ours.double().norm())


def reading(case: Case, peer: Peer, options: argparse.Namespace) -> dict[str, Any]:
    """Measures a case.

    Raises Unsupported if the peer does not compute it, PeerError if it refuses, ArithmeticError if the outputs differ.
    """
    device = torch.device(options.device)
    torch.manual_seed(1)
    problem = PROBLEMS[case.operation](device, **case.shape)
    ours = problem.libmla()
    timers = {"libmla": Timer(ours, device)}
    try:
        theirs = peer.side(problem)
        timers["peer"] = Timer(theirs, device)
    except Unsupported:
        raise
    except Exception as error:  # a peer refuses in any way
        raise PeerError(f"{type(error).__name__}: {error}") from error
    apart = difference(theirs.output(), ours.output())
    if not apart <= LARGEST_DIFFERENCE:
        raise ArithmeticError(f"the outputs differ by {apart:.2g} of their norm")
    if options.zeros:
        for tensor in problem.key_tensors():
            tensor.view(torch.uint8).zero_()
    times = in_turns(timers, options.rounds)
    found: dict[str, Any] = {"case": case.name, "peer_us": times["peer"], "libmla_us": times["libmla"]}
    if options.sustained:
        for name, timer in timers.items():
            run = sustained(timer, options.sustained, device)
            values = {"us": run.us, "clock_mhz": run.clock_mhz, "millijoules": run.millijoules}
            found[f"{name}_sustained"] = {key: round(value, 2) for key, value in values.items()}
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()}


def line(case: Case, peer: Peer, found: dict[str, Any]) -> str:
    speed = found["peer_us"] / found["libmla_us"]
    text = f"{case.group}, {case.name}: {peer.name} {found['peer_us']:.1f} us, libmla {found['libmla_us']:.1f} us, "
    text += f"{speed:.2f} times as fast"
    if "libmla_sustained" in found:
        for side, name in (("peer", peer.name), ("libmla", "libmla")):
            run = found[f"{side}_sustained"]
            text += f"\n    {name} at a stretch: {run['us']:.1f} us at {run['clock_mhz']:.0f} MHz, "
            text += f"{run['millijoules']:.0f} mJ a call"
    return text


def commit() -> str:
    """Returns the commit of this checkout, or the version of the installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return str(libmla.info().version)


def measure(cases: Sequence[Case], peers: Sequence[Peer], options: argparse.Namespace) -> tuple[list[Any], int]:
    """Measures and prints the cases. Returns the groups of the readings, and how many cases failed."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    failed = 0
    for case in cases:
        for peer in peers:
            try:
                found = reading(case, peer, options)
            except Unsupported:
                continue
            except PeerError as error:
                print(f"{case.group}, {case.name}: {peer.name} does not run it: {error}", flush=True)
                continue
            except Exception as error:  # noqa: BLE001 - a peer may fail in any way, and the other cases go on
                print(f"{case.group}, {case.name}: {peer.name} FAILED: {type(error).__name__}: {error}", flush=True)
                failed += 1
                continue
            print(line(case, peer, found), flush=True)
            group = {"label": case.group, "peer": peer.name, "cases": []}
            groups.setdefault((case.group, peer.name), group)["cases"].append(found)
    return list(groups.values()), failed


def table(groups: Sequence[dict[str, Any]]) -> str:
    """Returns the table of the groups: the lowest, the mean and the highest speed of libmla relative to the peer."""
    rows = [("", "peer", "cases", "lowest", "mean", "highest")]
    for group in groups:
        speeds = [case["peer_us"] / case["libmla_us"] for case in group["cases"]]
        mean = math.exp(sum(map(math.log, speeds)) / len(speeds))
        of_speeds = (f"{one:.2f}" for one in (min(speeds), mean, max(speeds)))
        rows.append((group["label"], group["peer"], str(len(speeds)), *of_speeds))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    found, missing = installed()
    peers = [peer for peer in found if not options.peer or peer.name in options.peer]
    cases = [case for case in CASES if options.case in f"{case.group}, {case.name}"]
    for peer in peers:
        print(f"{peer.name} {peer.version()}")
    for name, reason in missing.items():
        if not options.peer or name in options.peer:
            print(f"{name} is not installed: {reason}")
    if options.list:
        print("\n".join(f"{case.group}, {case.name}" for case in cases))
        return 0
    if not peers or not cases:
        print(f"bench/peers: there is no {'peer' if not peers else 'case'} to measure", file=sys.stderr)
        return 2
    groups, failed = measure(cases, peers, options)
    if groups:
        print(f"\nSpeed of libmla, the peer's = 1:\n{table(groups)}")
        device = torch.device(options.device)
        document = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
            "libmla": commit(),
            "peers": {peer.name: peer.version() for peer in peers if any(one["peer"] == peer.name for one in groups)},
            "method": METHOD_OF_ZEROS if options.zeros else METHOD,
            "groups": groups,
        }
        if options.out:
            Path(options.out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if options.chart:
            from libmla import plot

            failed += plot.main([options.out, "--kind", "peers", "--format", "svg", "--dark", "--out", options.chart])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
