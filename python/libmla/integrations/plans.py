# SPDX-License-Identifier: Apache-2.0
"""Keeps one plan for all layers of a step; knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

import libmla


class StepPlan:
    """Holds the plan of one step. The first layer that asks makes it, and the others use it.

    That layer makes it anew whenever it asks again. So a CUDA graph that is captured with the metadata of a warm-up
    plans for itself, and a draft model may go round several times while lengths change in place.
    """

    __slots__ = ("_layer", "_plan", "_workspace")

    def __init__(self, workspace: torch.Tensor | None) -> None:
        """Nothing is planned yet.

        Args:
            workspace: memory that the steps share, as they run one after the other; None: new memory for each.
        """
        self._workspace = workspace
        self._layer: object = None
        self._plan: libmla.Plan | None = None

    def get(self, layer: object, make: Callable[..., libmla.Plan]) -> libmla.Plan:
        """Returns the plan, made by ``make(workspace=...)`` if it is ``layer`` that makes it."""
        if self._plan is None or self._layer is layer:
            self._layer = layer
            self._plan = make(workspace=self._workspace)
        return self._plan

    def forget(self) -> None:
        """Forgets the plan, since what it was made for has changed in place: the next layer that asks makes it anew."""
        self._plan = None


class StepPlans:
    """Holds the plans of one step, one for each kind of layers: those whose shapes and lengths are the same.

    What a step is, the caller says, by any object that lives for as long as the step does.
    """

    __slots__ = ("_plans", "_step")

    def __init__(self) -> None:
        self._step: object = None
        self._plans: dict[Hashable, StepPlan] = {}

    def of(self, step: object, kind: Hashable) -> StepPlan:
        """Returns the plan of a kind of layers in a step. Those of the step before are given up with its end."""
        if self._step is not step:
            self._step = step
            self._plans = {}
        return self._plans.setdefault(kind, StepPlan(None))
