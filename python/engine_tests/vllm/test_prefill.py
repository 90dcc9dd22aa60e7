# SPDX-License-Identifier: Apache-2.0
"""Prompts: whole steps through vLLM's layer, which projects, gathers context, attends with libmla and merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mla_rows import attend, causal, dequantized, relative_error, request_rows
from vllm_engine import SM_SCALE, Engine, Step, step


def expected(layer: Any, batch: Step, q: torch.Tensor, rows: torch.Tensor, num_decodes: int) -> torch.Tensor:
    """[T, H * 128] in the up-projected form; rows [sum of kv_lens, 576] as each path reads them."""
    weight = layer.kv_b_proj.weight.cpu().double().view(4, 256, 512)
    outputs, first = [], 0
    for b, (q_len, length) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        own = rows[first : first + length]
        first += length
        up = torch.einsum("sl,hdl->shd", own[:, :512], weight)
        keys = torch.cat((up[..., :128], own[:, None, 512:].expand(-1, 4, -1)), -1)
        start = batch.starts()[b]
        o, _ = attend(q[start : start + q_len].cpu(), keys, up[..., 128:], causal(q_len, length), SM_SCALE)
        outputs.append(o.reshape(q_len, -1))
    return torch.cat(outputs)


def run(engine: Engine, config: Any, batch: Step, workspace: int | None = None) -> Any:
    """A step through the layer; the output, the one expected, and the metadata."""
    layer = engine.layer(config)
    rows = torch.randn(sum(batch.kv_lens), 576, dtype=config.model_config.dtype, device=engine.device)
    cache = engine.cache(layer, rows, batch)
    builder = engine.builder(config, layer)
    if workspace is not None:
        builder.chunked_prefill_workspace_size = workspace
    metadata = builder.build(0, engine.common(batch))
    q = torch.randn(sum(batch.q_lens), 4, 192, dtype=rows.dtype, device=engine.device)
    ends = [sum(batch.kv_lens[: b + 1]) for b in range(len(batch.kv_lens))]
    new = [torch.arange(end - q_len, end) for q_len, end in zip(batch.q_lens, ends, strict=True)]
    fresh = rows[torch.cat(new).to(rows.device)]
    output = torch.full((len(q), 512), torch.nan, dtype=rows.dtype, device=engine.device)
    layer.forward_impl(q, fresh[:, :512], fresh[:, None, 512:], cache, metadata, output)

    stored = dequantized(cache.cpu())
    read = torch.cat([request_rows(stored, batch.tables[b], length) for b, length in enumerate(batch.kv_lens)])
    for own in new[metadata.num_decodes :]:
        read[own] = rows[own.to(rows.device)].cpu().double()  # new tokens of prompts do not go through the cache
    return output, expected(layer, batch, q, read, metadata.num_decodes), metadata


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_context(engine: Engine, dtype: torch.dtype) -> None:
    output, want, metadata = run(engine, engine.configure(dtype=dtype), step([7, 33, 2], [7, 33, 2]))
    assert (metadata.num_decodes, metadata.num_prefills) == (0, 3)
    assert relative_error(output, want) < 1e-2


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("workspace", [None, 48], ids=["one chunk", "chunks"])
def test_with_context(engine: Engine, kv_cache_dtype: str, workspace: int | None) -> None:
    if kv_cache_dtype == "fp8" and engine.device.type == "cpu":
        pytest.skip("vLLM refuses to gather quantized context on its CPU platform")
    config = engine.configure(kv_cache_dtype=kv_cache_dtype)
    output, want, metadata = run(engine, config, step([9, 20, 5, 3], [9, 150, 90, 19]), workspace)
    assert metadata.prefill.chunked_context is not None
    assert (len(metadata.prefill.chunked_context.chunks) > 1) == (workspace is not None)
    assert relative_error(output, want) < 1e-2


def test_decodes_and_prompts_together(engine: Engine) -> None:
    output, want, metadata = run(engine, engine.configure(), step([1, 1, 12, 30], [40, 3, 12, 95]))
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 2)
    assert relative_error(output, want) < 1e-2


def test_drafts_and_prompts_together(engine: Engine) -> None:
    output, want, metadata = run(engine, engine.configure(drafts=2), step([3, 2, 3, 30], [40, 3, 12, 95]))
    assert (metadata.num_decodes, metadata.num_prefills) == (3, 1)
    assert relative_error(output, want) < 1e-2


def test_batch_invariance(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    made = engine.adapter.PrefillBackend(4, SM_SCALE, 512, 128, 64, 128, engine.config)
    q, k, v = (torch.randn(100, 4, d, dtype=torch.bfloat16, device=engine.device) for d in (192, 192, 128))

    def attended(starts: list[int], rows: slice) -> torch.Tensor:
        made.prepare_metadata(type("Metadata", (), {"query_start_loc": ints(engine, starts)}))
        return made.run_prefill_new_tokens(q[rows], k[rows], v[rows], return_softmax_lse=False)

    assert torch.equal(attended([0, 40, 100], slice(None))[40:], attended([0, 60], slice(40, None)))


def test_lse_and_out(engine: Engine) -> None:
    """lse is [H, T] and natural, and `out` is written where it is given."""
    made = engine.adapter.PrefillBackend(4, SM_SCALE, 512, 128, 64, 128, engine.config)
    q, k, v = (torch.randn(11, 4, d, dtype=torch.bfloat16, device=engine.device) for d in (192, 192, 128))
    chunk = type("Chunk", (), {"query_start_loc": ints(engine, [0, 4]), "cu_seq_lens": ints(engine, [0, 11])})
    out = torch.empty(4, 4, 128, dtype=torch.bfloat16, device=engine.device)
    o, lse = made.run_prefill_context_chunk(chunk, q[:4], k, v, out=out)
    everything = torch.ones(4, 11, dtype=torch.bool)
    want_o, want_lse = attend(q[:4].cpu(), k.cpu(), v.cpu(), everything, SM_SCALE)
    assert o is out and lse.is_contiguous()
    assert relative_error(out, want_o) < 5e-3
    assert torch.allclose(lse.double().cpu(), want_lse.t(), atol=5e-3)


def ints(engine: Engine, values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=engine.device)
