# SPDX-License-Identifier: Apache-2.0
"""Measures what a decode from Python costs beyond the same call from C++, at batch 1.

    python bench/python_overhead.py [--heads 16] [--kv-len 1 128] [--calls 2000] [--json FILE]

The C++ call is measured by the tool of the package (`libmla bench`), on one thread; it is `run` of a plan that exists. The
same goes for the first row of each shape, which is the way of an engine's inner loop. The other rows show what each
convenience adds: outputs that the call makes, a plan made on the way, numpy arrays in the place of torch tensors, a
call inside of torch.compile, the functions of `libmla.flash_mla`, with metadata that a call before has filled, with
new one for each call, and without. Sparse decode names as many keys as dense decode has. Figures are medians, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

import libmla
from libmla.cli import tool
from libmla.flash_mla import flash_mla_with_kvcache, get_mla_metadata

D_QK, D_V, PAGE_SIZE = 576, 512, 64
SM_SCALE = 192**-0.5


def cpp_us(op: str, heads: int, keys: int) -> float:
    """Returns the median time of the C++ call, in microseconds."""
    shape = ["--heads", str(heads), "--topk" if op == "decode_sparse" else "--kv-len", str(keys)]
    shape += ["--page-size", str(PAGE_SIZE)]
    command = [str(tool()), "bench", "--op", op, "--batch", "1", "--threads", "1", *shape, "--json"]
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


def ways_to_decode(heads: int, kv_len: int) -> dict[str, Callable[[], Any]]:
    """Returns calls of the same dense decode by the way in which it is called."""
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
    of_flash_mla = (q[:, None], cache[:, :, None], lengths["block_table"], lengths["kv_len"], D_V)
    metadata = get_mla_metadata()[0]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        libmla.decode(q, cache, plan=plan, out=out, lse=lse, **named)

    return {
        "plan, out, lse": lambda: libmla.decode(q, cache, plan=plan, out=out, lse=lse, **named),
        "plan": lambda: libmla.decode(q, cache, plan=plan, return_lse=True, **named),
        "out, lse": lambda: libmla.decode(q, cache, out=out, lse=lse, **named),
        "nothing given": lambda: libmla.decode(q, cache, return_lse=True, **named),
        "flash_mla, metadata": lambda: flash_mla_with_kvcache(*of_flash_mla, metadata, causal=True),
        "flash_mla, new metadata": lambda: flash_mla_with_kvcache(*of_flash_mla, get_mla_metadata()[0], causal=True),
        "flash_mla": lambda: flash_mla_with_kvcache(*of_flash_mla, None, causal=True),
        "numpy f16, nothing given": lambda: libmla.decode(return_lse=True, **half),
        "torch.compile; plan, out, lse": lambda: compiled(q, out, lse),
    }


def ways_to_decode_sparse(heads: int, topk: int) -> dict[str, Callable[[], Any]]:
    """Returns calls of the same sparse decode by the way in which it is called."""
    context = libmla.Context(num_threads=1)
    q = torch.randn(1, heads, D_QK).bfloat16()
    cache = torch.randn(-(-topk // PAGE_SIZE), PAGE_SIZE, D_QK).bfloat16()
    indices = torch.randperm(topk, dtype=torch.int32)[None]
    named = {"sm_scale": SM_SCALE, "context": context}
    plan = libmla.Plan.decode_sparse(q, cache, indices, **named)
    out, lse = torch.empty(1, heads, D_V, dtype=torch.bfloat16), torch.empty(1, heads)
    of_flash_mla = (q[:, None], cache[:, :, None], None, None, D_V)
    metadata, indices_of_requests = get_mla_metadata()[0], indices[:, None]
    return {
        "plan, out, lse": lambda: libmla.decode_sparse(q, cache, indices, plan=plan, out=out, lse=lse, **named),
        "plan": lambda: libmla.decode_sparse(q, cache, indices, plan=plan, return_lse=True, **named),
        "out, lse": lambda: libmla.decode_sparse(q, cache, indices, out=out, lse=lse, **named),
        "nothing given": lambda: libmla.decode_sparse(q, cache, indices, return_lse=True, **named),
        "flash_mla, metadata": lambda: flash_mla_with_kvcache(*of_flash_mla, metadata, indices=indices_of_requests),
        "flash_mla, new metadata": lambda: flash_mla_with_kvcache(
            *of_flash_mla, get_mla_metadata()[0], indices=indices_of_requests
        ),
        "flash_mla": lambda: flash_mla_with_kvcache(*of_flash_mla, None, indices=indices_of_requests),
    }


WAYS = {"decode": ways_to_decode, "decode_sparse": ways_to_decode_sparse}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-len", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--calls", type=int, default=2000, help="calls of each row")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    arguments = parser.parse_args()
    # libmla.flash_mla takes no context: the process's own, too, is to have one thread.
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    torch.set_grad_enabled(False)
    results = []
    heads = arguments.heads
    print(f"{'op':<13} {'heads':>5} {'keys':>6}  {'call from Python':<30} {'us':>8} {'beyond C++':>10}")
    for op, ways in WAYS.items():
        for keys in arguments.kv_len:
            cpp = cpp_us(op, heads, keys)
            row = f"{op:<13} {heads:>5} {keys:>6}"
            print(f"{row}  {'(C++, plan, out, lse)':<30} {cpp:>8.2f}")
            for way, call in ways(heads, keys).items():
                us = python_us(call, arguments.calls)
                print(f"{row}  {way:<30} {us:>8.2f} {us - cpp:>10.2f}", flush=True)
                results.append({"op": op, "heads": heads, "kv_len": keys, "call": way, "us": us, "cpp_us": cpp})
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
