# SPDX-License-Identifier: Apache-2.0
"""Tests plans: they are made once, run often, and planned again."""

from __future__ import annotations

import pytest
import torch

import batches
import libmla
from batches import ints

SM_SCALE = 192**-0.5


@pytest.fixture
def decode_problem():
    batch = batches.paged([5, 0, 64, 1, 1500], 16)
    return torch.randn(5, 6, 576).bfloat16(), batches.random_cache(batch), {**batch.pages(), "sm_scale": SM_SCALE}


def calls():
    """Returns, for each operation, its arguments by position and by name."""
    batch = batches.paged([40, 100], 16)
    q, cache = torch.randn(4, 3, 576).bfloat16(), batches.random_cache(batch)
    k, v = torch.randn(30, 3, 576).bfloat16(), torch.randn(30, 3, 128).bfloat16()
    indices = torch.randint(30, (4, 9), dtype=torch.int32)
    ranges = {"qo_indptr": batches.indptr([1, 3]), "kv_indptr": batches.indptr([10, 20])}
    slots = torch.tensor(batch.all_slots())[indices.long()].int()
    return {
        "decode": ((q, cache), batch.pages()),
        "decode_sparse": ((q, cache, slots), {}),
        "prefill": ((q, k, v), ranges),
        "prefill_sparse": ((q, k[:, 0].contiguous(), indices), {}),
    }


@pytest.mark.parametrize("operation", ["decode", "decode_sparse", "prefill", "prefill_sparse"])
def test_every_operation(operation):
    args, named = calls()[operation]
    run = getattr(libmla, operation)
    wanted = run(*args, **named, sm_scale=SM_SCALE, return_lse=True)
    plan = getattr(libmla.Plan, operation)(*args, **named, sm_scale=1.0)
    for _ in range(2):
        given = run(*args, **named, sm_scale=SM_SCALE, return_lse=True, plan=plan)
        assert all(map(torch.equal, given, wanted))
    assert plan.operation == operation and plan.backend.startswith("cpu") and plan.num_tasks > 0
    assert plan.describe() in repr(plan)
    other = getattr(libmla, "prefill" if operation != "prefill" else "decode")
    args, named = calls()[other.__name__]
    with pytest.raises(ValueError, match="plan"):
        other(*args, **named, sm_scale=SM_SCALE, plan=plan)


def test_another_shape_or_length(decode_problem):
    q, cache, named = decode_problem
    plan = libmla.Plan.decode(q, cache, **named)
    with pytest.raises(ValueError, match="decode: "):
        libmla.decode(q[:, :3], cache, **named, plan=plan)
    with pytest.raises(ValueError, match="decode: "):
        libmla.decode(q, cache, **{**named, "kv_len": named["kv_len"] - ints([1, 0, 0, 0, 0])}, plan=plan)
    with pytest.raises(ValueError, match="decode: "):
        libmla.decode(q, cache, **named, causal=False, plan=plan)


def test_planning_again(decode_problem):
    q, cache, named = decode_problem
    plan = libmla.Plan.decode(q, cache, **named)
    shorter = {**named, "kv_len": ints([4, 0, 2, 1, 20])}
    where = torch.from_dlpack(plan.workspace).data_ptr()
    plan.update(q, cache, **shorter)
    assert torch.from_dlpack(plan.workspace).data_ptr() == where
    given = libmla.decode(q, cache, **shorter, plan=plan)
    assert torch.equal(given, libmla.decode(q, cache, **shorter))
    with pytest.raises(ValueError, match="decode: "):
        libmla.decode(q, cache, **named, plan=plan)


def test_a_workspace_grows_with_batches(decode_problem):
    """A plan's own workspace grows, so that a step cannot fail because requests have come; the caller's does not."""
    q, cache, named = decode_problem
    fewer = {**named, **{name: value[:2] for name, value in named.items() if name in ("kv_len", "block_table")}}
    plan = libmla.Plan.decode(q[:2], cache, **fewer)
    (small,) = plan.workspace.shape
    plan.update(q, cache, **named)
    assert plan.workspace.shape[0] > small
    assert torch.equal(libmla.decode(q, cache, **named, plan=plan), libmla.decode(q, cache, **named))
    mine = torch.empty(small, dtype=torch.uint8)
    given = libmla.Plan.decode(q[:2], cache, **fewer, workspace=mine)
    with pytest.raises(ValueError, match="workspace: expected at least [0-9]+ bytes"):
        given.update(q, cache, **named)


def test_workspace_of_the_caller(decode_problem):
    q, cache, named = decode_problem
    (bytes_needed,) = libmla.Plan.decode(q, cache, **named).workspace.shape
    mine = torch.empty(bytes_needed // 4 + 1)
    plan = libmla.Plan.decode(q, cache, **named, workspace=mine)
    assert plan.workspace.data_ptr() == mine.data_ptr()
    assert torch.equal(libmla.decode(q, cache, **named, plan=plan), libmla.decode(q, cache, **named))
    # The workspace goes to the plan that was made last.
    libmla.Plan.decode(q, cache, **named, workspace=mine)
    with pytest.raises(ValueError, match="plan"):
        libmla.decode(q, cache, **named, plan=plan)
    with pytest.raises(ValueError, match="workspace: expected at least [0-9]+ bytes"):
        libmla.Plan.decode(q, cache, **named, workspace=mine[:100])
    with pytest.raises(ValueError, match="workspace: expected contiguous memory"):
        libmla.Plan.decode(q, cache, **named, workspace=torch.empty(8, bytes_needed)[:, ::2])
    with pytest.raises(TypeError, match="workspace: expected a tensor"):
        libmla.Plan.decode(q, cache, **named, workspace=1 << 20)


def test_the_workspace_lives_as_long_as_the_plan(decode_problem):
    q, cache, named = decode_problem
    wanted = libmla.decode(q, cache, **named)
    (bytes_needed,) = libmla.Plan.decode(q, cache, **named).workspace.shape
    plan = libmla.Plan.decode(q, cache, **named, workspace=torch.empty(bytes_needed, dtype=torch.uint8))
    others = [torch.full((bytes_needed,), 255, dtype=torch.uint8) for _ in range(4)]
    assert torch.equal(libmla.decode(q, cache, **named, plan=plan), wanted) and len(others) == 4


def test_a_plan_brings_its_context(decode_problem):
    q, cache, named = decode_problem
    context = libmla.Context(num_threads=1, backend="reference")
    plan = libmla.Plan.decode(q, cache, **named, context=context)
    assert plan.backend == "reference"
    del context
    assert libmla.decode(q, cache, **named, plan=plan).shape == (5, 6, 512)
    with pytest.raises((ValueError, libmla.UnsupportedError), match="backend|plan"):
        libmla.decode(q, cache, **named, plan=plan, context=libmla.Context(backend="cpu"))


def test_what_makes_no_plan(decode_problem):
    q, cache, named = decode_problem
    with pytest.raises(TypeError, match=r"Plan\.decode"):
        libmla.Plan()
    for wrong in (3, "plan", libmla.Context(1)):
        with pytest.raises(TypeError, match="decode: plan: expected"):
            libmla.decode(q, cache, **named, plan=wrong)


def test_emulated_gpu(decode_problem):
    archs = libmla.info().emulated_archs
    if not archs:
        pytest.skip("this build emulates no GPU")
    batch = batches.paged([5, 0, 30], 16)
    q, cache = torch.randn(3, 4, 576).bfloat16(), batches.random_cache(batch)
    named = {**batch.pages(), "sm_scale": SM_SCALE}
    plan = libmla.Plan.decode(q, cache, **named, context=libmla.Context(2, device=f"emulated:sm{archs[0]}"))
    assert plan.backend.startswith("cuda")
    torch.testing.assert_close(
        libmla.decode(q, cache, **named, plan=plan), libmla.decode(q, cache, **named), atol=2e-2, rtol=2e-2
    )
