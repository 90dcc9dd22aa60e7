# SPDX-License-Identifier: Apache-2.0
"""vLLM's own attention layers for DeepSeek V4, with libmla's functions in FlashMLA's place, against float64."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import libmla
from libmla import flash_mla
from libmla.integrations import vllm as plugin

HEADS, WIDTH, PAGE, SCALE = 5, 512, 64, 0.06


@pytest.fixture
def layer_class(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """The class of vLLM's layer, after a plug-in that was told to take FlashMLA's place."""
    import vllm.v1.attention.ops.flashmla as place
    from vllm.models.deepseek_v4.nvidia import flashmla as layers
    from vllm.v1.attention.backends.mla import sparse_swa

    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.") and module is not None]:
        for name in ("FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"):
            if name in vars(module):  # so that all is as it was after the test
                monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setenv("LIBMLA_VLLM", "flashmla")
    caplog.set_level(logging.INFO, logger="vllm.libmla")
    monkeypatch.setattr(logging.getLogger("vllm.libmla"), "handlers", [caplog.handler])
    plugin.register()
    assert "vLLM's calls of FlashMLA's functions go to libmla" in caplog.text
    assert layers.flash_mla_with_kvcache is place.flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache
    assert layers.flash_mla_sparse_fwd is flash_mla.flash_mla_sparse_fwd
    assert sparse_swa.get_mla_metadata is flash_mla.get_mla_metadata
    return layers.DeepseekV4FlashMLAAttention


def pool(count: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache as vLLM has it, [pages, page size, 584] with gaps between the pages, and what its rows mean."""
    slots = count * page_size
    storage = torch.full((count, libmla.page_bytes("fp8_dsv4", WIDTH, page_size, True)), 0xFF, dtype=torch.uint8)
    cache = libmla.KvCache("fp8_dsv4", kv=storage, page_size=page_size)
    libmla.append(torch.randn(slots, WIDTH).bfloat16(), torch.arange(slots), cache)
    ends, table = torch.tensor([0, slots], dtype=torch.int32), torch.arange(count, dtype=torch.int32)[None]
    rows = libmla.gather(cache, kv_len=ends[1:], out_indptr=ends, block_table=table)
    return storage.as_strided((count, page_size, 584), (storage.stride(0), 584, 1)), rows.double()


def attend(q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """One query [H, 512] over keys [n, 512]."""
    scores = q.double() @ keys.t() * SCALE
    weights = torch.cat([scores, sink.double()[:, None]], -1).softmax(-1)[:, :-1]
    return weights @ keys


@pytest.mark.parametrize("ratio", [1, 128])
def test_decode(layer_class: Any, monkeypatch: pytest.MonkeyPatch, ratio: int) -> None:
    """Two layers of a step: the first plans, the second runs by its plan."""
    plans: list[str] = []
    make = libmla.Plan._make
    monkeypatch.setattr(libmla.Plan, "_make", lambda name, *given: plans.append(name) or make(name, *given))
    tokens = 3
    lengths = torch.tensor([128, 1, 70], dtype=torch.int32)
    picked = torch.stack([torch.randperm(4 * PAGE)[:128] for _ in range(tokens)]).int()
    picked[torch.arange(128) >= lengths[:, None]] = -1
    other_lengths = torch.tensor([8, 3, 0], dtype=torch.int32)
    other = torch.stack([torch.randperm(16)[:8] for _ in range(tokens)]).int()[:, None]
    metadata = SimpleNamespace(
        block_size=256, c128a_global_decode_topk_indices=other, c128a_decode_topk_lens=other_lengths
    )
    schedule = flash_mla.get_mla_metadata()[0]
    swa_metadata = SimpleNamespace(
        num_decodes=tokens,
        num_decode_tokens=tokens,
        is_valid_token=torch.ones(tokens, dtype=torch.bool),
        decode_swa_indices=picked[:, None],
        decode_swa_lens=lengths,
        tile_sched_swaonly=schedule,
        tile_sched_c128a=schedule,
    )
    for _ in range(2):
        (window, window_rows), (compressed, compressed_rows) = pool(4, PAGE), pool(8, 2)
        sink = torch.randn(HEADS)
        layer = SimpleNamespace(
            compress_ratio=ratio, scale=SCALE, attn_sink=sink, swa_cache_layer=SimpleNamespace(kv_cache=window)
        )
        q, output = torch.randn(tokens, HEADS, WIDTH).bfloat16(), torch.zeros(tokens, HEADS, WIDTH).bfloat16()
        layer_class._forward_decode(
            layer,
            q,
            compressed if ratio > 1 else None,
            swa_metadata,
            metadata if ratio > 1 else None,
            ratio <= 1,
            output,
        )
        for token in range(tokens):
            keys = window_rows[picked[token, : lengths[token]].long()]
            if ratio > 1:
                keys = torch.cat([keys, compressed_rows[other[token, 0, : other_lengths[token]].long()]])
            expected = attend(q[token], keys, sink)
            assert (output[token].double() - expected).abs().max() < 1e-2 * expected.abs().max()
    assert plans == ["decode_sparse"]


def test_nothing_is_taken_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.v1.attention.ops.flashmla as place

    before = place.flash_mla_with_kvcache
    monkeypatch.setenv("LIBMLA_VLLM", "custom")
    plugin.register()
    assert place.flash_mla_with_kvcache is before
    assert "libmla.integrations.vllm.flashmla" not in sys.modules or before is not flash_mla.flash_mla_with_kvcache
