# SPDX-License-Identifier: Apache-2.0
"""Dense decode: vLLM's layers, metadata and libmla's kernels, against float64."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from mla_rows import attend, causal, dequantized, relative_error, request_rows
from vllm_engine import SM_SCALE, Engine, Step, step

BATCHES = {
    "single": ([1, 1, 1, 1], [1, 17, 300, 64]),
    "one request": ([1], [129]),
    "uniform drafts": ([4, 4, 4], [4, 37, 260]),
    "ragged drafts": ([1, 4, 2], [9, 33, 70]),
}


def expected(batch: Step, q: torch.Tensor, rows: torch.Tensor, is_causal: bool = True) -> Any:
    """o and lse of the requests one after the other."""
    o, lse = [], []
    for b, (q_len, length) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        own = request_rows(rows, batch.tables[b], length)[:, None]
        visible = causal(q_len, length) if is_causal else torch.ones(q_len, length, dtype=torch.bool)
        start = batch.starts()[b]
        part = attend(q[start : start + q_len].cpu(), own, own[..., :512], visible, SM_SCALE)
        o.append(part[0])
        lse.append(part[1])
    return torch.cat(o), torch.cat(lse)


def inputs(engine: Engine, layer: Any, batch: Step, dtype: torch.dtype, k_scale: float = 1.0) -> Any:
    """Queries [T, 4, 576] and a cache that holds the batch."""
    q = torch.randn(sum(batch.q_lens), 4, 576, dtype=dtype, device=engine.device)
    rows = torch.randn(sum(batch.kv_lens), 576, dtype=dtype, device=engine.device)
    return q, engine.cache(layer, rows, batch, k_scale)


@pytest.mark.parametrize("batch_name", BATCHES)
@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype"),
    [
        ("auto", torch.bfloat16),
        ("auto", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("fp8", torch.bfloat16),
        ("fp8_e4m3", torch.float16),
        ("fp8_ds_mla", torch.bfloat16),
    ],
)
def test_formats(engine: Engine, kv_cache_dtype: str, dtype: torch.dtype, batch_name: str) -> None:
    config = engine.configure(kv_cache_dtype=kv_cache_dtype, dtype=dtype, drafts=3)
    layer = engine.layer(config)
    batch = step(*BATCHES[batch_name])
    q, cache = inputs(engine, layer, batch, dtype, 0.5)
    metadata = engine.builder(config, layer).build(0, engine.common(batch))
    assert (metadata.num_decodes, metadata.num_prefills) == (len(batch.q_lens), 0)
    layer.impl.need_to_return_lse_for_decode = True
    o, lse = layer.impl.forward_mqa(q.split((512, 64), -1), cache, metadata, layer)
    want_o, want_lse = expected(batch, q, dequantized(cache.cpu(), 0.5))
    assert o.dtype == dtype and o.shape == want_o.shape
    assert lse.dtype == torch.float32
    assert relative_error(o, want_o) < 5e-3
    assert torch.allclose(lse.double().cpu(), want_lse, atol=5e-3)


def test_no_lse_unless_needed(engine: Engine) -> None:
    config = engine.configure()
    layer = engine.layer(config)
    batch = step([1], [40])
    q, cache = inputs(engine, layer, batch, torch.bfloat16)
    metadata = engine.builder(config, layer).build(0, engine.common(batch))
    assert layer.impl.forward_mqa(q, cache, metadata, layer)[1] is None


@pytest.mark.parametrize("page_size", [1, 64, 48])
def test_page_sizes(engine: Engine, page_size: int) -> None:
    config = engine.configure(page_size=page_size)
    layer = engine.layer(config)
    batch = step([1, 1], [5, 77], page_size)
    q, cache = inputs(engine, layer, batch, torch.bfloat16)
    metadata = engine.builder(config, layer).build(0, engine.common(batch))
    o, _ = layer.impl.forward_mqa(q, cache, metadata, layer)
    assert relative_error(o, expected(batch, q, dequantized(cache.cpu()))[0]) < 5e-3


def test_pages_of_a_larger_tensor(engine: Engine) -> None:
    """vLLM may interleave the pages of layers."""
    config = engine.configure()
    layer = engine.layer(config)
    batch = step([1, 1], [50, 31])
    whole = torch.full((batch.num_pages, 3, 16, 576), torch.nan, dtype=torch.bfloat16, device=engine.device)
    rows = torch.randn(81, 576, dtype=torch.bfloat16, device=engine.device)
    slots = torch.tensor(batch.slots(0) + batch.slots(1))
    engine.update(layer, rows, slots, whole[:, 1])
    assert torch.equal(whole[:, 1].isnan().all(-1).sum().cpu(), torch.tensor(16 * batch.num_pages - 81))
    assert whole[:, [0, 2]].isnan().all()
    metadata = engine.builder(config, layer).build(0, engine.common(batch))
    q = torch.randn(2, 4, 576, dtype=torch.bfloat16, device=engine.device)
    o, _ = layer.impl.forward_mqa(q, whole[:, 1], metadata, layer)
    assert relative_error(o, expected(batch, q, whole[:, 1].cpu().double())[0]) < 5e-3


@pytest.mark.parametrize("drafts", [0, 3])
def test_padding_of_graphs(engine: Engine, drafts: int) -> None:
    """Requests and queries that only fill a captured graph up: no key, no NaN."""
    if drafts and engine.checks_offsets:
        pytest.skip("offsets in the CPU's memory are checked; test_padding_of_graphs_on_a_gpu emulates a GPU's")
    config = engine.configure(drafts=drafts)
    layer = engine.layer(config)
    queries = 1 + drafts
    batch = step([queries] * 2, [40, 9])
    q, cache = inputs(engine, layer, batch, torch.bfloat16)
    common = engine.common(batch, pad_requests=3, pad_tokens=3 * queries)
    metadata = engine.builder(config, layer).build_for_cudagraph_capture(common)
    assert metadata.num_decodes == 5
    q = torch.cat((q, torch.full((3 * queries, 4, 576), torch.nan, dtype=q.dtype, device=q.device)))
    layer.impl.need_to_return_lse_for_decode = True
    o, lse = layer.impl.forward_mqa(q, cache, metadata, layer)
    want_o, want_lse = expected(batch, q, dequantized(cache.cpu()))
    assert relative_error(o[: 2 * queries], want_o) < 5e-3
    assert torch.allclose(lse[: 2 * queries].double().cpu(), want_lse, atol=5e-3)
    assert torch.equal(o[2 * queries :], torch.zeros_like(o[2 * queries :]))
    assert (lse[2 * queries :] == -torch.inf).all()


def test_padding_of_graphs_on_a_gpu() -> None:
    """The same with several queries, on an emulated GPU, whose memory is not looked into."""
    import libmla

    if 90 not in libmla.info().emulated_archs:
        pytest.skip("this build of libmla emulates no sm90")
    program = """
        import torch
        from libmla.integrations.vllm.attention import Layer, Requests, decode
        from libmla.integrations.plans import StepPlan

        def ints(*values):
            return torch.tensor(values, dtype=torch.int32)

        cache, q = torch.randn(4, 16, 576).bfloat16(), torch.randn(8, 2, 576).bfloat16()
        table = ints(1, 3, 2147483647, 2147483647).view(2, 2)
        # The second request is padding.
        requests = Requests(ints(20, 0), table, ints(0, 4, 4), 4, StepPlan(None))
        o, lse = decode(Layer(0.1, "auto", 512, 64), requests, q, cache, torch.ones(()), want_lse=True)
        keys = cache[[1, 3]].reshape(-1, 576)[:20].double()
        scores = torch.einsum("thd,sd->ths", q[:4].double(), keys) * 0.1
        scores.masked_fill_((torch.arange(20)[None] > torch.arange(16, 20)[:, None])[:, None], -torch.inf)
        assert torch.allclose(lse[:4].double(), torch.logsumexp(scores, -1), atol=5e-3)
        assert torch.allclose(o[:4].double(), torch.softmax(scores, -1) @ keys[:, :512], atol=2e-2)
        assert not o[4:].any() and (lse[4:] == -torch.inf).all()
    """
    environment = {**os.environ, "MLA_EMULATE": "sm90"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kv_lens", [[5, 40], [4, 4]])
def test_non_causal_drafts(engine: Engine, kv_lens: list[int]) -> None:
    """A draft block whose queries all see one another."""
    config = engine.configure(drafts=3)
    layer = engine.layer(config, non_causal_multi_token_decode=True)
    batch = step([4, 4], kv_lens)
    q, cache = inputs(engine, layer, batch, torch.bfloat16)
    metadata = engine.builder(config, layer).build(0, engine.common(batch, causal=False))
    o, _ = layer.impl.forward_mqa(q, cache, metadata, layer)
    assert relative_error(o, expected(batch, q, dequantized(cache.cpu()), is_causal=False)[0]) < 5e-3


def test_layers_share_a_plan(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of a step plans; a second round of the same metadata plans anew."""
    import libmla

    config = engine.configure()
    layers = [engine.layer(config) for _ in range(3)]
    batch = step([1, 1], [50, 31])
    builder = engine.builder(config, layers[0])
    metadata = builder.build(0, engine.common(batch))
    made = []
    plan = libmla.Plan.decode
    monkeypatch.setattr(libmla.Plan, "decode", lambda *args, **named: made.append(1) or plan(*args, **named))
    for rounds in (1, 2):
        for layer in layers:
            q, cache = inputs(engine, layer, batch, torch.bfloat16)
            o, _ = layer.impl.forward_mqa(q, cache, metadata, layer)
            assert relative_error(o, expected(batch, q, dequantized(cache.cpu()))[0]) < 5e-3
        assert len(made) == rounds
    builder.update_draft_decode_metadata(metadata)
    layers[2].impl.forward_mqa(q, cache, metadata, layers[2])
    assert len(made) == 3


def test_batch_invariance(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM's switch, a request's bits are the same alone and among others."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    config = engine.configure()
    layer = engine.layer(config)
    assert layer.impl.layer.batch_invariant
    batch = step([1, 1, 1], [4500, 700, 90])
    q, cache = inputs(engine, layer, batch, torch.bfloat16)
    layer.impl.need_to_return_lse_for_decode = True
    builder = engine.builder(config, layer)
    o, lse = layer.impl.forward_mqa(q, cache, builder.build(0, engine.common(batch)), layer)
    for b in range(3):
        alone = Step([1], [batch.kv_lens[b]], [batch.tables[b]], batch.page_size, batch.num_pages)
        metadata = builder.build(0, engine.common(alone))
        own_o, own_lse = layer.impl.forward_mqa(q[b : b + 1], cache, metadata, layer)
        assert torch.equal(own_o[0], o[b]) and torch.equal(own_lse[0], lse[b])


def test_cache_update_skips_and_ignores_padding(engine: Engine) -> None:
    config = engine.configure()
    layer = engine.layer(config)
    cache = torch.full((2, 16, 576), torch.nan, dtype=torch.bfloat16, device=engine.device)
    rows = torch.randn(5, 576, dtype=torch.bfloat16, device=engine.device)
    # Two rows more than slots: padding.
    engine.update(layer, rows, torch.tensor([17, -1, 3]), cache)
    assert torch.equal(cache.view(32, 576)[[17, 3]], rows[[0, 2]])
    assert cache.view(32, 576).isnan().all(-1).sum() == 30
    engine.update(layer, rows, torch.tensor([1]), cache[:0])  # while vLLM measures memory


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_ds_mla"])
def test_cache_update_quantizes(engine: Engine, kv_cache_dtype: str) -> None:
    """What is stored is what a quantizer of this format stores, to the bit."""
    config = engine.configure(kv_cache_dtype=kv_cache_dtype)
    layer = engine.layer(config)
    batch = step([1], [20])
    rows = torch.randn(20, 576, dtype=torch.bfloat16, device=engine.device) * 3
    cache = engine.cache(layer, rows, batch, 0.25).view(-1, 656 if kv_cache_dtype == "fp8_ds_mla" else 576)
    stored, rows = cache[batch.slots(0)].cpu(), rows.float().cpu()
    if kv_cache_dtype == "fp8":
        want = (rows / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(stored, want)
        return
    scales = rows[:, :512].view(20, 4, 128).abs().amax(-1) / 448
    assert torch.allclose(stored[:, 512:528].contiguous().view(torch.float32), scales)
    want = (rows[:, :512].view(20, 4, 128) / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).view(20, 512)
    assert (stored[:, :512] == want).float().mean() > 0.999  # ties may fall either way
    assert torch.equal(stored[:, 528:].contiguous().view(torch.bfloat16), rows[:, 512:].bfloat16())
