# SPDX-License-Identifier: Apache-2.0
"""Checks what libmla can serve: a check returns None, or the reason against it, which names what to change."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import libmla

from . import pages

_FORMATS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "fp8"}
_ADVICE = "--kv-cache-dtype auto, bfloat16 or fp8_e4m3"


def refuse(reasons: Iterable[str | None]) -> None:
    """Raises a ValueError with all reasons, if there is one."""
    given = [reason for reason in reasons if reason is not None]
    if given:
        raise ValueError("attention backend libmla: " + "; ".join(given))


def mla(use_mla: bool, architecture: str) -> str | None:
    """Checks that the model has latent attention."""
    if use_mla:
        return None
    return f"model: expected one with MLA, got {architecture}: choose another --attention-backend"


def dense_cache(kv_cache_dtype: torch.dtype) -> str | None:
    """Checks that dense attention reads a pool of this element type."""
    if kv_cache_dtype in _FORMATS:
        return None
    return f"kv_cache_dtype: expected bfloat16, float16 or float8_e4m3fn, got {kv_cache_dtype}: set {_ADVICE}"


def v4_layout(layout: str) -> str | None:
    """Checks that libmla reads the rows of a pool of V4's or V4.1's."""
    if layout in pages.V4_FORMATS:
        return None
    return f"KV pool: expected rows of {', '.join(pages.V4_FORMATS)}, got {layout}: set SGLANG_DSV4_KV_LAYOUT=v4 or v41"


def page_size(size: int, slots: int) -> str | None:
    """Checks that a pool of ``slots`` slots falls into pages of ``size`` tokens."""
    if 1 <= size and slots % size == 0:
        return None
    return f"page_size: expected a divisor of the pool's {slots} slots, got {size}: set another --page-size"


def feature(name: str, used: bool, advice: str) -> str | None:
    """Checks that something that libmla does not serve here is off."""
    return f"{name} is not supported: {advice}" if used else None


def device(name: str) -> str | None:
    """Checks that the device is one that libmla computes on, and is there."""
    kind = torch.device(name).type
    if kind not in ("cpu", "cuda"):
        return f"device: expected cuda or cpu, got {kind}"
    if kind == "cuda" and not torch.cuda.is_available():
        return "device: expected a CUDA GPU that PyTorch sees, got none: check the driver, or set --device cpu"
    return None


def row(operation: str, *, device: str, cache: str, q_dtype: torch.dtype, num_heads: int, d_qk: int, d_v: int) -> str:
    """Returns the backend of libmla that runs the operation on the device, see :func:`libmla.explain`.

    Raises ValueError if there is none.
    """
    where = torch.device(device)
    if where.type == "cuda":
        major, minor = torch.cuda.get_device_capability(where)
        device = f"sm{major}{minor}"
    found = libmla.explain(
        operation,
        device=device,
        full_build=False,
        cache=cache,  # type: ignore[arg-type]
        q_dtype=_FORMATS.get(q_dtype, str(q_dtype)),
        num_heads=num_heads,
        d_qk=d_qk,
        d_v=d_v,
    )
    if found.selected is None:
        rows = [row for row in found.rows if row.backend.startswith("cuda") == (where.type == "cuda")]
        refuse([f"{found.problem}: " + "; ".join(f"{row.backend}: {row.reason}" for row in rows)])
    return str(found.selected)


def format_of(kv_cache_dtype: torch.dtype) -> str:
    """Returns the name of the cache format of a pool's element type, one that :func:`dense_cache` takes."""
    return _FORMATS[kv_cache_dtype]
