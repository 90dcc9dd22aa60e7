# SPDX-License-Identifier: Apache-2.0
"""Makes one small call, or several, of every operation, for tests of ways to call them."""

from __future__ import annotations

from typing import Any

import torch

import libmla
from small_problems import D_QK, D_V, SM_SCALE

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name of an operation, positional and keyword arguments."""

HEADS = 4
PAGE = 16
PAGES = 6
TOKENS = 3
_KV_LEN = torch.tensor([20, 0, 7], dtype=torch.int32)
_TABLE = torch.arange(PAGES, dtype=torch.int32).reshape(TOKENS, 2)
_SLOTS = torch.tensor([17, -1, 40])
_TABLE_ARGUMENTS = {"kv_len": _KV_LEN, "block_table": _TABLE}


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def packed_cache(cache_format: str) -> libmla.KvCache:
    """Returns a packed cache of random rows."""
    width = D_QK if cache_format == "fp8_ds_mla" else D_V
    if cache_format == "fp8_dsv4":
        page_bytes = libmla.page_bytes(cache_format, width, PAGE)
        cache = libmla.KvCache(cache_format, kv=torch.zeros(PAGES, page_bytes, dtype=torch.uint8), page_size=PAGE)
    else:
        row_bytes = libmla.row_bytes(cache_format, width)
        cache = libmla.KvCache(cache_format, kv=torch.zeros(PAGES, PAGE, row_bytes, dtype=torch.uint8))
    pages = torch.arange(PAGES, dtype=torch.int32)
    libmla.copy_pages(_random(PAGES, PAGE, width), pages, cache, pages)
    return cache


def _fp8_cache() -> libmla.KvCache:
    e4m3 = torch.float8_e4m3fn
    return libmla.KvCache(
        "fp8",
        ckv=_random(PAGES, PAGE, D_V, dtype=e4m3),
        kpe=_random(PAGES, PAGE, D_QK - D_V, dtype=e4m3),
        ckv_scale=torch.tensor([0.5]),
    )


def attention_calls() -> dict[str, Call]:
    """Returns calls of the attention operations, by the name of their case."""
    q = _random(TOKENS, HEADS, D_QK)
    q_pair = (q[..., :D_V], q[..., D_V:])
    cache = _random(PAGES, PAGE, D_QK)
    pair = (cache[..., :D_V].clone(), cache[..., D_V:].clone())
    indices = torch.tensor([[3, -1, 95, 4], [0, 0, 0, -1], [7, 8, 1000, 9]], dtype=torch.int32)
    sparse = {
        "sm_scale": SM_SCALE,
        "topk_length": torch.tensor([4, 1, 0], dtype=torch.int32),
        "topk_length_per": "token",
    }
    dense = {"sm_scale": SM_SCALE, **_TABLE_ARGUMENTS}
    indptr = torch.tensor([0, 1, 3], dtype=torch.int32)
    states = _random(2, TOKENS, HEADS, D_V, dtype=torch.float32), _random(2, TOKENS, HEADS, dtype=torch.float32)
    prefill = (_random(3, HEADS, 192), _random(3, HEADS, 192), _random(3, HEADS, 128))
    return {
        "decode": ("decode", (q, cache), {**dense}),
        "decode, pairs, lse": (
            "decode",
            (q_pair, pair),
            {**dense, "return_lse": True, "lse_base": "2", "lse_inf_without_keys": True},
        ),
        "decode, fp8": ("decode", (q, _fp8_cache()), {**dense, "out_dtype": "f32"}),
        "decode, rank": ("decode", (q, cache), {**dense, "context_parallel": (1, 2, 1), "return_lse": True}),
        "decode, options": (
            "decode",
            (q.float(), cache),
            {**dense, "attn_sink": torch.zeros(HEADS), "window_left": 5, "logits_soft_cap": 30.0, "causal": True},
        ),
        "decode_sparse": ("decode_sparse", (q, packed_cache("fp8_ds_mla"), indices), {**sparse, "return_lse": True}),
        "decode_sparse, two pools": (
            "decode_sparse",
            (q[..., :D_V].contiguous(), packed_cache("fp8_dsv4"), indices),
            {**sparse, "extra_cache": packed_cache("fp8_dsv4"), "extra_indices": indices.clone()},
        ),
        "decode_sparse, finished": (
            "decode_sparse",
            (q, packed_cache("fp8_ds_mla"), indices),
            {
                **sparse,
                "cos_sin": _random(8, D_QK - D_V, dtype=torch.float32),
                "positions": torch.tensor([0, 7, 3]),
                "gate": _random(TOKENS, HEADS, 1),
                "return_scale": True,
                "channels_per_scale": 64,
            },
        ),
        "prefill": ("prefill", prefill, {"qo_indptr": indptr, "kv_indptr": indptr.clone(), "sm_scale": SM_SCALE}),
        "prefill_sparse": (
            "prefill_sparse",
            (q, _random(64, D_QK), indices),
            {"sm_scale": SM_SCALE, "return_max_logits": True},
        ),
        "merge_states": ("merge_states", states, {"out_dtype": torch.bfloat16}),
    }


def cache_calls() -> dict[str, Call]:
    """Returns calls of the operations on caches, by the name of their case."""
    rows = _random(TOKENS, D_QK)
    angles = _random(8, D_QK - D_V, dtype=torch.float32)
    cache = _random(PAGES, PAGE, D_QK)
    whole = torch.zeros(PAGES, PAGE, D_QK, dtype=torch.bfloat16)
    rope = {"cos_sin": angles, "positions": torch.tensor([0, 7, 3])}
    q = (_random(TOKENS, HEADS, D_V), _random(TOKENS, HEADS, D_QK - D_V))
    pages = torch.tensor([1, 4], dtype=torch.int32)
    key, value = rows[:, D_V:].clone(), rows[:, :D_V].clone()
    return {
        "append": ("append", (rows, _SLOTS, cache.clone()), {}),
        "append, views": ("append", ((value, key), _SLOTS, (whole[..., :D_V], whole[..., D_V:])), {}),
        "append, packed": ("append", (rows, _SLOTS, packed_cache("fp8_ds_mla")), {}),
        "append_rope": ("append_rope", (value, key, _SLOTS, cache.clone()), {**rope, "q": q}),
        "append_rope, norms": (
            "append_rope",
            (value, key, _SLOTS, packed_cache("fp8_ds_mla")),
            {**rope, "q": q, "q_norm": True, "norm_weight": _random(D_V), "norm_eps": 1e-3},
        ),
        "finish_output": ("finish_output", (q[0],), {**rope, "gate": _random(TOKENS, HEADS, 1)}),
        "finish_output, scales": ("finish_output", (q[0],), {"return_scale": True, "channels_per_scale": 64}),
        "append_rope, nothing turns": (
            "append_rope",
            (q[0][:, 0].clone(), None, _SLOTS, packed_cache("fp8_nope")),
            {"q": (q[0], None), "q_norm": True, "norm_weight": _random(D_V)},
        ),
        "append_rope, keys only": ("append_rope", (value, key, _SLOTS, packed_cache("fp8_ds_mla")), rope),
        "gather": (
            "gather",
            (cache,),
            {**_TABLE_ARGUMENTS, "out_indptr": torch.tensor([0, 20, 20, 27], dtype=torch.int32), "num_rows": 27},
        ),
        "gather, packed": (
            "gather",
            (packed_cache("fp8_ds_mla"),),
            {**_TABLE_ARGUMENTS, "out_indptr": torch.tensor([0, 2, 2, 4], dtype=torch.int32), "num_rows": 4},
        ),
        "copy_pages": ("copy_pages", (cache, pages, packed_cache("fp8_ds_mla"), pages.clone()), {}),
    }


def compress_calls() -> dict[str, Call]:
    """Returns calls of compress, by the name of their case. Each token ends a group, so that every row is written."""
    kept = {
        "kv_len": torch.tensor([8, 4, 12], dtype=torch.int32),
        "state_table": torch.arange(TOKENS, dtype=torch.int32)[:, None],
    }
    pool = _random(PAGES, PAGE, D_V)
    keys = torch.zeros(PAGES, libmla.indexer_page_bytes(PAGE), dtype=torch.uint8)
    return {
        "compress": (
            "compress",
            (_random(TOKENS, 2 * D_V), _random(TOKENS, 2 * D_V)),
            {
                **kept,
                "ratio": 4,
                "overlap": True,
                "position_bias": _random(4, 2 * D_V, dtype=torch.float32),
                "qo_indptr": torch.arange(TOKENS + 1, dtype=torch.int32),
                "state": _random(TOKENS, 8, 4 * D_V, dtype=torch.float32),
                "norm_weight": _random(D_V),
                "slot_mapping": _SLOTS,
                "cache": pool.clone(),
                "cos_sin": _random(12, 64, dtype=torch.float32),
            },
        ),
        "compress, keys": (
            "compress",
            (_random(TOKENS, 128), _random(TOKENS, 128)),
            {
                **kept,
                "ratio": 2,
                "state": _random(TOKENS, 2, 256, dtype=torch.float32),
                "slot_mapping": _SLOTS,
                "indexer_cache": keys,
                "indexer_page_size": PAGE,
                "indexer_format": "mxfp4",
                "latent_dtype": "f32",
            },
        ),
        "compress, append": (
            "compress",
            (_random(TOKENS, D_V),),
            {
                "kv_len": kept["kv_len"],
                "slot_mapping": _SLOTS,
                "cache": pool.clone(),
                "append": {
                    "q": (_random(TOKENS, HEADS, 448), _random(TOKENS, HEADS, 64)),
                    "q_out": torch.zeros(TOKENS, HEADS, 512, dtype=torch.bfloat16),
                    "q_norm": True,
                    "ckv": _random(TOKENS, 448),
                    "kpe": _random(TOKENS, 64),
                    "slot_mapping": _SLOTS,
                    "cache": packed_cache("fp8_dsv4"),
                    "cos_sin": _random(12, 64, dtype=torch.float32),
                    "positions": torch.tensor([7, 3, 11]),
                    "norm_weight": _random(512),
                },
            },
        ),
        "compress, packed": (
            "compress",
            (_random(TOKENS, D_V, dtype=torch.float32),),
            {"kv_len": kept["kv_len"], "norm_eps": 1e-3, "slot_mapping": _SLOTS, "cache": packed_cache("fp8_dsv4")},
        ),
    }


def index_calls() -> dict[str, Call]:
    """Returns calls of the operations on indices, by the name of their case."""
    indices = torch.tensor([[3, -1, 19, 4], [0, 0, 0, -1], [6, 8, 1000, 2]], dtype=torch.int32)
    keys = torch.zeros(PAGES, libmla.indexer_page_bytes(PAGE), dtype=torch.uint8)
    indexer = (_random(TOKENS, HEADS, 128), _random(TOKENS, HEADS, dtype=torch.float32), keys)
    named = {"page_size": PAGE, **_TABLE_ARGUMENTS}
    listed = {"blocks": torch.tensor([[0, 1], [1, -1], [0, 900]], dtype=torch.int32), "block_size": 3}
    return {
        "block_table_to_csr": (
            "block_table_to_csr",
            (_TABLE, torch.full((TOKENS,), 2 * PAGE, dtype=torch.int32)),
            {"page_size": PAGE},
        ),
        "physical_slots": ("physical_slots", (indices,), {**named, "compact": True, "return_valid_count": True}),
        "append_indexer": ("append_indexer", (_random(TOKENS, 128), _SLOTS, keys.clone()), {"page_size": PAGE}),
        "physical_slots, groups": ("physical_slots", (indices,), {**named, "ratio": 2, "list_tokens": True}),
        "indexer_logits": ("indexer_logits", indexer, named),
        "append_indexer, mxfp4": (
            "append_indexer",
            (
                _random(TOKENS, 128),
                _SLOTS,
                torch.zeros(PAGES, libmla.indexer_page_bytes(PAGE, "mxfp4"), dtype=torch.uint8),
            ),
            {"page_size": PAGE, "format": "mxfp4"},
        ),
        "indexer_logits, mxfp4": ("indexer_logits", indexer, {**named, "format": "mxfp4"}),
        "indexer_logits, blocks": ("indexer_logits", indexer, {**named, **listed}),
        "indexer_logits, f16": ("indexer_logits", indexer, {**named, "logits_dtype": torch.float16}),
        "top_k": ("top_k", (_random(TOKENS, 9, dtype=torch.float32), 4), {}),
        "top_k, f16": ("top_k", (_random(TOKENS, 9, dtype=torch.float16), 4), {}),
        "top_k, blocks": ("top_k", (_random(TOKENS, 9, dtype=torch.float32), 4), {"block_size": 2}),
        "indexer_top_k": ("indexer_top_k", (*indexer, 4), {**named, "return_valid_count": True}),
        "indexer_top_k, groups of a rank": (
            "indexer_top_k",
            (*indexer, 2),
            {**named, "ratio": 2, "list_tokens": True, "context_parallel": (1, 2, 1)},
        ),
        "indexer_top_k, f16": ("indexer_top_k", (*indexer, 4), {**named, "logits_dtype": "f16"}),
        "indexer_top_k, blocks": ("indexer_top_k", (*indexer, 4), {**named, **listed, "ratio": 2}),
    }


def calls() -> dict[str, Call]:
    """Returns all calls, by the name of their case."""
    return {**attention_calls(), **cache_calls(), **compress_calls(), **index_calls()}
