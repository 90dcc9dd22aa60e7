# SPDX-License-Identifier: Apache-2.0
"""Stands in place of an adapter for versions of vLLM that have none: using any name raises an error that says so."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    import vllm

    from . import supported_versions

    raise ImportError(
        f"libmla has an attention backend for vLLM {supported_versions()}, not for {vllm.__version__}: install one of "
        "these versions, or choose another --attention-backend"
    )
