# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: captured once as vLLM captures them, replayed for other lengths, pages and numbers of requests.

Without a GPU, the same steps run one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mla_rows import dequantized, relative_error
from vllm_engine import Engine, Step, step

from test_decode import expected
from test_sparse import expected as expected_sparse
from test_sparse import pick

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS = 3
REQUESTS = 4


def captured(forward: Callable[[], Any]) -> Callable[[], Any]:
    """What replays `forward`, after a warm-up with the metadata that is captured."""
    if not torch.cuda.is_available():
        return forward
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = forward()

    def replay() -> Any:
        graph.replay()
        torch.cuda.synchronize()
        return outputs

    return replay


class Runner:
    """A model runner's buffers, whose addresses graphs keep, and some layers in a row."""

    def __init__(self, engine: Engine, queries: int, **options: Any) -> None:
        self.engine, self.queries = engine, queries
        self.sparse = options.get("sparse", False)
        self.config = engine.configure(drafts=queries - 1, **options)
        self.layers = [engine.layer(self.config, sparse=self.sparse) for _ in range(LAYERS)]
        for layer in self.layers:
            layer.impl.need_to_return_lse_for_decode = True
        self.builder = engine.builder(self.config, self.layers[0])
        tokens = REQUESTS * queries
        self.q = torch.zeros(LAYERS, tokens, 4, 576, dtype=torch.bfloat16, device=self.engine.device)
        self.caches: list[torch.Tensor] = []
        self.buffers = {
            "query_start_loc": torch.zeros(REQUESTS + 1, dtype=torch.int32, device=self.engine.device),
            "seq_lens": torch.zeros(REQUESTS, dtype=torch.int32, device=self.engine.device),
            "block_table_tensor": torch.zeros(REQUESTS, 64, dtype=torch.int32, device=self.engine.device),
            "slot_mapping": torch.full((tokens,), -1, dtype=torch.int64, device=self.engine.device),
        }

    def load(self, batch: Step) -> None:
        """Requests into the buffers and the caches, padded up to the graph."""
        common = self.engine.common(batch)
        for name, buffer in self.buffers.items():
            given = getattr(common, name)
            if name == "block_table_tensor":
                buffer.fill_(2147483647)
                buffer[: given.shape[0], : given.shape[1]] = given
            else:
                buffer.fill_({"query_start_loc": sum(batch.q_lens), "slot_mapping": -1}.get(name, 0))
                buffer[: len(given)] = given
        self.q.normal_()
        for i, layer in enumerate(self.layers):
            rows = torch.randn(sum(batch.kv_lens), 576, dtype=torch.bfloat16, device=self.engine.device)
            cache = self.engine.cache(layer, rows, batch)
            if len(self.caches) == LAYERS:
                self.caches[i][: len(cache)] = cache
            else:
                room = torch.zeros(256, *cache.shape[1:], dtype=cache.dtype, device=self.engine.device)
                room[: len(cache)] = cache
                self.caches.append(room)

    def metadata(self, batch: Step, capture: bool) -> Any:
        tokens = REQUESTS * self.queries
        missing = REQUESTS - len(batch.q_lens)
        common = self.engine.common(
            batch,
            pad_requests=missing,
            pad_tokens=tokens - sum(batch.q_lens),
            **self.buffers,
            max_query_len=self.queries,
        )
        return self.builder.build_for_cudagraph_capture(common) if capture else self.builder.build(0, common)

    def forward(self, metadata: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            layer.impl.forward_mqa(self.q[i].split((512, 64), -1), self.caches[i], metadata, layer)
            for i, layer in enumerate(self.layers)
        ]

    def check(self, batch: Step, outputs: list[tuple[torch.Tensor, torch.Tensor]], picked: torch.Tensor) -> None:
        tokens = sum(batch.q_lens)
        for i, (o, lse) in enumerate(outputs):
            rows = dequantized(self.caches[i].cpu())
            if self.sparse:
                want_o, want_lse = expected_sparse(batch, self.q[i][:tokens], rows, picked)
            else:
                want_o, want_lse = expected(batch, self.q[i][:tokens], rows)
            assert relative_error(o[:tokens], want_o) < 5e-3
            assert torch.allclose(lse[:tokens].double().cpu(), want_lse, atol=5e-3)
            assert not o[tokens:].any() and (lse[tokens:] == -torch.inf).all()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("queries", [1, 4])
def test_replay(engine: Engine, queries: int, kv_cache_dtype: str, sparse: bool) -> None:
    if queries > 1 and engine.checks_offsets:
        pytest.skip("offsets in the CPU's memory are checked, and those of padded batches end early")
    runner = Runner(engine, queries, kv_cache_dtype=kv_cache_dtype, sparse=sparse)
    buffer = runner.layers[0].impl.topk_indices_buffer if sparse else None
    for layer in runner.layers:
        if sparse:
            layer.impl.topk_indices_buffer = buffer

    def load(batch: Step) -> torch.Tensor:
        runner.load(batch)
        if not sparse:
            return torch.empty(0)
        picked = pick(batch)
        buffer[: len(picked)] = picked.to(engine.device)
        return picked

    full = [queries] * REQUESTS
    warm_up = step(full, full)
    load(warm_up)
    metadata = runner.metadata(warm_up, capture=True)
    replay = captured(lambda: runner.forward(metadata))

    for batch in (
        step(full, [500, 37, 64, queries]),
        step(full[:2], [900, 5]),
        step(full[:1], [16]),
        step([queries, 1, 1][: 3 if queries > 1 else 1], [300, 20, 7][: 3 if queries > 1 else 1]),
    ):
        picked = load(batch)
        runner.metadata(batch, capture=False)  # as vLLM does before each replay
        runner.check(batch, replay(), picked)


@on_a_gpu
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_nothing_waits_for_the_gpu(engine: Engine, sparse: bool) -> None:
    runner = Runner(engine, 4, sparse=sparse)
    batch = step([4] * REQUESTS, [500, 37, 64, 4])
    runner.load(batch)
    metadata = runner.metadata(batch, capture=False)
    runner.forward(metadata)
    rows = torch.randn(4, 576, dtype=torch.bfloat16, device=engine.device)
    slots = torch.arange(4, device=engine.device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.forward(metadata)
        engine.update(runner.layers[0], rows, slots, runner.caches[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_a_gpu
def test_the_reserved_workspace_is_enough(engine: Engine) -> None:
    """Of every shape within the limits: the sizes of other batches are no larger than what the builder took."""
    import libmla

    config = engine.configure(drafts=7)
    builder = engine.builder(config, engine.layer(config))
    zeros = torch.zeros(1025, dtype=torch.int32, device=engine.device)
    cache = torch.zeros(1, 16, 576, dtype=torch.bfloat16, device=engine.device)
    limit = builder._workspace.shape[0]
    for requests in (1, 2, 7, 16, 64, 128):
        for queries in (1, 2, 3, 8):
            q = torch.zeros(requests * queries, 4, 576, dtype=torch.bfloat16, device=engine.device)
            for indptr in (None, zeros[: requests + 1]):
                plan = libmla.Plan.decode(
                    q,
                    cache,
                    kv_len=zeros[:requests],
                    block_table=zeros[:requests, None],
                    qo_indptr=indptr,
                    sm_scale=1.0,
                )
                assert plan.workspace.shape[0] <= limit
