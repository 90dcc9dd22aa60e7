# SPDX-License-Identifier: Apache-2.0
"""Defines Context, which owns the threads that compute."""

from __future__ import annotations

from collections.abc import Sequence

from . import _core

_new = _core.function("context")
_info = _core.function("context_info")


class Context:
    """Owns the threads of the CPU backends, and says where to compute.

    Calls that name no context share one that the process makes when it first needs it (and again after a fork). Calls
    on one context wait for one another; several contexts may be used at once. A context does not survive a fork.

    Args:
        num_threads: workers, the calling thread among them; 0: as many as ``affinity`` names processors, or where it is
            empty, as many as the process may use.
        affinity: the processor that each worker is pinned to (the first is ignored: the calling thread stays where it
            is); empty: not pinned, workers may use the processors that the calling thread may use now.
        backend: a row or family to force, such as ``"cpu_avx2"``; in operations that have no such row, its family;
            empty: the environment's ``MLA_BACKEND``, else the best.
        device: ``"cpu"``, ``"cuda:1"``: tensors elsewhere are an error; ``"emulated:sm90"``: the kernels of that GPU,
            in the emulator, on tensors in host memory; empty: as the environment's ``MLA_EMULATE`` (``"sm90"``) says,
            else where the tensors are.

    Raises:
        ValueError: an option is wrong.
        libmla.UnsupportedError: the GPU cannot be emulated.
    """

    __slots__ = ("__weakref__", "_handle", "_number")

    def __init__(self, num_threads: int = 0, affinity: Sequence[int] = (), backend: str = "", device: str = "") -> None:
        self._handle = _new(num_threads, tuple(affinity), backend, device)
        self._number = _core.number(self)

    @property
    def num_threads(self) -> int:
        """Returns the number of workers, the calling thread among them."""
        return int(_info(self._handle)[0])

    @property
    def backend(self) -> str:
        """Returns the forced backend, or an empty string if none is forced."""
        return str(_info(self._handle)[1])

    @property
    def device(self) -> str:
        """Returns ``"cpu"``, ``"cuda:0"`` or ``"emulated:sm90"``, or an empty string, which means where the tensors
        are."""
        return str(_info(self._handle)[2])

    def __repr__(self) -> str:
        return f"Context(num_threads={self.num_threads}, backend={self.backend!r}, device={self.device!r})"
