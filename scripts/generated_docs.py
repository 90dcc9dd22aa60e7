#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps what stands in the documentation, and comes from elsewhere, equal to its source.

    generated_docs.py (--check | --write) PART... [--mla PROGRAM]

example   docs/cpp.md: examples/find_package/decode.cpp without its licence line
support   docs/support.md: what `libmla info --markdown` prints, with the columns and rows that say the same in one
estimates docs/estimate.md: what `libmla info --estimates` prints
backends  README.md: the table of backends names those that the program has; its words are written by hand

A generated part lies between "<!-- NAME: ... -->" and "<!-- /NAME -->". A machine without some instruction set judges
less than docs/support.md shows: the check then leaves out what this machine cannot run, and --write refuses, but for
backends of another kind of processor (TAKES_WHAT). Nor does the check look at which architectures a cell names: a build
that emulates only one names none.
"""

import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
NONE = "-"  # a cell of what a backend does not run

# No machine runs all CPU backends. They take what another one takes, in the operations that they have: all levels have
# one refusal (src/cpu/cpu_backend.cpp).
TAKES_WHAT = {"cpu_amx": "cpu_portable", "cpu_neon_bf16": "cpu_portable"}

# What one cell says: the operation, the cache format and the head dims (either may be ""), and the backend.
Facts = dict[tuple[str, str, str, str], str]


def example() -> str:
    lines = (ROOT / "examples/find_package/decode.cpp").read_text(encoding="utf-8").splitlines()[1:]
    return "```cpp\n" + "\n".join(lines).strip() + "\n```"


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def names_in(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


class Support:
    """Holds the support matrix: facts, the backends in their order, and the sentence that explains the cells."""

    def __init__(self, legend: str, facts: Facts, backends: list[str]):
        self.legend, self.facts, self.backends = legend, facts, backends

    @classmethod
    def printed_by(cls, program: str) -> tuple["Support", list[str]]:
        """Returns what `libmla info --markdown` prints, a table for each operation, and the backends idle here."""
        done = subprocess.run([program, "info", "--markdown"], capture_output=True, text=True, check=True)
        legend, _, tables = done.stdout.partition("\n")
        facts: Facts = {}
        backends: list[str] = []
        for op, table in re.findall(r"^\*\*(\w+)\*\*\n\n((?:\|.*\n)+)", tables, re.MULTILINE):
            header, _, *rows = (cells_of(line) for line in table.splitlines())
            first = next(i for i, cell in enumerate(header) if names_in(cell))
            named = [names_in(cell)[0] for cell in header[first:]]
            backends += [name for name in named if name not in backends]
            for row in rows:
                cache = names_in(row[0])[0] if header[0] in ("cache", "keys") else ""
                for dims in row[first - 1].split(", ") if "head dims" in header else [""]:
                    facts |= {(op, cache, dims, name): cell for name, cell in zip(named, row[first:], strict=True)}
        idle = re.findall(r"^`(\w+)` is idle on this machine", tables, re.MULTILINE)
        return cls(legend, facts, backends), sorted(set(idle))

    @classmethod
    def rendered_as(cls, text: str) -> "Support":
        """Reads the matrix from a text that rendered() made."""
        legend, order, table = text.split("\n\n")
        header, _, *rows = (cells_of(line) for line in table.splitlines())
        facts: Facts = {}
        for row in rows:
            for op in names_in(row[0]):
                for group in row[1].split("; "):
                    caches, _, dims = group.rpartition(": ")
                    if names_in(dims):  # of the indexer's keys, which have no head dims
                        caches, dims = dims, ""
                    for cache in names_in(caches) or [""]:
                        for one in dims.split(", "):
                            for names, cell in zip(header[2:], row[2:], strict=True):
                                facts |= {(op, cache, one, name): cell for name in names_in(names)}
        return cls(legend, facts, names_in(order))

    def rendered(self) -> str:
        problems = list(dict.fromkeys(key[:3] for key in self.facts))
        columns: dict[tuple[str, ...], list[str]] = {}  # by what they say
        for name in self.backends:
            cells = tuple(self.facts.get((*problem, name), NONE) for problem in problems)
            columns.setdefault(cells, []).append(name)
        said = dict(zip(problems, zip(*columns, strict=True), strict=True))
        rows: dict[tuple[tuple[str, tuple[str, ...]], ...], list[str]] = {}  # operations by all that is said of them
        for op in dict.fromkeys(problem[0] for problem in problems):
            alike: dict[tuple[str, ...], list[tuple[str, str]]] = {}
            for problem in problems:
                if problem[0] == op:
                    alike.setdefault(said[problem], []).append(problem[1:])
            rows.setdefault(tuple((caches_text(which), cells) for cells, which in alike.items()), []).append(op)
        header = [
            "operation",
            "cache or keys: head dims",
            *(", ".join(f"`{name}`" for name in of) for of in columns.values()),
        ]
        lines = [header, ["---"] * len(header)]
        for statements, ops in rows.items():
            lines += [[", ".join(f"`{op}`" for op in ops), which, *cells] for which, cells in statements]
        order = f"The preferred first: {', '.join(f'`{name}`' for name in self.backends)}."
        table = "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
        return f"{self.legend}\n\n{order}\n\n{table}"

    def comparable(self, idle: list[str]) -> tuple[str, list[str], Facts]:
        """Returns legend, backends and facts to compare.

        It leaves out the name of the machine, backends that are idle here, what does not run, and architectures.
        """
        facts = {key: re.sub(r"\b(sm\d+ ?)+: ", "", cell) for key, cell in self.facts.items()}
        legend = re.sub(r"^Judged by `explain` on: .*?\. (?=[A-Z])", "", self.legend)
        runs = {key: cell for key, cell in facts.items() if cell != NONE and key[3] not in idle}
        return legend, [name for name in self.backends if name not in idle], runs


def caches_text(which: list[tuple[str, str]]) -> str:
    """Returns text such as "`bf16`, `f16`: 576/512, 512/512; `fp8_ds_mla`: 576/512"; names alone without head dims."""
    dims_of: dict[str, list[str]] = {}
    for cache, dims in which:
        dims_of.setdefault(cache, []).append(dims)
    caches_of: dict[str, list[str]] = {}
    for cache, dims in dims_of.items():
        caches_of.setdefault(", ".join(dims), []).append(cache)
    return "; ".join(
        ": ".join(part for part in (", ".join(f"`{cache}`" for cache in caches if cache), dims) if part)
        for dims, caches in caches_of.items()
    )


class Stale(Exception):
    """Is raised for a part that does not say what its source says."""


def replace_part(path: pathlib.Path, part: str, wanted, *, write: bool) -> None:
    """Replaces the text of a part by wanted(text), what it should be; without `write`, raises Stale if they differ."""
    text = path.read_text(encoding="utf-8")
    found = re.search(rf"(<!-- {part}:[^\n]*-->\n)(.*?)(\n<!-- /{part} -->)", text, re.DOTALL)
    if not found:
        raise Stale(f"{path.relative_to(ROOT)}: no part <!-- {part}: ... --> ... <!-- /{part} -->")
    new = wanted(found.group(2))
    if new == found.group(2):
        return
    if not write:
        raise Stale(f"{path.relative_to(ROOT)}: {part} is stale; refresh it with `make docs`")
    path.write_text(text[: found.start(2)] + new + text[found.end(2) :], encoding="utf-8")


def update_example(_, *, write: bool) -> None:
    replace_part(ROOT / "docs/cpp.md", "example", lambda _: example(), write=write)


def update_support(program: str, *, write: bool) -> None:
    here, idle = Support.printed_by(program)
    lacking = [name for name in idle if name not in TAKES_WHAT]
    if lacking and write:
        raise Stale(f"this machine cannot run {', '.join(lacking)}: refresh the matrix on one that can")
    for name, like in TAKES_WHAT.items():
        if name in idle:
            here.facts |= {key: here.facts[(*key[:3], like)] for key in here.facts if key[3] == name}

    def wanted(text: str) -> str:
        if not write and Support.rendered_as(text).comparable(idle) == here.comparable(idle):
            return text
        return here.rendered()

    replace_part(ROOT / "docs/support.md", "support", wanted, write=write)


def update_estimates(program: str, *, write: bool) -> None:
    done = subprocess.run([program, "info", "--estimates"], capture_output=True, text=True, check=True)
    replace_part(ROOT / "docs/estimate.md", "estimates", lambda _: done.stdout.strip(), write=write)


def check_backends(program: str, **_) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.search(r"^\| backend \|.*\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    if not table:
        raise Stale("README.md: no table of backends")
    listed = [names_in(cells_of(line)[0]) for line in table.group(1).splitlines()]
    named, known = [name for names in listed for name in names], Support.printed_by(program)[0].backends
    if named != known:
        raise Stale(f"README.md: the table has the backends {', '.join(named)}; the program has {', '.join(known)}")


PARTS = {
    "example": update_example,
    "support": update_support,
    "estimates": update_estimates,
    "backends": check_backends,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", choices=PARTS)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true")
    mode.add_argument("--write", action="store_true")
    parser.add_argument("--mla", help="the command line program, for all but `example`")
    arguments = parser.parse_args()
    if {*arguments.parts} - {"example"} and not arguments.mla:
        parser.error("all parts but example need --mla PROGRAM")
    failures = []
    for part in arguments.parts:
        try:
            PARTS[part](arguments.mla, write=arguments.write)
        except Stale as failure:
            failures.append(str(failure))
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
