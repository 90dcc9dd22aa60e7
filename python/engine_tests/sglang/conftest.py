# SPDX-License-Identifier: Apache-2.0
"""What all tests of the plug-in share. They need the real package of SGLang on the path, one of its versions at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import stubs
import torch

stubs.install()

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where tensors lie: on the CPU, and on the GPU where there is one."""
    return str(request.param)


@dataclass
class Calls:
    """What was asked of libmla: plans made, attention that ran by a plan, and attention that planned for itself."""

    plans: list[str] = field(default_factory=list)
    planned_runs: list[str] = field(default_factory=list)
    other_runs: list[str] = field(default_factory=list)

    def clear(self) -> None:
        for names in (self.plans, self.planned_runs, self.other_runs):
            names.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Notes calls of libmla, which go on as ever."""
    import libmla

    seen, make = Calls(), libmla.Plan._make
    monkeypatch.setattr(libmla.Plan, "_make", lambda name, *given: seen.plans.append(name) or make(name, *given))

    def noted(name: str, call: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            (seen.other_runs if named.get("plan") is None else seen.planned_runs).append(name)
            return call(*given, **named)

        return run

    for name in ("decode", "decode_sparse"):
        monkeypatch.setattr(libmla, name, noted(name, getattr(libmla, name)))
    return seen


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """Every test draws the same random numbers, whichever ran before, and needs no gradients."""
    torch.manual_seed(20)
    with torch.no_grad():
        yield
