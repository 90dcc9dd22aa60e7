# SPDX-License-Identifier: Apache-2.0
"""Tests threads of Python (none waits for another's kernel, each gets its own results) and where a context's run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import libmla
from small_problems import decode_problem

THREADS = 4


def ticks_beside_a_call(tokens: int) -> tuple[float, int]:
    """Returns the seconds of one call and how often another thread woke in it, each time after a millisecond or more.

    The call's own first and last moments, in Python, do not count.
    """
    problem = decode_problem((tokens,), heads=64)
    context = libmla.Context(num_threads=1, backend="reference")
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    counter = threading.Thread(target=tick)
    counter.start()
    begin = time.perf_counter()
    libmla.decode(problem.q, problem.cache, context=context, **problem.arguments)
    end = time.perf_counter()
    done.set()
    counter.join()
    share = (end - begin) / 10
    return end - begin, sum(begin + share < moment < end - share for moment in ticks)


def test_the_interpreter_is_free_while_a_kernel_runs() -> None:
    tokens, seconds = 4096, 0.0
    while seconds < 0.1:  # as long as it takes for a kernel of any speed
        tokens *= 2
        seconds, ticks = ticks_beside_a_call(tokens)
    assert ticks >= 10


def run_many(index: int, context: libmla.Context | None, plan: libmla.Plan | None = None) -> bool:
    """Returns whether all results are right. Every thread has a problem of its own, unless a plan says which."""
    problem = decode_problem((5, 40) if plan is not None else (index + 1, 40 - index))
    problem.q = problem.q * (index + 1) / THREADS
    out, lse = torch.empty(2, 8, 512, dtype=torch.bfloat16), torch.empty(2, 8)
    named: dict[str, Any] = {**problem.arguments, "out": out, "lse": lse, "context": context, "plan": plan}
    libmla.decode(problem.q, problem.cache, **named)
    problem.check(out, lse)
    first_out, first_lse = out.clone(), lse.clone()
    for _ in range(200):
        out.zero_()
        libmla.decode(problem.q, problem.cache, **named)
        if not (out.equal(first_out) and lse.equal(first_lse)):
            return False
    return True


def test_threads_with_contexts_of_their_own() -> None:
    contexts = [libmla.Context(num_threads=1) for _ in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(run_many, range(THREADS), contexts))


def test_threads_that_share_a_context() -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(run_many, range(THREADS), [None] * THREADS))


def test_threads_that_share_a_plan() -> None:
    context = libmla.Context(num_threads=2)
    problem = decode_problem((5, 40))
    plan = libmla.Plan.decode(problem.q, problem.cache, context=context, **problem.arguments)
    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(run_many, range(THREADS), [context] * THREADS, [plan] * THREADS))


def test_a_plan_is_made_again_while_others_run_it() -> None:
    """Whoever runs gets the plan before or after: each fits the lengths of its moment or is refused, never mixed."""
    context = libmla.Context(num_threads=1)
    problems = [decode_problem((5, 40)), decode_problem((33, 2))]
    plan = libmla.Plan.decode(problems[0].q, problems[0].cache, context=context, **problems[0].arguments)
    stop = threading.Event()

    def replan() -> None:
        while not stop.is_set():
            for problem in problems:
                plan.update(problem.q, problem.cache, **problem.arguments)

    planner = threading.Thread(target=replan)
    planner.start()
    ran = 0
    try:
        for i in range(400):
            problem = problems[i % 2]
            try:
                o = libmla.decode(problem.q, problem.cache, plan=plan, **problem.arguments)
            except ValueError as error:
                assert "plan" in str(error)
            else:
                problem.check(o)
                ran += 1
    finally:
        stop.set()
        planner.join()
    assert ran > 0


# May use only the processors that the first argument lists; prints how many threads a context has, and the processors of
# those that it started.
BESIDE_OPENMP = """
import os, sys
os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
for module in sys.argv[2:]:
    __import__(module)
import libmla
before = set(os.listdir("/proc/self/task"))
context = libmla.Context()
started = set(os.listdir("/proc/self/task")) - before
print(context.num_threads, *[",".join(map(str, sorted(os.sched_getaffinity(int(task))))) for task in started])
"""


@pytest.mark.parametrize(
    ("modules", "narrowed"), [(("torch", "libmla"), False), (("libmla", "torch"), False), (("torch", "libmla"), True)]
)
def test_threads_use_all_processors_though_openmp_binds_the_first(modules: tuple[str, ...], narrowed: bool) -> None:
    processors = sorted(os.sched_getaffinity(0))[-1 if narrowed else 0 :]
    listed = ",".join(map(str, processors))
    command = [sys.executable, "-c", BESIDE_OPENMP, listed, *modules]
    environment = dict(os.environ, OMP_PROC_BIND="true")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(processors)), *[listed] * (len(processors) - 1)]


def test_workers_are_pinned_to_the_processors_of_affinity() -> None:
    usable = sorted(os.sched_getaffinity(0))
    affinity = [-1, usable[0], usable[-1]]  # the caller's entry is ignored
    before = set(os.listdir("/proc/self/task"))
    context = libmla.Context(affinity=affinity)
    started = sorted(map(int, set(os.listdir("/proc/self/task")) - before))
    assert context.num_threads == 3
    assert [os.sched_getaffinity(task) for task in started] == [{usable[0]}, {usable[-1]}]
    assert os.sched_getaffinity(0) == set(usable)
    with pytest.raises(ValueError, match="affinity: expected processors this process may use, got -1 for worker 1"):
        libmla.Context(affinity=[0, -1])
