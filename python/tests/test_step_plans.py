# SPDX-License-Identifier: Apache-2.0
"""Tests the plans that the layers of a step share in the plug-ins for engines."""

import gc
import weakref

import pytest

pytest.importorskip("torch")

from libmla.integrations.plans import StepPlan, StepPlans


class Made:
    """Stands for a plan."""


def test_the_first_layer_makes_the_plan_and_makes_it_anew():
    plan = StepPlan(None)
    made = []

    def make(workspace):
        made.append(Made())
        return made[-1]

    assert plan.get(0, make) is plan.get(1, make) is made[0]
    assert plan.get(0, make) is plan.get(1, make) is made[1]
    plan.forget()
    assert plan.get(1, make) is made[2]
    assert plan.get(0, make) is made[2] and len(made) == 3


def test_kinds_of_layers_have_plans_of_their_own_and_steps_too():
    plans, first, second = StepPlans(), object(), object()
    of_first = plans.of(first, "a")
    assert plans.of(first, "a") is of_first and plans.of(first, "b") is not of_first
    assert plans.of(second, "a") is not of_first


def test_the_plans_of_the_step_before_are_given_up():
    plans, made = StepPlans(), Made()
    kept = weakref.ref(made)
    plans.of("first", "a").get(0, lambda workspace, made=made: made)
    del made
    assert kept() is not None
    plans.of("second", "b")
    gc.collect()
    assert kept() is None
