# SPDX-License-Identifier: Apache-2.0
"""Tests bench/fp8_outliers.py: that its errors are what its columns say, on problems that are small."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "bench" / "fp8_outliers.py"
SMALL = ["--heads", "2", "--kv-len", "96", "--queries", "3", "--factors", "1000"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fp8_outliers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fp8_outliers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_format_and_kind_of_outliers_has_a_line(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.json"
    script.main([*SMALL, "--json", str(file)])
    table = capsys.readouterr().out.splitlines()
    lines = json.loads(file.read_text(encoding="utf-8"))
    assert [(one["cache"], one["outliers"]) for one in lines] == [
        (cache, outliers) for cache in script.FORMATS for outliers in ("none", *script.PLACES)
    ]
    assert len(table) == 2 + len(lines) and len({line.count("|") for line in table}) == 1
    for one in lines:
        assert 0 < one["fp8_default"] <= one["fp8_default_worst"]
        # The same queries, rows and cache: errors of both kinds are no larger than their sum.
        assert one["fp8_exact"] <= one["fp8_default"] * 1.5 + one["default_exact"]
        if one["outliers"] != "cancelling":
            assert one["fp8_exact_worst"] < 1 and one["default_exact"] > 5e-3
    usual, cancelling = (next(one for one in lines if one["outliers"] == name) for name in ("none", "cancelling"))
    assert cancelling["fp8_default"] > 3 * usual["fp8_default"]


def test_errors_count_channels_in_units_of_their_size(script: ModuleType) -> None:
    wanted = torch.tensor([[3.0, 4000.0], [4.0, 3000.0]]).double()
    got = wanted + torch.tensor([[0.5, 0.0], [0.0, 250.0]])
    rms, worst = script.error(got, wanted, torch.tensor([1.0, 1000.0]))
    assert worst == pytest.approx(0.1)
    assert rms == pytest.approx(((0.1**2 + 0.05**2) / 2) ** 0.5)
