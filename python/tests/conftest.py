# SPDX-License-Identifier: Apache-2.0
"""Holds what all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import libmla

# JAX's arrays lie where the others of these tests do.
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture
def emulated_sm90() -> str:
    """Names the emulated H100 as a device; a test that asks for it is skipped where the build has none."""
    if 90 not in libmla.info().emulated_archs:
        pytest.skip("this build does not emulate sm90")
    return "emulated:sm90"


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """Lets every test draw the same random numbers, whichever ran before, and run without gradients."""
    torch.manual_seed(20)
    with torch.no_grad():
        yield
