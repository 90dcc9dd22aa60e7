# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: two ranks, one after the other, combined as vLLM combines them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mla_rows import relative_error
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.attention.ops.dcp import MLADCPManager, _lse_weighted_combine
from vllm_engine import TOPK, Engine, Step, step

RANKS = 2


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """What vLLM then says of the group, whose collectives are not called here."""
    group = SimpleNamespace(world_size=RANKS, rank_in_group=rank)
    monkeypatch.setattr(parallel_state, "get_dcp_world_size_and_rank", lambda enabled=True: (RANKS, rank))
    for module in (mla_attention, sparse_mla_attention):
        monkeypatch.setattr(module, "get_dcp_group", lambda: group)
    monkeypatch.setattr(MLADCPManager, "__init__", lambda self, **_: setattr(self, "init_kv_gather", lambda *_: None))


def share(batch: Step, rank: int, interleave: int) -> tuple[Step, list[list[int]]]:
    """The requests as a rank holds them, and which tokens of each those are."""
    tokens = [[i for i in range(n) if i // interleave % RANKS == rank] for n in batch.kv_lens]
    own = step(batch.q_lens, [max(1, len(held)) for held in tokens], batch.page_size)
    own.kv_lens = [len(held) for held in tokens]
    return own, tokens


def common(engine: Engine, batch: Step, own: Step, rank: int, interleave: int) -> Any:
    """Global lengths, and the pages of the rank."""
    whole = engine.common(batch)
    held = get_dcp_local_seq_lens(whole.seq_lens, RANKS, rank, interleave)
    assert held.tolist() == own.kv_lens
    return engine.common(
        own,
        seq_lens=whole.seq_lens,
        seq_lens_cpu_upper_bound=whole.seq_lens_cpu_upper_bound,
        max_seq_len=whole.max_seq_len,
        dcp_local_seq_lens=held,
        slot_mapping=torch.full((sum(batch.q_lens),), -1, device=engine.device),
    )


@pytest.mark.parametrize("interleave", [1, 8])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_two_ranks_equal_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str, sparse: bool, interleave: int
) -> None:
    """Several queries each, the causal limit in positions of the whole; one request has nothing on a rank."""
    config = engine.configure(kv_cache_dtype=kv_cache_dtype, sparse=sparse, drafts=3)
    batch = step([1, 4, 3], [1, 37, 90])
    rows = torch.randn(sum(batch.kv_lens), 576, dtype=torch.bfloat16, device=engine.device)
    q = torch.randn(sum(batch.q_lens), 4, 576, dtype=torch.bfloat16, device=engine.device)
    topk = torch.full((len(q), TOPK), -1, dtype=torch.int32)
    for b, (q_len, length) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        for i in range(q_len):
            seen = torch.randperm(length - q_len + 1 + i)[:TOPK]
            topk[batch.starts()[b] + i, : len(seen)] = seen.int()

    def forward(layer: Any, batch: Step, rows: torch.Tensor, common: Any) -> Any:
        if sparse:
            layer.impl.topk_indices_buffer[: len(q)] = topk.to(engine.device)
        cache = engine.cache(layer, rows, batch)
        metadata = engine.builder(config, layer).build(0, common)
        assert metadata.num_decodes == 3
        return layer.impl.forward_mqa(q, cache, metadata, layer)

    whole = engine.layer(config, sparse=sparse)
    whole.impl.need_to_return_lse_for_decode = True
    want_o, want_lse = forward(whole, batch, rows, engine.common(batch))

    config.parallel_config.decode_context_parallel_size = RANKS
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    parts = []
    for rank in range(RANKS):
        on_rank(monkeypatch, rank)
        layer = engine.layer(config, sparse=sparse)
        assert layer.impl.need_to_return_lse_for_decode
        assert layer.impl.layer.context_parallel == (rank, RANKS, interleave)
        own, tokens = share(batch, rank, interleave)
        starts = [sum(batch.kv_lens[:b]) for b in range(3)]
        held = torch.tensor([starts[b] + i for b in range(3) for i in tokens[b]], dtype=torch.int64)
        o, lse = forward(layer, own, rows[held.to(rows.device)], common(engine, batch, own, rank, interleave))
        parts.append((o.float(), lse))
    assert (parts[1][1][0] == -torch.inf).all()  # the first request's only token is on rank 0
    o, lse = _lse_weighted_combine(*map(torch.stack, zip(*parts, strict=True)), return_lse=True)
    assert relative_error(o, want_o.double().cpu()) < 5e-3
    assert torch.allclose(lse, want_lse, atol=1e-3)


def test_sinks_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    on_rank(monkeypatch, 1)
    config = engine.configure(sparse=True)
    with pytest.raises(NotImplementedError, match="expected no sinks with decode context parallelism, .* 2 ranks"):
        engine.layer(config, sparse=True, sinks=torch.zeros(4, device=engine.device))
