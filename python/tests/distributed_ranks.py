# SPDX-License-Identifier: Apache-2.0
"""Holds what a rank of the tests of libmla.distributed does: it appends its part of a problem and attends to it."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import batches
import libmla
from libmla.distributed import ContextParallel, combine, shard_heads
from processes import run_ranks

SM_SCALE = 192**-0.5
# Global ranks of the groups. None begins with all the processes before it, and so group ranks differ from global ones.
GROUPS = {1: [3], 2: [1, 3], 3: [0, 2, 3], 4: [0, 1, 2, 3]}


@dataclass
class Case:
    """Describes one whole batch: its tensors have all ranks' heads and tokens.

    Attributes:
        rows: [S, d_qk] rows of all cached tokens, request by request.
        indices: [T, topk], for sparse attention.
        options: further arguments of decode.
        sink: [H].
        settings: arguments of ContextParallel.
        steps: appends the tokens in so many parts.
        in_parts: queries, rows and caches come as pairs.
        emulated: the GPU whose kernels compute on host memory, such as "sm90"; empty: none is emulated.
    """

    q: torch.Tensor
    rows: torch.Tensor
    kv_len: list[int]
    qo_len: list[int]
    cache_format: str = "bf16"
    page_size: int = 16
    indices: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    sink: torch.Tensor | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 1
    table: str = "block_table"
    in_parts: bool = False
    with_plan: bool = False
    emulated: str = ""

    @property
    def qo_indptr(self) -> torch.Tensor:
        return batches.indptr(self.qo_len)


def empty_cache(case: Case, pages: int, device: torch.device) -> Any:
    """Returns a cache full of NaN."""
    width = case.q.shape[-1]
    shape: tuple[int, ...] = (pages, case.page_size, width)
    if case.cache_format in ("bf16", "f16"):
        dtype = torch.bfloat16 if case.cache_format == "bf16" else torch.float16
        return torch.full(shape, math.nan, dtype=dtype, device=device)
    if case.cache_format == "fp8_dsv4":
        shape = (pages, libmla.page_bytes(case.cache_format, width, case.page_size))
    elif case.cache_format == "fp8_ds_mla":
        shape = (pages, case.page_size, libmla.row_bytes(case.cache_format, width))
    kv = torch.full(shape, 0xFF, dtype=torch.uint8, device=device)
    if case.cache_format == "fp8_dsv4":
        return libmla.KvCache("fp8_dsv4", kv, page_size=case.page_size)
    scale = torch.tensor([0.02], device=device) if case.cache_format == "fp8" else None
    return libmla.KvCache(case.cache_format, kv, ckv_scale=scale)


def local_part(case: Case, group: ContextParallel) -> batches.Paged:
    """Returns this rank's pages, in an order of its own."""
    torch.manual_seed(group.rank)
    return batches.paged([group.local_kv_len(length) for length in case.kv_len], case.page_size)


def append_all(case: Case, group: ContextParallel, cache: Any, mine: batches.Paged, device: torch.device) -> None:
    """Appends the rows of all tokens, a part of each request in each step."""
    pages = {name: value.to(device) for name, value in mine.pages(case.table).items()}
    begins = [sum(case.kv_len[:b]) for b in range(len(case.kv_len))]
    for step in range(case.steps):
        now = [[length * s // case.steps for s in (step, step + 1)] for length in case.kv_len]
        rows = [case.rows[begin + old : begin + new] for begin, (old, new) in zip(begins, now, strict=True)]
        pages["kv_len"] = batches.ints([new for _, new in now]).to(device)
        part = torch.cat(rows).to(device)
        given = (part[:, :512], part[:, 512:]) if case.in_parts else part
        group.append(given, cache, **pages, qo_indptr=batches.indptr([new - old for old, new in now]).to(device))


def run(case: Case, process_group: Any, device: torch.device) -> dict[str, Any]:
    context = libmla.Context(device=f"emulated:{case.emulated}") if case.emulated and device.type == "cpu" else None
    group = ContextParallel(process_group, **case.settings, context=context)
    mine = local_part(case, group)
    cache = empty_cache(case, mine.num_pages, device)
    append_all(case, group, cache, mine, device)

    def own(heads: torch.Tensor, dim: int) -> torch.Tensor:
        return shard_heads(heads, group.rank, group.world_size, dim=dim).to(device)

    options = {name: value.to(device) if torch.is_tensor(value) else value for name, value in case.options.items()}
    options |= {name: value.to(device) for name, value in mine.pages(case.table).items()}
    options["kv_len"] = batches.ints(case.kv_len).to(device)
    if len(set(case.qo_len)) > 1:
        options["qo_indptr"] = case.qo_indptr.to(device)
    if case.sink is not None:
        options["attn_sink"] = own(case.sink, 0)
    q: Any = own(case.q, 1)
    attended = cache
    if case.in_parts:
        q = (q[..., :512], q[..., 512:])
        if isinstance(cache, torch.Tensor):
            attended = (cache[..., :512], cache[..., 512:])
    if case.indices is not None:
        o, lse = group.decode_sparse(
            q, attended, case.indices.to(device), **options, sm_scale=SM_SCALE, return_lse=True
        )
    else:
        options["sm_scale"] = SM_SCALE
        if case.with_plan:
            planned = {name: value for name, value in options.items() if name != "attn_sink"}
            options["plan"] = group.plan(q, attended, **planned)
            group.decode(q, attended, **options)
            options["out"] = torch.empty_like(case.q[:, : case.q.shape[1] // group.world_size, :512], device=device)
        o, lse = group.decode(q, attended, **options, return_lse=True)
        assert not case.with_plan or o is options["out"]
    return {"o": o.cpu(), "lse": lse.cpu(), "unowned": changed_slots(case, cache, mine)}


def changed_slots(case: Case, cache: Any, mine: batches.Paged) -> int:
    """Counts the slots that no token of this rank owns and that were written all the same."""
    if case.cache_format == "fp8_dsv4":
        return 0
    kv = cache if isinstance(cache, torch.Tensor) else cache.kv
    kv = kv.cpu().view(torch.uint8).reshape(mine.num_pages * mine.page_size, -1)
    untouched = (kv == nan_row(kv, case)).all(-1)
    untouched[mine.all_slots()] = True
    return int((~untouched).sum())


def nan_row(kv: torch.Tensor, case: Case) -> torch.Tensor:
    """Returns what a slot of a new cache holds, in bytes."""
    if case.cache_format in ("bf16", "f16"):
        dtype = torch.bfloat16 if case.cache_format == "bf16" else torch.float16
        return torch.full((kv.shape[1] // 2,), math.nan, dtype=dtype).view(torch.uint8)
    return torch.full((kv.shape[1],), 0xFF, dtype=torch.uint8)


@dataclass
class States:
    """Holds partial results of every rank, to be combined without the attention before.

    Attributes:
        o: [N, T, H, d_v]. Rows with lse = -inf hold NaN.
        lse: [N, T, H].
    """

    o: torch.Tensor
    lse: torch.Tensor
    sink: torch.Tensor | None
    options: dict[str, Any]


class RefusedStates(States):
    """Holds states that cannot be combined."""


def run_states(case: States, process_group: Any, device: torch.device) -> dict[str, Any]:
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    sink = None if case.sink is None else shard_heads(case.sink, rank, world_size, dim=0).to(device)
    o, lse = combine(case.o[rank].to(device), case.lse[rank].to(device), process_group, attn_sink=sink, **case.options)
    return {"o": o.cpu(), "lse": lse.cpu(), "unowned": 0}


def captured(method: str, process_group: Any, device: torch.device) -> dict[str, Any]:
    """Captures a graph over 200 tokens of two requests each, and replays it over 77 and none.

    Two of the tokens are new.
    """
    group = ContextParallel(process_group, interleave=16, method=method)
    torch.manual_seed(3)
    rows, new = torch.randn(400, 576).bfloat16(), torch.randn(4, 576).bfloat16()
    q = torch.randn(4, 4 * group.world_size, 576).bfloat16()
    table = torch.arange(1, 27, dtype=torch.int32, device=device).reshape(2, 13)
    cache = torch.full((27, 16, 576), math.nan, dtype=torch.bfloat16, device=device)
    kv_len = batches.ints([200, 200]).to(device)
    pages = {"kv_len": kv_len, "block_table": table}
    group.append(rows.to(device), cache, **pages)
    sink = torch.linspace(-2, 8, q.shape[1])
    mine, own_sink = (
        shard_heads(heads, group.rank, group.world_size, dim=dim).to(device) for heads, dim in ((q, 1), (sink, 0))
    )
    new_here = new.to(device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        group.append(new_here, cache, **pages)
        return group.decode(mine, cache, **pages, sm_scale=SM_SCALE, attn_sink=own_sink, return_lse=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = step()
    kv_len.copy_(batches.ints([77, 0]))
    graph.replay()
    torch.cuda.synchronize()
    rows[75:77] = new[:2]
    return {"o": o.cpu(), "lse": lse.cpu(), "unowned": 0, "rows": rows, "q": q, "sink": sink}


def refusal(case: States, process_group: Any, device: torch.device) -> dict[str, Any]:
    """Returns the error that combine answers with, on every rank."""
    try:
        return run_states(case, process_group, device)
    except ValueError as error:
        return {"error": str(error)}


class Crash:
    """Stands for a case in which a rank crashes."""


def crash(case: Crash, process_group: Any, device: torch.device) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


RUNNERS: dict[type, Callable[..., dict[str, Any]]] = {
    Case: run,
    States: run_states,
    RefusedStates: refusal,
    Crash: crash,
}


def spawn(count: int, folder: Path, device_type: str) -> None:
    """Runs `main` in so many processes. An error, a crash too, says which rank was at which case."""
    try:
        run_ranks(main, (count, str(folder), device_type), count)
    except (torch.multiprocessing.ProcessExitedException, torch.multiprocessing.ProcessRaisedException) as error:
        at = folder / f"at{error.error_index}"
        doing = at.read_text(encoding="utf-8") if at.is_file() else "its start"
        raise RuntimeError(f"rank {error.error_index} of {count}, at {doing}: {error}") from None


def main(rank: int, world_size: int, folder: str, device_type: str) -> None:
    """Is one process: runs every case in every group that it is in, and writes the results to a file of its own."""
    # No work is shared with threads: there are as many processes as that.
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    cases = torch.load(f"{folder}/cases.pt", weights_only=False)
    results: dict[tuple[int, str], dict[str, Any]] = {}
    with torch.no_grad():
        for size, ranks in groups(world_size).items():
            group = dist.new_group(ranks)
            if rank not in ranks:
                continue
            calls = [(name, RUNNERS[type(case)], case) for name, case in cases[size].items()]
            if device_type == "cuda":
                calls += [(f"captured {method}", captured, method) for method in ("all_to_all", "all_gather")]
            for name, call, case in calls:
                Path(folder, f"at{rank}").write_text(f"{name}, in a group of {size}", encoding="utf-8")
                results[size, name] = call(case, group, device)
    dist.barrier()
    torch.save(results, Path(folder) / f"results{rank}.pt")
    dist.destroy_process_group()


def groups(world_size: int) -> dict[int, list[int]]:
    """Returns the groups of so many processes, by size."""
    if world_size == len(GROUPS):
        return GROUPS
    return {size: list(range(world_size - size, world_size)) for size in range(1, world_size + 1)}
