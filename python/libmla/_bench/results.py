# SPDX-License-Identifier: Apache-2.0
"""Reads and checks bench results as `libmla bench --json=FILE` writes them.

docs/json.md has the keys. A result stays the mapping that the file holds; what `Result` adds is what plots and reports
need to know about it.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_NUMBERS = ("batch", "q_len", "kv_len", "heads", "page_size", "topk", "threads", "median_us", "p10_us", "p90_us")
_RATES = ("gflops", "gbps")
_STRINGS = ("op", "backend", "device", "cache")
# What earlier versions measured and did not say.
_UNSAID = {"compute": "default", "extra_cache": None}


class ResultsError(ValueError):
    """Says in one sentence for people that a file holds no usable bench results, or that a plot has nothing to show."""


@dataclass(frozen=True)
class Result:
    """Holds one measured case: `data` is the file's object with the keys of docs/json.md."""

    data: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.data.get(key)

    @property
    def emulated(self) -> bool:
        """Returns whether the case ran in the emulator, where times say nothing about the GPU."""
        return str(self["device"]).startswith("emulated:")

    @property
    def share(self) -> float | None:
        """Returns the part of the ceiling that was reached, 1 = all of it; None where there is nothing to compare
        with."""
        return self["ceiling_share"]

    @property
    def share_range(self) -> tuple[float, float] | None:
        """Returns the share of the slow (p90) and of the fast (p10) runs; None where there is no share."""
        if self.share is None:
            return None
        return (self.share * self["median_us"] / self["p90_us"], self.share * self["median_us"] / self["p10_us"])

    @property
    def intensity(self) -> float | None:
        """Returns the flops per byte that must move; None for operations without arithmetic."""
        return self["gflops"] / self["gbps"] if self["gflops"] > 0 and self["gbps"] > 0 else None

    @property
    def disturbed(self) -> bool:
        """Returns whether other work ran on the machine: a share above 100 %, or slow runs that took far longer than
        the median."""
        return bool(self["noisy"]) or self["p90_us"] > 1.5 * self["median_us"]


@dataclass(frozen=True)
class BenchRun:
    """Holds what one call of `libmla bench` measured."""

    name: str  #: of the file, without ".json"
    version: str
    machine: Mapping[str, Any]
    ceilings: Mapping[str, Any]
    settings: Mapping[str, Any]
    interrupted: bool
    results: tuple[Result, ...]
    load: Mapping[str, Any] | None = None  #: what others took of the processors; None where nobody knows

    @property
    def measured(self) -> tuple[Result, ...]:
        """Returns the results whose times mean something: all but those of the emulator."""
        return tuple(one for one in self.results if not one.emulated)

    def gpu_ceilings(self, device: str) -> Mapping[str, Any] | None:
        return next((gpu for gpu in self.ceilings.get("gpus") or () if gpu.get("device") == device), None)

    def busy_text(self, device: str = "cpu") -> str:
        """Returns a sentence where others took processors from cases on this device, else an empty text."""
        if device != "cpu" or not self.load or not self.load.get("busy"):
            return ""
        others, steal = (f"{100 * (self.load.get(key) or 0):.0f} %" for key in ("others_share", "steal_share"))
        stolen = f" and other virtual machines {steal}" if steal != "0 %" else ""
        return f"This machine was busy: other processes took {others}{stolen} of its processors' time."

    def machine_text(self, device: str = "cpu") -> str:
        """Returns the machine in words: 'AMD EPYC, 2 threads', or the GPU's name."""
        if device.startswith("emulated:"):
            return f"emulated {device.partition(':')[2]}"
        if device != "cpu":
            names = self.machine.get("gpus") or []
            index = device.rpartition(":")[2]
            named = names[int(index)] if index.isdecimal() and int(index) < len(names) else "GPU"
            return f"{named} ({device})"
        threads = sorted({one["threads"] for one in self.results if one["device"] == "cpu"})
        counted = " or ".join(str(count) for count in threads) or str(self.machine.get("threads", "?"))
        return f"{self.machine.get('cpu', 'unknown processor')}, {counted} thread{'' if counted == '1' else 's'}"


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_result(one: Any, where: str) -> Result:
    if not isinstance(one, dict):
        raise ResultsError(f"{where}: expected an object, got {type(one).__name__}")
    for key in _STRINGS:
        if not isinstance(one.get(key), str):
            raise ResultsError(f"{where}: {key}: expected a string, got {json.dumps(one.get(key))[:40]}")
    for key in _NUMBERS + _RATES:
        if not is_number(one.get(key)) or one[key] < 0:
            raise ResultsError(f"{where}: {key}: expected a number of at least 0, got {json.dumps(one.get(key))[:40]}")
    for key in ("median_us", "p10_us", "p90_us"):
        if one[key] == 0:
            raise ResultsError(f"{where}: {key}: expected a time above 0, got 0")
    share = one.get("ceiling_share")
    if share is not None and not is_number(share):
        raise ResultsError(f"{where}: ceiling_share: expected a number or null, got {json.dumps(share)[:40]}")
    return Result(_UNSAID | one)


def parse(document: Any, name: str, source: str) -> BenchRun:
    """Returns the run that a JSON document holds; `source` is what messages call it. Raises ResultsError."""
    if not isinstance(document, dict) or "results" not in document:
        hint = ""
        if isinstance(document, dict) and "cases" in document:
            hint = " (it lists cases; nothing was measured)"
        elif isinstance(document, dict) and "groups" in document:
            hint = " (they are readings beside peers, which only `libmla plot` draws)"
        raise ResultsError(f"{source}: these are no bench results{hint}; `libmla bench --json=FILE` writes them")
    results = document["results"]
    if not isinstance(results, list):
        raise ResultsError(f"{source}: results: expected a list, got {type(results).__name__}")
    if not results:
        raise ResultsError(f"{source}: the list of results is empty: no case was measured")
    for key in ("machine", "ceilings", "settings", "load"):
        if not isinstance(document.get(key) or {}, dict):
            raise ResultsError(f"{source}: {key}: expected an object, got {type(document[key]).__name__}")
    return BenchRun(
        name=name,
        version=str(document.get("version", "?")),
        machine=document.get("machine", {}),
        ceilings=document.get("ceilings", {}),
        settings=document.get("settings", {}),
        interrupted=bool(document.get("interrupted", False)),
        results=tuple(_check_result(one, f"{source}: results[{i}]") for i, one in enumerate(results)),
        load=document.get("load"),
    )


class Document(NamedTuple):
    """Holds a JSON file: its content, the name of its run, and what messages call it."""

    content: Any
    name: str
    source: str


def read(path: str | Path) -> Document:
    """Reads a file, or standard input for "-". Raises ResultsError."""
    source = "standard input" if str(path) == "-" else str(path)
    try:
        text = sys.stdin.read() if str(path) == "-" else Path(path).read_text(encoding="utf-8")
        content = json.loads(text)
    except OSError as error:
        raise ResultsError(f"{source}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ResultsError(f"{source}: is not JSON: it is not UTF-8 text") from None
    except ValueError as error:
        raise ResultsError(f"{source}: is not JSON: {error}") from None
    return Document(content, "stdin" if str(path) == "-" else Path(path).stem, source)


def read_all(paths: Sequence[str | Path]) -> list[Document]:
    """Reads all files and gives them names that differ: where two files are named alike, their folders' names come in
    front."""
    documents = [read(path) for path in paths]
    counts = Counter(document.name for document in documents)
    named: list[Document] = []
    for path, document in zip(paths, documents, strict=True):
        name = document.name
        if counts[name] > 1:
            name = f"{Path(path).resolve().parent.name}-{name}"
        stem, number = name, 2
        while any(name == other.name for other in named):
            name, number = f"{stem}-{number}", number + 1
        named.append(document._replace(name=name))
    return named


def load_all(paths: Sequence[str | Path]) -> list[BenchRun]:
    """Reads the runs of all files, under names that differ. Raises ResultsError."""
    return [parse(document.content, document.name, document.source) for document in read_all(paths)]


def groups(results: Sequence[Result], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Result]]:
    """Groups results by their values of `keys`, in the order of the file."""
    found: dict[tuple[Any, ...], list[Result]] = {}
    for one in results:
        found.setdefault(tuple(one[key] for key in keys), []).append(one)
    return found
