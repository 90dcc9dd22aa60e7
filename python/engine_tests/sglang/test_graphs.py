# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: one capture serves every batch of its size. On the CPU what a graph would hold is run again instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import engine
import pytest
import torch
from engine import HEADS, LATENT, ROPE
from reference import attend, error
from test_dense import SCALE, Rows, absorbed_layer, backend_of


def record(step: Callable[[], torch.Tensor], device: str) -> Callable[[], torch.Tensor]:
    """A step that can be replayed: as a CUDA graph, or as it is."""
    step()  # SGLang warms up too
    if device == "cpu":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Makes waiting for the GPU an error: preparing a replay must not."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


class Runner:
    """A graph runner's part: buffers of one batch size, and a step of one layer over them."""

    def __init__(self, runner: Any, backend: Any, mode: Any, size: int, window: int) -> None:
        self.mode, self.size, self.window = mode, size, window
        self.runner, self.backend, self.device = runner, backend, runner.device
        self.batch = engine.forward_batch(runner, mode, [window] * size, [window] * size)
        self.batch.seq_lens_cpu = None  # as under overlap scheduling: lengths are on the GPU alone
        self.q = torch.zeros(size * window, HEADS, LATENT + ROPE, dtype=runner.dtype, device=self.device)
        backend.init_forward_metadata_out_graph(self.batch, in_capture=True)

        def step() -> torch.Tensor:
            backend.init_forward_metadata_in_graph(self.batch)
            q = self.q
            out = backend.forward(q[..., :LATENT], None, None, absorbed_layer(), self.batch, q_rope=q[..., LATENT:])
            return out.view(-1, HEADS, LATENT)

        self.replay = record(step, self.device)

    def run(self, lengths: list[int], q: torch.Tensor) -> torch.Tensor:
        """Replays a batch of requests 1, 2, ...; as SGLang does, rows without one are those of request 0."""
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        padding = self.size - len(lengths)
        rows = torch.tensor([*range(1, len(lengths) + 1), *[0] * padding])
        self.batch.req_pool_indices.copy_(rows)
        self.batch.seq_lens.copy_(torch.tensor([*lengths, *[fill] * padding]))
        self.q.zero_()
        self.q[: len(q)] = q.to(self.device)
        with no_waiting(self.device):
            self.backend.init_forward_metadata_out_graph(self.batch)
        return self.replay()[: len(q)]


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("mode", ["decode", "verify", "draft extend"])
def test_capture_and_replay(device: str, mode: str, page_size: int) -> None:
    """Captured at short lengths; replayed at other lengths, with other pages, with fewer requests, in two sizes."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_spec

    forward_mode = {
        "decode": ForwardMode.DECODE,
        "verify": ForwardMode.TARGET_VERIFY,
        "draft extend": ForwardMode.DRAFT_EXTEND_V2,
    }[mode]
    window = 1 if mode == "decode" else 3
    runner = engine.make_runner(device, page_size=page_size, slots=2048)
    table = engine.place(runner, [window * 2] * 4)
    table[0] = 0
    with get_spec().override(speculative_num_draft_tokens=None if mode == "decode" else window):
        backend = backend_of(runner)
    backend.init_cuda_graph_state(4, 4 * window)
    graphs = {size: Runner(runner, backend, forward_mode, size, window) for size in (4, 2)}

    for size, ends in ((4, [300, 7, 64, 129]), (2, [65, 330]), (4, [3, 200, 127]), (2, [380])):
        table.zero_()
        rows = Rows(runner, ends, [0] * len(ends))
        rows.queries = [window] * len(ends)
        q = torch.randn(len(ends) * window, HEADS, LATENT + ROPE).bfloat16()
        lengths = [end - window for end in ends] if mode == "verify" else ends
        assert error(graphs[size].run(lengths, q), rows.expected(q)) < 1e-2
        assert backend.forward_metadata.plan is not None

    # An eager pass between replays leaves them as they were.
    eager = engine.forward_batch(runner, ForwardMode.DECODE, [380], [1])
    backend.init_forward_metadata(eager)
    backend.forward(q[:1].to(device), None, None, absorbed_layer(), eager)
    assert error(graphs[2].run(lengths, q), rows.expected(q)) < 1e-2


@pytest.mark.parametrize(("topk", "page_size"), [(1, 64), (1, 1), (2, 1)])
@pytest.mark.parametrize("way", ["eager", "graph"])
def test_draft_steps(device: str, way: str, topk: int, page_size: int) -> None:
    """Step i of a draft sees its request's tokens and i + 1 drafts of its own branch."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_spec

    from libmla.integrations.sglang.dense import MlaMultiStepDraftBackend

    steps, lengths = 4, [60, 1, 129]
    runner = engine.make_runner(device, page_size=page_size)
    drafts = topk * steps
    rows = Rows(runner, [length + drafts for length in lengths], [0] * 3)
    with get_spec().override(speculative_num_steps=steps, speculative_num_draft_tokens=4):
        backend = MlaMultiStepDraftBackend(runner, topk, steps)
        assert len(backend.attn_backends) == steps - 1 and not backend.needs_cpu_seq_lens
        batch = engine.forward_batch(runner, ForwardMode.DECODE, lengths, [1] * 3, spec_info=None)
        if way == "graph":
            backend.init_cuda_graph_state(3, 3 * topk)
            true_lengths = batch.seq_lens.clone()
            batch.seq_lens.fill_(1)
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            backend.init_forward_metadata_in_graph(batch)
            batch.seq_lens.copy_(true_lengths)
            with no_waiting(device):
                backend.init_forward_metadata_out_graph(batch)
            backend.init_forward_metadata_in_graph(batch)
        else:
            backend.init_forward_metadata(batch)
    q = torch.randn(3 * topk, HEADS, LATENT + ROPE).bfloat16()
    for step, one in enumerate(backend.attn_backends):
        got = one.forward(q.to(device), None, None, absorbed_layer(), batch).view(-1, HEADS, LATENT)
        expected = []
        for request, length in enumerate(lengths):
            for branch in range(topk):
                first = length + branch * steps
                keys = torch.cat([rows.stored[request][:length], rows.stored[request][first : first + step + 1]])
                expected.append(
                    attend(q[request * topk + branch][None], keys[:, None], keys[:, None, :LATENT], SCALE)[0]
                )
        assert error(got, torch.cat(expected)) < 1e-2
