# SPDX-License-Identifier: Apache-2.0
"""Tests that the examples of docs/transformers.md run, in order, and compute what they seem to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import ARCHITECTURES, WITH_POOLS, one_thread, poisoned_pages  # noqa: F401

PAGE = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")


def test_examples() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), "transformers.md", "exec"), names)  # noqa: S102
    assert names["out"].shape == (3, 217) and names["said"].shape == (2, 34)
    assert names["written"].shape == (2, 20) and names["v4_model"].libmla.cache_format == "fp8_dsv41"
    assert names["cache"].lengths == [33, 28] and names["prefix"].lengths == [200]
    model, users = names["unpatch"](names["model"]), names["batch"]
    assert torch.equal(names["out"][:, :209], users)
    logits = model(users).logits[:, -1]
    torch.testing.assert_close(names["patch"](model)(users).logits[:, -1], logits, atol=2e-2, rtol=2e-2)


def test_all_architectures_are_listed() -> None:
    table = re.search(r"\| architecture.*?\n\n", PAGE, re.DOTALL)
    assert table
    listed = set(re.findall(r"`(\w+)`", re.sub(r"\|[^|]*\|$", "", table.group(), flags=re.MULTILINE))) - {"model_type"}
    assert listed == {name.removesuffix("_yarn") for name in (*ARCHITECTURES, *WITH_POOLS)}
