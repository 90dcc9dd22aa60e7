#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps the parts of README.md that stand elsewhere too equal to their sources.

    readme.py (--check | --write) [example] [matrix --mla PROGRAM]

A part lies between "<!-- NAME: ... -->" and "<!-- /NAME -->". `example` is examples/find_package/decode.cpp without
its licence line; `matrix` is what `mla info --markdown` prints. A machine without some instruction set prints less
than README.md shows: the check then leaves out what this machine cannot run, and --write refuses. Nor does the check look
at which architectures a cell names: a build that emulates only one names none.
"""

import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def example(_):
    lines = (ROOT / "examples/find_package/decode.cpp").read_text(encoding="utf-8").splitlines()[1:]
    return "```cpp\n" + "\n".join(lines).strip() + "\n```"


def matrix(program):
    done = subprocess.run([program, "info", "--markdown"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def idle_backends(text):
    return re.findall(r"^`(\w+)` is idle on this machine", text, re.MULTILINE)


def comparable(text, idle):
    """The matrix without the names of machines and without the columns of backends that are idle here."""
    lines, dropped = [], []
    for line in text.splitlines():
        if line.startswith("Judged by") or "is idle on this machine" in line:
            continue
        cells = line.split(" | ")
        if line.startswith("| ") and "`" in line and any(f"`{name}`" in line for name in idle):
            dropped = [i for i, cell in enumerate(cells) if cell.strip("| `") in idle]
        elif not line.startswith("|"):
            dropped = []
        if line.startswith("| "):
            line = " | ".join(cell for i, cell in enumerate(cells) if i not in dropped)
            line = re.sub(r"\b(sm\d+ ?)+: ", "", line)
        lines.append(line)
    return re.sub(r"\n{2,}", "\n", "\n".join(lines)).strip()


PARTS = {"example": example, "matrix": matrix}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", choices=PARTS)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true")
    mode.add_argument("--write", action="store_true")
    parser.add_argument("--mla", help="the command line program, for `matrix`")
    arguments = parser.parse_args()
    if "matrix" in arguments.parts and not arguments.mla:
        parser.error("matrix needs --mla PROGRAM")

    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    stale = []
    for part in arguments.parts:
        pattern = re.compile(rf"(<!-- {part}:[^\n]*-->\n)(.*?)(\n<!-- /{part} -->)", re.DOTALL)
        found = pattern.search(text)
        if not found:
            sys.exit(f"README.md: no part <!-- {part}: ... --> ... <!-- /{part} -->")
        wanted = PARTS[part](arguments.mla)
        idle = idle_backends(wanted) if part == "matrix" else []
        if idle and arguments.write:
            sys.exit(f"this machine cannot run {', '.join(sorted(set(idle)))}: refresh the matrix on one that can")
        here, there = (comparable(text, idle) for text in (wanted, found.group(2)))
        if part == "matrix" and here == there:
            continue
        if found.group(2) != wanted:
            stale.append(part)
            text = text[: found.start(2)] + wanted + text[found.end(2) :]
    if arguments.write:
        readme.write_text(text, encoding="utf-8")
    elif stale:
        sys.exit(f"README.md: stale: {', '.join(stale)}; refresh with `make matrix`")


if __name__ == "__main__":
    main()
