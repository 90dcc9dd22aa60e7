# SPDX-License-Identifier: Apache-2.0
"""Times several sides of a problem in turns: on a GPU as CUDA graphs, elsewhere by the clock."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from problems import Side

_GRAPH_CALLS = 16  # calls of a graph, at least


class Timer:
    """Times one side: seconds() runs its calls once, or a graph of them, and returns the seconds of one call."""

    def __init__(self, side: Side, device: torch.device) -> None:
        self._device = device
        count = math.ceil(_GRAPH_CALLS / len(side.calls)) if device.type == "cuda" else 1
        self._num_calls = count * len(side.calls)
        for call in side.calls:
            call()  # compiles, plans and allocates what it does once
        self._run: Callable[[], Any] = lambda: [call() for call in side.calls]
        if device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(count):
                    for call in side.calls:
                        call()
            self._run = graph.replay
        self._run()

    def seconds(self) -> float:
        if self._device.type != "cuda":
            begin = time.perf_counter()
            self._run()
            return (time.perf_counter() - begin) / self._num_calls
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / self._num_calls


def in_turns(timers: Mapping[str, Timer], rounds: int) -> dict[str, float]:
    """Returns the median time of a call of each side, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(timer.seconds() * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


@dataclass(frozen=True)
class Sustained:
    """What a side does under the GPU's power limit: the last third of some seconds of runs one after another."""

    us: float
    clock_mhz: float
    watts: float

    @property
    def millijoules(self) -> float:
        """Returns the energy of one call."""
        return self.us * self.watts / 1e3


def sustained(timer: Timer, seconds: float, device: torch.device) -> Sustained:
    times, begin = [], time.monotonic()
    while not times or time.monotonic() - begin < seconds:
        times.append(timer.seconds() * 1e6)
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", gpu, "--format=csv,noheader,nounits", "--query-gpu=clocks.sm,power.draw"]
    found = subprocess.run(query, check=True, capture_output=True, text=True)
    clock, watts = (float(one) for one in found.stdout.split(","))
    return Sustained(statistics.median(times[-max(1, len(times) // 3) :]), clock, watts)
