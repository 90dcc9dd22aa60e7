# SPDX-License-Identifier: Apache-2.0
"""Measures one layer's decode over a cache shared by ranks, by the way in which partial results are combined.

    torchrun --nproc-per-node 2 bench/context_parallel.py [--heads 64] [--batch 1 64] [--kv-len 8192] [--device cpu]

Heads and tokens are those of all ranks. "local" is the attention alone, without collectives. On GPUs each line is a
CUDA graph of 20 layers; figures are the median time of a layer on the slowest rank, in microseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import libmla
from libmla.distributed import ContextParallel, shard_heads

LAYERS, PAGE_SIZE, SM_SCALE = 20, 64, 192**-0.5


def layer_us(layer: Callable[[], Any], device: torch.device, runs: int) -> float:
    """Returns the median time of a call on the slowest rank, in microseconds; each run is 20 calls."""

    def layers() -> None:
        for _ in range(LAYERS):
            layer()

    layers()
    run = layers
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        run = graph.replay
    times = []
    for _ in range(runs):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter_ns() - begin) / LAYERS / 1000)
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def ways_to_decode(batch: int, heads: int, kv_len: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Returns calls of the same decode by the way in which partial results are combined."""
    context = libmla.Context(num_threads=1) if device.type == "cpu" else None
    world_size = dist.get_world_size()
    pages = -(-kv_len // (world_size * PAGE_SIZE))
    cache = torch.randn(batch * pages, PAGE_SIZE, 576, device=device).bfloat16()
    q_all = torch.randn(batch, heads, 576, device=device).bfloat16()
    q = shard_heads(q_all, dist.get_rank(), world_size)
    lengths = {
        "kv_len": torch.full((batch,), kv_len, dtype=torch.int32, device=device),
        "block_table": torch.arange(batch * pages, dtype=torch.int32, device=device).reshape(batch, pages),
        "sm_scale": SM_SCALE,
    }
    share = {"context_parallel": (dist.get_rank(), world_size, 1), "context": context}
    ways: dict[str, Callable[[], Any]] = {
        "local": lambda: libmla.decode(q_all, cache, **lengths, **share, out_dtype="f32", return_lse=True)
    }
    for method in ("all_to_all", "all_gather"):
        for dtype in (torch.float32, torch.bfloat16):
            group = ContextParallel(method=method, partial_dtype=dtype, context=context)
            ways[f"{method} {str(dtype)[6:]}"] = lambda g=group: g.decode(q, cache, **lengths)
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--kv-len", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    for batch in args.batch:
        for name, layer in ways_to_decode(batch, args.heads, args.kv_len, device).items():
            took = layer_us(layer, device, args.runs)
            if dist.get_rank() == 0:
                print(f"batch {batch:4}  kv_len {args.kv_len}  {name:20} {took:9.1f} us", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
