# SPDX-License-Identifier: Apache-2.0
"""Joins libmla to SGLang 0.5.22 as to 0.5.23, which changed none of the interfaces that libmla uses."""

from __future__ import annotations

from .v0_5_23 import install

__all__ = ["install"]
