#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of a build and lists the emulated kernels that none of them ran: scripts/kernels_not_run.py BUILD_FOLDER

A kernel is an instance of a template, such as a kernel of absorbed attention for 64 rows of 512 channels in bf16. What
no test runs can be wrong unseen. Kernels that run for no architecture make the command end with 1, as failing tests do.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ENTRY = re.compile(r"mla::emulated_(sm\d+)::kernel_entry<(.*)>\(void const\*\)$")


def symbols(path: Path) -> list[tuple[int, str]]:
    """Returns the addresses and names of the kernels' entries in a program or a library."""
    listing = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout
    found = (re.match(r"([0-9a-f]+) [tTwW] (.*kernel_entry<.*)", line) for line in listing.splitlines())
    return [(int(match[1], 16), match[2]) for match in found if match is not None]


def kernel_of(symbol: str) -> tuple[str, str] | None:
    """Returns the kernel and the architecture of an entry of the library; tests have kernels of their own."""
    match = ENTRY.search(symbol)
    if match is None or "(anonymous namespace)" in symbol:
        return None
    arch, kernel = match.groups()
    kernel = kernel.replace(f"<{arch.removeprefix('sm')}>", "<arch>")  # the same for each architecture
    return kernel.replace(f"mla::emulated_{arch}::", "").replace("mla::", "").strip(), arch


def kernels_in(path: Path) -> dict[str, set[str]]:
    """Returns the architectures of each kernel of the library."""
    found = defaultdict(set)
    for _, symbol in symbols(path):
        if (kernel := kernel_of(symbol)) is not None:
            found[kernel[0]].add(kernel[1])
    return found


def kernels_run(log: Path) -> dict[str, set[str]]:
    """Returns the architectures for which each kernel ran, from what tests/kernel_log.cpp wrote."""
    entries = defaultdict(set)
    for file in log.iterdir():
        for line in file.read_text(encoding="utf-8").splitlines():
            program, address = line.rsplit(" ", 1)
            entries[program].add(int(address, 16))
    found = defaultdict(set)
    for program, addresses in entries.items():
        for address, symbol in symbols(Path(program)):
            if address in addresses and (kernel := kernel_of(symbol)) is not None:
                found[kernel[0]].add(kernel[1])
    return found


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit((__doc__ or "").splitlines()[0])
    build = Path(sys.argv[1])
    command = ["ctest", "--test-dir", build, "--output-on-failure", "--parallel", "2", "--label-exclude", "nested"]
    with tempfile.TemporaryDirectory() as log:
        failed = subprocess.run(["env", f"MLA_KERNEL_LOG={log}", *command], check=False).returncode != 0
        ran = kernels_run(Path(log))
    everywhere = kernels_in(build / "src" / "libmla.a")
    never = {kernel for kernel in everywhere if not ran[kernel]}
    for kernel, archs in sorted(everywhere.items()):
        if missing := archs - ran[kernel]:
            print(f"{'never' if kernel in never else 'not for all':12}{kernel}: {' '.join(sorted(missing))}")
    print(f"{len(everywhere)} kernels, {len(never)} of which no test runs")
    return 1 if never or failed else 0


if __name__ == "__main__":
    sys.exit(main())
