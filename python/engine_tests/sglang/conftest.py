# SPDX-License-Identifier: Apache-2.0
"""What all tests of the plug-in share. They need the real package of SGLang on the path, one of its versions at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import stubs
import torch

stubs.install()

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where tensors lie: on the CPU, and on the GPU where there is one."""
    return str(request.param)


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """Every test draws the same random numbers, whichever ran before, and needs no gradients."""
    torch.manual_seed(20)
    with torch.no_grad():
        yield
