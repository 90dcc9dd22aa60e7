# SPDX-License-Identifier: Apache-2.0
"""Says what can be served, and why something cannot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import libmla

from .caches import KV_CACHE_DTYPES, format_of

_ADVICE = {
    "non-MLA not supported": "this model has no multi-head latent attention, the only kind that libmla is for; choose "
    "another --attention-backend",
    "kv_cache_dtype not supported": f"libmla's --kv-cache-dtype is one of {', '.join(KV_CACHE_DTYPES)}",
    "dtype not supported": "libmla's --dtype is bfloat16 or float16",
}
"""Says what to change, by the reason that vLLM's own checks give."""


def advised(reasons: Iterable[str]) -> list[str]:
    """Returns vLLM's reasons, with what to change where that is known."""
    return [f"{reason}: {_ADVICE[reason]}" if reason in _ADVICE else reason for reason in reasons]


def device_of(capability: Any) -> str:
    """Returns the device of :func:`libmla.explain` for vLLM's capability of a GPU; None stands for the CPU."""
    return "cpu" if capability is None else f"sm{capability.major}{capability.minor}"


def why_not(operation: str, device: str, **problem: Any) -> str | None:
    """Returns why libmla cannot run an operation, or None if it can.

    Args:
        operation, device, problem: as in :func:`libmla.explain`.
    """
    found = libmla.explain(operation, device=device, full_build=False, **problem)
    if found.selected is not None:
        return None
    gpu = device != "cpu"
    rows = [row for row in found.rows if row.backend.startswith("cuda") == gpu]
    return f"libmla cannot run {found.problem}: " + "; ".join(f"{row.backend}: {row.reason}" for row in rows)


def why_not_on_cache(
    operation: str, capability: Any, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None
) -> str | None:
    """Returns why libmla cannot run ``operation`` on caches of this kind, or None if it can.

    None also stands where another check says why.
    """
    if kv_cache_dtype is not None and kv_cache_dtype not in KV_CACHE_DTYPES:
        return None
    return why_not(
        operation,
        device_of(capability),
        cache=format_of(kv_cache_dtype, dtype),
        q_dtype=format_of(None, dtype),
        d_qk=head_size,
        d_v=1 << (head_size.bit_length() - 1),
    )


def refuse_options(**options: Any) -> None:
    """Raises NotImplementedError if an option is set that libmla's backends do not follow."""
    for name, value in options.items():
        if value:
            raise NotImplementedError(f"libmla's attention backend: expected no {name}, got {value!r}")


def require_format(kv_cache_dtype: str) -> None:
    """Raises ValueError if the cache has no format of libmla. Not every platform of vLLM asks before."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype: expected one of {', '.join(KV_CACHE_DTYPES)}, got {kv_cache_dtype}")


def require_gpu() -> None:
    """Raises :class:`libmla.UnsupportedError` if libmla cannot use the GPU that the engine runs on."""
    reason = libmla.info().cuda
    if reason is not None:
        raise libmla.UnsupportedError(
            f"libmla's attention backend cannot use the GPU: {reason} (install a build of libmla for CUDA and a driver "
            "that it can load, or choose another --attention-backend)"
        )
