# SPDX-License-Identifier: Apache-2.0
"""Sparse decode: the tokens that an indexer picked, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mla_rows import attend, dequantized, relative_error, request_rows
from vllm_engine import SM_SCALE, TOPK, Engine, Step, step


def pick(batch: Step) -> torch.Tensor:
    """[T, TOPK] tokens of each query's request that it may see, -1 in between and behind."""
    picked = torch.full((sum(batch.q_lens), TOPK), -1, dtype=torch.int32)
    for b, (q_len, length) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        for i in range(q_len):
            seen = torch.randperm(length - q_len + 1 + i)[: TOPK - 3].int()
            picked[batch.starts()[b] + i, torch.randperm(TOPK)[: len(seen)]] = seen
    return picked


def expected(batch: Step, q: torch.Tensor, rows: torch.Tensor, picked: torch.Tensor) -> tuple[torch.Tensor, ...]:
    o, lse = [], []
    for b, length in enumerate(batch.kv_lens):
        own = request_rows(rows, batch.tables[b], length)[:, None]
        for t in range(*batch.starts()[b : b + 2]):
            visible = torch.zeros(1, length, dtype=torch.bool)
            visible[0, picked[t][picked[t] >= 0].long()] = True
            part = attend(q[t : t + 1].cpu(), own, own[..., :512], visible, SM_SCALE)
            o.append(part[0])
            lse.append(part[1])
    return torch.cat(o), torch.cat(lse)


def forward(engine: Engine, config: Any, batch: Step) -> Any:
    layer = engine.layer(config, sparse=True)
    layer.impl.need_to_return_lse_for_decode = True
    dtype = config.model_config.dtype
    rows = torch.randn(sum(batch.kv_lens), 576, dtype=dtype, device=engine.device)
    cache = engine.cache(layer, rows, batch, 0.5)
    metadata = engine.builder(config, layer).build(0, engine.common(batch))
    q = torch.randn(sum(batch.q_lens), 4, 576, dtype=dtype, device=engine.device)
    picked = pick(batch)
    layer.impl.topk_indices_buffer[: len(q)] = picked.to(engine.device)
    o, lse = layer.impl.forward_mqa(q.split((512, 64), -1), cache, metadata, layer)
    return o, lse, *expected(batch, q, dequantized(cache.cpu(), 0.5), picked), metadata


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype"),
    [("auto", torch.bfloat16), ("auto", torch.float16), ("fp8", torch.bfloat16), ("fp8_ds_mla", torch.bfloat16)],
)
def test_formats(engine: Engine, kv_cache_dtype: str, dtype: torch.dtype, page_size: int) -> None:
    config = engine.configure(kv_cache_dtype=kv_cache_dtype, dtype=dtype, page_size=page_size, sparse=True, drafts=3)
    o, lse, want_o, want_lse, metadata = forward(engine, config, step([1, 4, 2, 1], [1, 70, 300, 9], page_size))
    assert metadata.num_decodes == 4
    assert o.dtype == dtype and lse.dtype == torch.float32
    assert relative_error(o, want_o) < 5e-3
    assert torch.allclose(lse.double().cpu(), want_lse, atol=5e-3)


def test_prompts_that_are_longer_than_topk(engine: Engine) -> None:
    """All tokens of the step go through the sparse kernel, decodes first."""
    config = engine.configure(kv_cache_dtype="fp8_ds_mla", sparse=True)
    o, lse, want_o, want_lse, metadata = forward(engine, config, step([1, 40, 25], [30, 40, 60]))
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 2)
    assert relative_error(o, want_o) < 5e-3
    assert torch.allclose(lse.double().cpu(), want_lse, atol=5e-3)


def test_only_the_decodes_of_a_step(engine: Engine) -> None:
    """Short prompts are attended to densely by vLLM: the sparse kernel gets the decodes alone."""
    config = engine.configure(sparse=True)
    layer = engine.layer(config, sparse=True)
    batch = step([1, 1, 9], [30, 50, 9])
    rows = torch.randn(89, 576, dtype=torch.bfloat16, device=engine.device)
    cache = engine.cache(layer, rows, batch)
    metadata = engine.builder(config, layer).build(0, engine.common(batch))
    assert metadata.prefill.use_dense_mha
    q = torch.randn(2, 4, 576, dtype=torch.bfloat16, device=engine.device)
    picked = pick(batch)
    layer.impl.topk_indices_buffer[:11] = picked.to(engine.device)
    o, lse = layer.impl.forward_mqa(q, cache, metadata, layer)
    decodes = Step([1, 1], [30, 50], batch.tables[:2], batch.page_size, batch.num_pages)
    assert lse is None
    assert relative_error(o, expected(decodes, q, dequantized(cache.cpu()), picked)[0]) < 5e-3


def test_queries_without_a_key(engine: Engine) -> None:
    config = engine.configure(sparse=True)
    layer = engine.layer(config, sparse=True)
    layer.impl.need_to_return_lse_for_decode = True
    batch = step([1, 1], [30, 50])
    cache = engine.cache(layer, torch.randn(80, 576, dtype=torch.bfloat16, device=engine.device), batch)
    metadata = engine.builder(config, layer).build(0, engine.common(batch))
    q = torch.randn(2, 4, 576, dtype=torch.bfloat16, device=engine.device)
    layer.impl.topk_indices_buffer[0] = 2147483647  # beyond the request
    o, lse = layer.impl.forward_mqa(q, cache, metadata, layer)
    assert not o.any() and (lse == -torch.inf).all()


def test_sinks(engine: Engine) -> None:
    """Each layer has its own, as Hy4's have, and all layers of a step one plan."""
    assert engine.adapter.SparseBackend.supports_sink() and not engine.adapter.DenseBackend.supports_sink()
    config = engine.configure(sparse=True)
    batch = step([1, 1], [30, 50])
    sinks = torch.randn(2, 4, device=engine.device)
    layers = [engine.layer(config, sparse=True, sinks=own) for own in sinks]
    rows = torch.randn(80, 576, dtype=torch.bfloat16, device=engine.device)
    metadata = engine.builder(config, layers[0]).build(0, engine.common(batch))
    q = torch.randn(2, 4, 576, dtype=torch.bfloat16, device=engine.device)
    picked = pick(batch)
    for layer, own in zip(layers, sinks, strict=True):
        layer.impl.topk_indices_buffer[:2] = picked.to(engine.device)
        cache = engine.cache(layer, rows, batch)
        want, lse = expected(batch, q, dequantized(cache.cpu()), picked)
        want = want * torch.sigmoid(lse - own.double().cpu())[..., None]
        assert relative_error(layer.impl.forward_mqa(q, cache, metadata, layer)[0], want) < 5e-3


def test_batch_invariance(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's switch reaches the kernel."""
    import libmla

    asked = []
    run = libmla.decode_sparse
    monkeypatch.setattr(
        libmla, "decode_sparse", lambda *args, **named: asked.append(named["batch_invariant"]) or run(*args, **named)
    )
    for switch in "01":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", switch)
        forward(engine, engine.configure(kv_cache_dtype="fp8_ds_mla", sparse=True), step([1, 1], [40, 70]))
    assert asked == [False, True]
