# SPDX-License-Identifier: Apache-2.0
"""Tests that the Python example of README.md does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

README = Path(__file__).parents[2] / "README.md"


def example() -> str:
    text = README.read_text(encoding="utf-8")
    found = re.search(r"<!-- python example:[^\n]*-->\n```python\n(.*?)```\n<!-- /python example -->", text, re.DOTALL)
    assert found
    return found.group(1)


def test_the_example_computes_attention_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    source = example()
    names: dict[str, Any] = {}
    exec(compile(source, "README.md", "exec"), names)  # noqa: S102
    printed = capsys.readouterr().out
    (said,) = re.findall(r"print\(o\.shape, lse\.shape\)  # (.*)", source)
    assert printed.splitlines()[0] == said
    assert "selected: " in printed

    rows = torch.cat([names["cache"][2], names["cache"][0]])[:100].double()
    assert rows.abs().sum(dim=1).min() > 0, "every token was appended"
    scores = names["q"][0].double() @ rows.T * 192**-0.5
    expected = scores.softmax(dim=-1) @ rows[:, :512]
    torch.testing.assert_close(names["o"][0].double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(names["lse"][0].double(), scores.logsumexp(dim=-1), atol=1e-2, rtol=1e-2)


def test_the_example_is_short() -> None:
    lines = [line for line in example().splitlines() if line.strip()]
    assert len(lines) <= 14 and max(map(len, lines)) <= 120
