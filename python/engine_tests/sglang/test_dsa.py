# SPDX-License-Identifier: Apache-2.0
"""Sparse attention with an indexer (V3.2): through SGLang's own forward passes, over its pool formats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import engine
import pytest
import torch
from engine import LATENT, NOPE, ROPE
from reference import attend, causal, error

HEADS, TOPK, SLOTS = 6, 64, 512
SCALE = (NOPE + ROPE) ** -0.5
FORMATS = ["bf16", "fp8_ds_mla", "fp8"]


@pytest.fixture
def make_backend(device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the backend over a pool of a format, and says what its rows are: f64 [slots, 576]."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool

    from libmla.integrations.sglang.dsa import DsaBackend

    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("where a GPU is, SGLang joins the parts of a query on it")
    if device == "cpu":  # SGLang asks for one, and does not need it here
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    args = engine.publish()
    hf = SimpleNamespace(
        architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32", index_topk=TOPK, index_head_dim=128
    )
    config = SimpleNamespace(
        hf_config=hf,
        context_len=1024,
        num_attention_heads=HEADS,
        qk_nope_head_dim=NOPE,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
    )

    def make(form: str, hisparse: Any = None) -> tuple[Any, torch.Tensor]:
        dtype = torch.bfloat16 if form == "bf16" else torch.float8_e4m3fn
        width = 656 if form == "fp8_ds_mla" else None
        pool = MLATokenToKVPool(
            SLOTS, 64, dtype, LATENT, ROPE, 2, device, False, use_dsa=True, override_kv_cache_dim=width
        )
        rows = torch.randn(SLOTS + 64, LATENT + ROPE).bfloat16()
        buffer = pool.kv_buffer[0]
        if form == "bf16":
            buffer.copy_(rows[:, None])
        elif form == "fp8":
            rows = rows.to(dtype)
            buffer.copy_(rows.view(torch.uint8)[:, None])
        else:
            scales = torch.exp2(torch.randint(-3, 2, (len(rows), 4)).float())
            data = (rows[:, :LATENT].float() / scales.repeat_interleave(128, 1)).to(dtype)
            parts = [data.view(torch.uint8), scales.view(torch.uint8), rows[:, LATENT:].contiguous().view(torch.uint8)]
            buffer.copy_(torch.cat(parts, 1)[:, None])
            known = (data.double() * scales.double().repeat_interleave(128, 1)).bfloat16()
            rows = torch.cat([known, rows[:, LATENT:]], 1)
        runner = SimpleNamespace(
            device=device,
            dtype=torch.bfloat16,
            kv_cache_dtype=dtype,
            page_size=64,
            model_config=config,
            token_to_kv_pool=pool,
            req_to_token_pool=ReqToTokenPool(8, 1024, device, enable_memory_saver=False),
            kv_index_translator=None,
            hisparse_coordinator=hisparse,
            is_draft_worker=False,
            max_running_requests=8,
            server_args=args,
        )
        return DsaBackend(runner), rows.double()

    return make


def absorbed_layer(layer_id: int = 0) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    return RadixAttention(HEADS, LATENT + ROPE, SCALE, num_kv_heads=1, layer_id=layer_id, v_head_dim=LATENT)


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY"])
@pytest.mark.parametrize("form", FORMATS)
def test_keys_of_the_indexer(device: str, make_backend: Any, form: str, mode: str) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend, rows = make_backend(form)
    queries = 5
    picked = torch.stack([torch.randperm(SLOTS)[:TOPK] for _ in range(queries)]).int()
    length = torch.tensor([TOPK, 1, 33, TOPK, 40], dtype=torch.int32)
    picked[torch.arange(TOPK) >= length[:, None]] = -1
    picked[3, 5] = -1
    expected = []
    q = torch.randn(queries, HEADS, LATENT + ROPE).bfloat16()
    for query in range(queries):
        keys = rows[picked[query][picked[query] >= 0].long()]
        expected.append(attend(q[query][None], keys[:, None], keys[:, None, :LATENT], SCALE)[0])
    for slot in set(range(SLOTS + 64)) - set(picked.flatten().tolist()):
        backend.token_to_kv_pool.kv_buffer[0].view(torch.uint8)[slot] = 0xFF  # NaN
    backend.forward_metadata = SimpleNamespace(dsa_cache_seqlens_int32=length.to(device))
    out = backend.forward(
        q[..., :LATENT].contiguous().to(device),
        None,
        None,
        absorbed_layer(),
        SimpleNamespace(forward_mode=ForwardMode[mode]),
        save_kv_cache=False,
        q_rope=q[..., LATENT:].to(device),
        topk_indices=picked.to(device),
    )
    assert error(out.view(queries, HEADS, LATENT), torch.cat(expected)) < 1e-2


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY"])
def test_one_plan_a_step(device: str, make_backend: Any, calls: Any, mode: str) -> None:
    """The first layer of a step plans for all, though each attends to other keys in another pool."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend, rows = make_backend("bf16")
    pool = backend.token_to_kv_pool
    pool.kv_buffer[1].copy_(pool.kv_buffer[0].flip(0))
    stored = [rows, rows.flip(0)]
    q = torch.randn(3, HEADS, LATENT + ROPE).bfloat16()
    for length in ([TOPK, 1, 33], [7, TOPK, TOPK]):  # a step each
        calls.clear()
        backend.forward_metadata = SimpleNamespace(
            dsa_cache_seqlens_int32=torch.tensor(length, dtype=torch.int32, device=device)
        )
        for layer_id in (0, 1):
            picked = torch.stack([torch.randperm(SLOTS)[:TOPK] for _ in length]).int()
            expected = []
            for query, count in enumerate(length):
                keys = stored[layer_id][picked[query, :count].long()][:, None]
                expected.append(attend(q[query][None], keys, keys[..., :LATENT], SCALE)[0])
            out = backend.forward(
                q[..., :LATENT].contiguous().to(device),
                None,
                None,
                absorbed_layer(layer_id),
                SimpleNamespace(forward_mode=ForwardMode[mode]),
                save_kv_cache=False,
                q_rope=q[..., LATENT:].to(device),
                topk_indices=picked.to(device),
            )
            assert error(out.view(-1, HEADS, LATENT), torch.cat(expected)) < 1e-2
        assert calls.plans == ["decode_sparse"]
        assert calls.planned_runs == ["decode_sparse"] * 2 and not calls.other_runs


class SwappedIn:
    """HiSparse's coordinator, as far as a backend asks it: keys of the indexer to slots on the device, -1 for none."""

    def __init__(self, slots: torch.Tensor) -> None:
        self._slots = slots
        self.asked: list[int] = []

    def swap_in_selected_pages(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, topk_indices: torch.Tensor, layer_id: int
    ) -> torch.Tensor:
        self.asked.append(layer_id)
        return torch.where(topk_indices < 0, -1, self._slots[topk_indices.long()]).int()


@pytest.mark.parametrize("form", FORMATS)
def test_slots_of_hisparse(device: str, make_backend: Any, form: str) -> None:
    """Slots that SGLang swapped in, with -1 among them."""
    from sglang.srt.layers.attention.dsa_backend import TopkTransformMethod
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    slots = torch.randperm(SLOTS)
    slots[::5] = -1
    coordinator = SwappedIn(slots.to(device))
    backend, rows = make_backend(form, coordinator)
    assert backend.get_topk_transform_method(ForwardMode.EXTEND) is TopkTransformMethod.PAGED
    picked = torch.stack([torch.randperm(SLOTS)[:TOPK] for _ in range(3)]).int()
    picked[1, 20:] = -1
    q, expected = torch.randn(3, HEADS, LATENT + ROPE).bfloat16(), []
    for query in range(3):
        there = slots[picked[query][picked[query] >= 0].long()]
        keys = rows[there[there >= 0]][:, None]
        expected.append(attend(q[query][None], keys, keys[..., :LATENT], SCALE)[0])
    length = torch.tensor([TOPK, 20, TOPK], dtype=torch.int32, device=device)
    backend.forward_metadata = SimpleNamespace(dsa_cache_seqlens_int32=length)
    out = backend.forward(
        q[..., :LATENT].contiguous().to(device),
        None,
        None,
        absorbed_layer(),
        SimpleNamespace(forward_mode=ForwardMode.DECODE, req_pool_indices=torch.arange(3), seq_lens=length),
        save_kv_cache=False,
        q_rope=q[..., LATENT:].to(device),
        topk_indices=picked.to(device),
    )
    assert coordinator.asked == [0]
    assert error(out.view(-1, HEADS, LATENT), torch.cat(expected)) < 1e-2


def test_sink(device: str, make_backend: Any) -> None:
    backend, rows = make_backend("bf16")
    q, sink = torch.randn(2, HEADS, LATENT + ROPE).bfloat16(), torch.randn(HEADS) + 5
    picked = torch.stack([torch.randperm(SLOTS)[:TOPK] for _ in range(2)]).int()
    cache = backend.token_to_kv_pool.get_key_buffer(0)
    named = {"v_head_dim": LATENT, "page_table_1": picked.to(device), "sm_scale": SCALE, "attn_sink": sink.to(device)}
    out = backend._forward_flashmla_sparse(q_all=q.to(device), kv_cache=cache, **named)
    keys = [rows[part.long()][:, None] for part in picked]
    expected = [attend(q[i][None], k, k[..., :LATENT], SCALE, sink=sink)[0] for i, k in enumerate(keys)]
    assert error(out, torch.cat(expected)) < 1e-2


def test_short_prompts(device: str, make_backend: Any) -> None:
    """Prompts up to topk are attended densely, up-projected, in one call with their prefix."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend, _ = make_backend("bf16")
    lengths, new = [9, 40], [4, 40]
    q = torch.randn(44, HEADS, NOPE + ROPE).bfloat16()
    k, v = torch.randn(49, HEADS, NOPE + ROPE).bfloat16(), torch.randn(49, HEADS, 128).bfloat16()
    parts = zip(q.split(new), k.split(lengths), v.split(lengths), strict=True)
    expected = torch.cat([attend(*part, SCALE, causal(len(part[0]), len(part[1])))[0] for part in parts])
    backend.use_mha = True
    backend.forward_metadata = SimpleNamespace(
        cu_seqlens_q=torch.tensor([0, 4, 44], dtype=torch.int32, device=device),
        cu_seqlens_k=torch.tensor([0, 9, 49], dtype=torch.int32, device=device),
        max_seq_len_q=40,
        max_seq_len_k=40,
    )
    layer = RadixAttention(HEADS, NOPE + ROPE, SCALE, num_kv_heads=HEADS, layer_id=0, v_head_dim=128)
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    got = backend.forward(q.to(device), k.to(device), v.to(device), layer, batch, save_kv_cache=False)
    assert error(got.view(-1, HEADS, 128), expected) < 1e-2


def test_draft_steps(make_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's container of a draft's steps, with our backend for each."""
    from libmla.integrations.sglang import dsa

    made: list[Any] = []
    backend, _ = make_backend("bf16")
    monkeypatch.setattr(dsa, "DsaBackend", lambda *args, **named: made.append(named) or backend)
    drafts = dsa.DsaMultiStepDraftBackend(SimpleNamespace(), 1, 3)
    assert drafts.attn_backends == [backend] * 2 and drafts.speculative_num_steps == 3
    assert [named["speculative_step_id"] for named in made] == [0, 1]
