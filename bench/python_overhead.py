# SPDX-License-Identifier: Apache-2.0
"""Measures what a call of libmla.decode from Python costs beyond the same call from C++, at batch 1.

    python bench/python_overhead.py [--heads 16] [--kv-len 1 128] [--calls 2000] [--json FILE]

The C++ call is measured by the tool of the package (`libmla bench`), on one thread; it is `run` of a plan that exists. The
same goes for the first row of each shape, which is the way of an engine's inner loop. The other rows show what each
convenience adds: outputs that the call makes, a plan made on the way, numpy arrays in the place of torch tensors, a
call inside of torch.compile. Figures are medians, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

import libmla
from libmla.cli import tool

D_QK, D_V, PAGE_SIZE = 576, 512, 64
SM_SCALE = 192**-0.5


def cpp_us(heads: int, kv_len: int) -> float:
    """Returns the median time of the C++ call, in microseconds."""
    shape = ["--heads", str(heads), "--kv-len", str(kv_len), "--page-size", str(PAGE_SIZE)]
    command = [str(tool()), "bench", "--op", "decode", "--batch", "1", "--threads", "1", *shape, "--json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output)["results"][0]["median_us"]


def python_us(call: Callable[[], Any], calls: int) -> float:
    """Returns the median time of a call, in microseconds.

    Each call is timed by itself, as the tool does: what interrupts one does not count.
    """
    for _ in range(calls // 10 + 1):
        call()
    times = []
    for _ in range(calls):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def ways_to_call(heads: int, kv_len: int) -> dict[str, Callable[[], Any]]:
    """Returns calls of the same decode by the way in which it is called."""
    pages = -(-kv_len // PAGE_SIZE)
    context = libmla.Context(num_threads=1)
    q = torch.randn(1, heads, D_QK).bfloat16()
    cache = torch.randn(pages, PAGE_SIZE, D_QK).bfloat16()
    lengths = {
        "kv_len": torch.tensor([kv_len], dtype=torch.int32),
        "block_table": torch.arange(pages, dtype=torch.int32).reshape(1, pages),
    }
    named = {**lengths, "sm_scale": SM_SCALE, "context": context}
    plan = libmla.Plan.decode(q, cache, **named)
    out, lse = torch.empty(1, heads, D_V, dtype=torch.bfloat16), torch.empty(1, heads)
    half = {"q": q.half().numpy(), "cache": cache.half().numpy(), "sm_scale": SM_SCALE, "context": context}
    half |= {name: tensor.numpy() for name, tensor in lengths.items()}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        libmla.decode(q, cache, plan=plan, out=out, lse=lse, **named)

    return {
        "plan, out, lse": lambda: libmla.decode(q, cache, plan=plan, out=out, lse=lse, **named),
        "plan": lambda: libmla.decode(q, cache, plan=plan, return_lse=True, **named),
        "out, lse": lambda: libmla.decode(q, cache, out=out, lse=lse, **named),
        "nothing given": lambda: libmla.decode(q, cache, return_lse=True, **named),
        "numpy f16, nothing given": lambda: libmla.decode(return_lse=True, **half),
        "torch.compile; plan, out, lse": lambda: compiled(q, out, lse),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-len", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--calls", type=int, default=2000, help="calls of each row")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    results = []
    print(f"{'heads':>5} {'kv_len':>6}  {'call from Python':<30} {'us':>8} {'beyond C++':>10}")
    for kv_len in arguments.kv_len:
        cpp = cpp_us(arguments.heads, kv_len)
        print(f"{arguments.heads:>5} {kv_len:>6}  {'(C++, plan, out, lse)':<30} {cpp:>8.2f}")
        for way, call in ways_to_call(arguments.heads, kv_len).items():
            us = python_us(call, arguments.calls)
            print(f"{arguments.heads:>5} {kv_len:>6}  {way:<30} {us:>8.2f} {us - cpp:>10.2f}", flush=True)
            results.append({"heads": arguments.heads, "kv_len": kv_len, "call": way, "us": us, "cpp_us": cpp})
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
