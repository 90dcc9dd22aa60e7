# SPDX-License-Identifier: Apache-2.0
"""Dense MLA: every mode of SGLang's forward passes against float64, over its own pools and batches."""

from __future__ import annotations

from typing import Any

import engine
import pytest
import torch
from engine import HEADS, LATENT, NOPE, ROPE
from reference import attend, causal, error

SCALE = (NOPE + ROPE) ** -0.5
FORMATS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "f16": (torch.float16, torch.float16),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def absorbed_layer(layer_id: int = 1) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    return RadixAttention(HEADS, LATENT + ROPE, SCALE, num_kv_heads=1, layer_id=layer_id, v_head_dim=LATENT)


def backend_of(runner: Any, **named: Any) -> Any:
    from libmla.integrations.sglang.dense import MlaBackend

    return MlaBackend(runner, **named)


class Rows:
    """The latent rows of requests: those before the new tokens are in the pool, all are known here."""

    def __init__(self, runner: Any, ends: list[int], new: list[int], layer: int = 1) -> None:
        table = runner.req_to_token_pool.req_to_token
        if not table.any():
            engine.place(runner, ends)
        # As a model's are: the latent part normalized, the rotary part of a similar size.
        self.whole = [torch.randn(end, LATENT + ROPE).to(runner.dtype) for end in ends]
        pool = runner.token_to_kv_pool
        for row, (rows, end, take) in enumerate(zip(self.whole, ends, new, strict=True), 1):
            slots = table[row, : end - take].long()
            pool.kv_buffer[layer][slots] = (
                rows[: end - take, None].to(pool.dtype).view(pool.store_dtype).to(slots.device)
            )
        self.new = torch.cat([rows[len(rows) - take :] for rows, take in zip(self.whole, new, strict=True)])
        self.stored = [rows.to(pool.dtype).to(runner.dtype) for rows in self.whole]
        self.queries = new

    def expected(self, q: torch.Tensor, masks: list[torch.Tensor] | None = None) -> torch.Tensor:
        """What absorbed attention over the stored rows gives."""
        out = []
        for index, (part, rows) in enumerate(zip(q.split(self.queries), self.stored, strict=True)):
            seen = causal(len(part), len(rows)) if masks is None else masks[index]
            out.append(attend(part, rows[:, None], rows[:, None, :LATENT], SCALE, seen)[0])
        return torch.cat(out)


def run(
    backend: Any, batch: Any, rows: Rows, q: torch.Tensor, *, separate: bool = True, layer: int = 1
) -> torch.Tensor:
    """A layer's forward pass, with the queries and rows as one tensor or as two each."""
    device, new = batch.seq_lens.device, rows.new[:, None]
    q, new = q.to(device), new.to(device)
    if separate:
        named = {"q_rope": q[..., LATENT:], "k_rope": new[..., LATENT:]}
        q, k = q[..., :LATENT].contiguous(), new[..., :LATENT].contiguous()
    else:
        named, k = {}, new
    out = backend.forward(q, k, k[..., :LATENT], absorbed_layer(layer), batch, **named)
    return out.view(-1, HEADS, LATENT)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("form", FORMATS)
def test_decode(device: str, form: str, page_size: int) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    dtype, kv_dtype = FORMATS[form]
    runner = engine.make_runner(device, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size)
    backend = backend_of(runner)
    lengths = [1, 200, 64, 65, 128]
    rows = Rows(runner, lengths, [1] * 5)
    batch = engine.forward_batch(runner, ForwardMode.DECODE, lengths, [1] * 5)
    backend.init_forward_metadata(batch)
    q = torch.randn(5, HEADS, LATENT + ROPE).to(dtype)
    for separate in (False, True):
        assert error(run(backend, batch, rows, q, separate=separate), rows.expected(q)) < TOLERANCE[dtype]
    plan = backend.forward_metadata.plan
    other = Rows(runner, lengths, [1] * 5, layer=0)  # under the same plan
    assert error(run(backend, batch, other, q, layer=0), other.expected(q)) < TOLERANCE[dtype]
    assert backend.forward_metadata.plan is plan


@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "DRAFT_EXTEND_V2"])
def test_one_plan_a_step(device: str, calls: Any, mode: str) -> None:
    """The first layer of a step plans for all."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = engine.make_runner(device, page_size=16)
    backend = backend_of(runner)
    lengths, new = [70, 33, 5], [1 if mode == "DECODE" else 3] * 3
    rows = [Rows(runner, lengths, new, layer=layer) for layer in (0, 1)]
    q = torch.randn(sum(new), HEADS, LATENT + ROPE).bfloat16()
    for _ in range(2):
        calls.clear()
        batch = engine.forward_batch(runner, ForwardMode[mode], lengths, new)
        backend.init_forward_metadata(batch)
        for layer in (0, 1):
            assert error(run(backend, batch, rows[layer], q, layer=layer), rows[layer].expected(q)) < 1e-2
        assert calls.plans == ["decode"] and calls.planned_runs == ["decode"] * 2 and not calls.other_runs


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("form", FORMATS)
def test_absorbed_prefill(device: str, form: str, page_size: int) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    dtype, kv_dtype = FORMATS[form]
    runner = engine.make_runner(device, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size)
    backend = backend_of(runner)
    lengths, new = [70, 33, 5, 130], [3, 33, 1, 30]
    rows = Rows(runner, lengths, new)
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        batch = engine.forward_batch(runner, mode, lengths, new)
        backend.init_forward_metadata(batch)
        q = torch.randn(sum(new), HEADS, LATENT + ROPE).to(dtype)
        assert error(run(backend, batch, rows, q), rows.expected(q)) < TOLERANCE[dtype]


def test_draft_extend_and_padding(device: str) -> None:
    """A fixed window of new tokens a request; queries beyond the batch's are padding and get zeros."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = engine.make_runner(device, page_size=64)
    backend = backend_of(runner)
    lengths, new = [40, 3, 129], [3, 3, 3]
    rows = Rows(runner, lengths, new)
    batch = engine.forward_batch(runner, ForwardMode.DRAFT_EXTEND_V2, lengths, new)
    backend.init_forward_metadata(batch)
    q = torch.randn(9, HEADS, LATENT + ROPE).bfloat16()
    got = run(backend, batch, rows, q)
    assert error(got, rows.expected(q)) < 1e-2
    padded = torch.cat([q, torch.full_like(q[:2], float("nan"))]).to(device)
    out = backend.forward_extend(padded, None, None, absorbed_layer(), batch).view(-1, HEADS, LATENT)
    assert torch.equal(out[:9], got) and not out[9:].any()


@pytest.mark.parametrize("topk", [1, 2])
def test_target_verify(device: str, topk: int) -> None:
    """Drafts after each request's tokens: a chain, or a tree whose mask the draft stage wrote into our buffer."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    drafts, lengths = 4, [90, 1, 64]
    runner = engine.make_runner(device, page_size=1 if topk > 1 else 64)
    with get_spec().override(speculative_num_draft_tokens=drafts, speculative_eagle_topk=topk):
        backend = backend_of(runner)
    mask = backend.verify_mask
    assert mask.mode == TreeMaskMode.QLEN_ONLY and mask.is_read == (topk > 1) and mask.fits(8)
    masks = None
    if topk > 1:
        tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
        mask.buffer.zero_()
        mask.buffer[: 16 * len(lengths)] = tree.flatten().repeat(len(lengths)).to(device)
        masks = [torch.cat([torch.ones(4, length, dtype=torch.bool), tree], 1) for length in lengths]
    rows = Rows(runner, [length + drafts for length in lengths], [drafts] * 3)
    batch = engine.forward_batch(runner, ForwardMode.TARGET_VERIFY, lengths, [drafts] * 3)
    backend.init_forward_metadata(batch)
    q = torch.randn(12, HEADS, LATENT + ROPE).bfloat16()
    assert error(run(backend, batch, rows, q), rows.expected(q, masks)) < 1e-2


@pytest.mark.parametrize("prefix", ["none", "one shot", "chunks"])
def test_up_projected_prefill(device: str, prefix: str) -> None:
    """The three ways in which SGLang's models prefill without absorption."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    import libmla

    runner = engine.make_runner(device, page_size=16)
    backend = backend_of(runner)
    lengths, new = ([20, 7, 33], [20, 7, 33]) if prefix == "none" else ([50, 7, 99], [20, 7, 33])
    engine.place(runner, lengths)
    layer = RadixAttention(HEADS, NOPE + ROPE, SCALE, num_kv_heads=HEADS, layer_id=0, v_head_dim=128)
    q = torch.randn(sum(new), HEADS, NOPE + ROPE).bfloat16()
    k = [torch.randn(length, HEADS, NOPE + ROPE).bfloat16() for length in lengths]
    v = [torch.randn(length, HEADS, 128).bfloat16() for length in lengths]
    parts = zip(q.split(new), k, v, strict=True)
    states = [attend(*part, SCALE, causal(len(part[0]), len(part[1]))) for part in parts]
    expected, expected_lse = (torch.cat(tensors) for tensors in zip(*states, strict=True))

    batch = engine.forward_batch(runner, ForwardMode.EXTEND, lengths, new)
    backend.init_forward_metadata(batch)
    tail = [rows[len(rows) - take :] for rows, take in zip(k, new, strict=True)]
    tail_v = [rows[len(rows) - take :] for rows, take in zip(v, new, strict=True)]
    queries = q.to(device)

    def forward(keys: list[torch.Tensor], values: list[torch.Tensor]) -> Any:
        return backend.forward(
            queries, torch.cat(keys).to(device), torch.cat(values).to(device), layer, batch, save_kv_cache=False
        )

    if prefix == "chunks":
        batch.set_attn_attend_prefix_cache(False)
        batch.mha_return_lse = True
        states = [forward(tail, tail_v)]
        batch.set_attn_attend_prefix_cache(True)
        starts, sizes = batch.get_prefix_chunk_seq_lens(batch.extend_prefix_lens, 2, 40)
        batch.prefix_chunk_cu_seq_lens = torch.zeros(2, 4, dtype=torch.int32, device=device)
        batch.prefix_chunk_cu_seq_lens[:, 1:] = sizes.cumsum(1)
        for chunk in range(2):  # the second holds nothing of the first two requests
            batch.set_prefix_chunk_idx(chunk)
            slices = [slice(start, start + size) for start, size in zip(starts[chunk].tolist(), sizes[chunk].tolist())]
            states.append(
                forward([x[s] for x, s in zip(k, slices, strict=True)], [x[s] for x, s in zip(v, slices, strict=True)])
            )
        outs, lses = (torch.stack(tensors) for tensors in zip(*states, strict=True))
        got, lse = libmla.merge_states(outs, lses)
        assert error(lse, expected_lse) < 1e-3
    else:
        batch.mha_one_shot = prefix == "one shot" or None
        batch.set_attn_attend_prefix_cache(False)
        got = forward(k, v).view(-1, HEADS, 128)
    assert error(got, expected) < 1e-2


def test_idle(device: str) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = engine.make_runner(device)
    backend = backend_of(runner)
    batch = engine.forward_batch(runner, ForwardMode.DECODE, [5], [1])
    batch.forward_mode, batch.batch_size = ForwardMode.IDLE, 0
    backend.init_forward_metadata(batch)
    q = torch.empty(0, HEADS, LATENT + ROPE, device=device)
    assert backend.forward(q, None, None, absorbed_layer(), batch).shape == (0, HEADS * LATENT)
