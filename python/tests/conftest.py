# SPDX-License-Identifier: Apache-2.0
"""Holds what all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# JAX's arrays lie where the others of these tests do.
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """Lets every test draw the same random numbers, whichever ran before, and run without gradients."""
    torch.manual_seed(20)
    with torch.no_grad():
        yield
