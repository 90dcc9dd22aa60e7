# SPDX-License-Identifier: Apache-2.0
"""Keeps a wrapper's plan of libmla between runs, and between the batches of one CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch

import libmla


class KeptPlan:
    """Holds a plan that the first run of a batch makes and the following ones use while their shapes are the same.

    A wrapper's `plan` knows too little (the peer's says neither how many query tokens nor how many pages there are), so
    its first run does the planning. Batches share one workspace while it is large enough. With `in_place`, the next
    batch is planned at once into the memory of the last, to which a captured graph refers.
    """

    def __init__(self, make: Callable[..., libmla.Plan], in_place: bool) -> None:
        self._make = make
        self._in_place = in_place
        self._plan: libmla.Plan | None = None
        self._key: tuple[Any, ...] | None = None
        self._last: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._captured: dict[tuple[Any, ...], libmla.Plan] = {}

    def next_batch(self, **changed: Any) -> None:
        """Takes the next batch, whose lengths have changed, and whose `changed` arguments have."""
        key, self._key = self._key, None
        if self._plan is None or not self._in_place:
            return
        tensors, arguments = self._last
        try:
            self._plan.update(*tensors, **(arguments | changed))
        except ValueError:  # not a batch for these tensors: its first run plans it, or says what is wrong
            return
        self._key = key

    def of(self, *tensors: Any, out: torch.Tensor, **arguments: Any) -> libmla.Plan:
        """Returns the plan for a call with these arguments."""
        key = (out.shape, out.dtype, *(_key(tensor) for tensor in tensors))
        if self._plan is None or key != self._key:
            self._plan = self._renew(key, tensors, arguments | {"out": out})
            self._key = key
        return self._plan

    def _renew(self, key: tuple[Any, ...], tensors: tuple[Any, ...], arguments: dict[str, Any]) -> libmla.Plan:
        # A graph goes on reading the memory of its plan after runs of other shapes: each shape keeps its own.
        reusable = self._captured.get(key) if self._in_place else self._plan
        plan = self._planned(reusable, tensors, arguments)
        if self._in_place:
            self._captured[key] = plan
            self._last = (tensors, arguments)
        return plan

    def _planned(
        self, reusable: libmla.Plan | None, tensors: tuple[Any, ...], arguments: dict[str, Any]
    ) -> libmla.Plan:
        if reusable is not None:
            try:
                reusable.update(*tensors, **arguments)
                return reusable
            except ValueError:  # the workspace is too small, or the arguments are wrong: the next line tells which
                pass
        return self._make(*tensors, **arguments)


def _key(argument: Any) -> Any:
    """Returns the shapes and types of a tensor, a pair of them, or a cache."""
    if isinstance(argument, libmla.KvCache):
        return (argument.format, _key((argument.kv, argument.ckv, argument.kpe)))
    if isinstance(argument, tuple):
        return tuple(_key(part) for part in argument)
    return None if argument is None else (argument.shape, argument.dtype)
