# SPDX-License-Identifier: Apache-2.0
"""Tests the Python programs of examples/: each runs, finds its results right and says so, and is listed and short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
MOST_LINES = 100


@pytest.mark.parametrize("name", NAMES)
def test_it_is_right(name: str, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / f"{name}.py"]
    if name == "context_parallel":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if name == "compiled_layer":
        command.append("aot_eager")  # inductor compiles C++ for half a minute
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(line.startswith(f"{name}: ") for line in lines), done.stdout
    assert re.search(r"equal to .* in float64", lines[1])


def test_the_page_lists_them() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert NAMES == sorted(re.findall(r"^\|.*\]\((\w+)\.py\)", page, re.MULTILINE))
    assert all(f"examples/{name}.py" in page for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short(name: str) -> None:
    assert (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").count("\n") <= MOST_LINES
