# SPDX-License-Identifier: Apache-2.0
"""Tests that the examples of docs/python.md run, in order, and compute what they seem to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import libmla

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_examples() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), PAGE.name, "exec"), names)  # noqa: S102
    q, cache = names["q"], names["cache"]
    for request, length in enumerate(names["kv_len"].tolist()):
        pages = names["block_table"][request].long()
        rows = cache[pages].reshape(-1, 576)[:length].double()
        expected = (q[request].double() @ rows.T * 192**-0.5).softmax(-1) @ rows[:, :512]
        torch.testing.assert_close(names["o"][request].double(), expected, atol=2e-2, rtol=2e-2)


def test_the_table_of_functions_is_complete() -> None:
    table = re.search(r"\| function \|.*?\n\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert table
    listed = {name for row in re.findall(r"\n\|(.*?)\|", table.group()) for name in re.findall(r"`(\w+)`", row)}
    elsewhere = {"KvCache", "UnsupportedError", "__version__", "install_as", "Info", "Explanation"}
    assert set(libmla.__all__) - elsewhere <= listed
    assert all(hasattr(libmla, name) for name in listed)
