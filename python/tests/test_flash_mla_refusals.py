# SPDX-License-Identifier: Apache-2.0
"""Tests that libmla.flash_mla refuses arguments that mean nothing, by their names."""

import pytest

torch = pytest.importorskip("torch")

from flash_mla_problems import dense_call, packed_cache, prefill_call, randn, sparse_call, sparse_fwd_call

LENGTHS = torch.ones(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "changes", "error", "message"),
    [
        (dense_call, {"q": randn(2, 6, 576)}, ValueError, r"q: expected \[batch_size, .*\], got shape \(2, 6, 576\)"),
        (dense_call, {"k_cache": randn(4, 16, 576)}, ValueError, r"k_cache: expected \[num_blocks, "),
        (dense_call, {"k_cache": randn(8, 16, 4, 576)}, ValueError, "divide the 6 query heads, got 4"),
        (dense_call, {"k_cache": randn(8, 16, 0, 576)}, ValueError, "divide the 6 query heads, got 0"),
        (dense_call, {"k_cache": randn(8, 16, 1, 576, dtype=torch.float32)}, TypeError, "k_cache: expected bfloat16"),
        (dense_call, {"is_fp8_kvcache": True}, TypeError, "k_cache: expected float8_e4m3fn, uint8 or int8"),
        (
            dense_call,
            {"k_cache": randn(8, 16, 1, 512)},
            ValueError,
            r"k_cache: expected .* d_qk = 576\], got \[8, 16, 51",
        ),
        (dense_call, {"attn_sink": torch.zeros(9)}, ValueError, r"attn_sink: expected shape \[H = 6\], got \[9\]"),
        (dense_call, {"num_splits": LENGTHS}, ValueError, "num_splits: expected None"),
        (dense_call, {"tile_scheduler_metadata": LENGTHS}, TypeError, "expected the FlashMLASchedMeta .* got Tensor"),
        (dense_call, {"block_table": None}, ValueError, "block_table: missing"),
        (dense_call, {"cache_seqlens": None}, ValueError, "cache_seqlens: missing"),
        (dense_call, {"topk_length": LENGTHS}, ValueError, "topk_length: has a meaning only with indices"),
        (dense_call, {"extra_k_cache": LENGTHS}, ValueError, "extra_k_cache: has a meaning only with indices"),
        (dense_call, {"cache_seqlens": LENGTHS.long()}, ValueError, "cache_seqlens: expected int32, got int64"),
        (dense_call, {"head_dim_v": 600}, ValueError, "expected kv_lora_rank of at most d_qk = 576, got 600"),
        (sparse_call, {"causal": True}, ValueError, "causal: indices already say"),
        (dense_call, {"q": None}, TypeError, r"q: expected a torch tensor \[batch_size, .*\], got NoneType"),
        (sparse_call, {"indices": LENGTHS}, ValueError, r"indices: expected \[batch_size, .*\], got shape \(2,\)"),
        (
            sparse_call,
            {"indices": LENGTHS.view(1, 1, 2)},
            ValueError,
            r"indices: expected \[2, 1, topk\], got shape \(1, ",
        ),
        (sparse_call, {"extra_topk_length": LENGTHS}, ValueError, "only with extra_k_cache"),
        (sparse_call, {"extra_indices_in_kvcache": LENGTHS}, ValueError, "only with extra_k_cache"),
        (
            sparse_call,
            {"extra_k_cache": packed_cache("fp8_ds_mla", 2, 64)[0]},
            ValueError,
            "extra_indices_in_kvcache: missing",
        ),
        (
            sparse_call,
            {"extra_k_cache": torch.zeros(2, 64, 2, 656), "extra_indices_in_kvcache": LENGTHS.view(2, 1, 1)},
            ValueError,
            "extra_k_cache: expected 1 KV heads, as in k_cache, got 2",
        ),
        (
            sparse_call,
            {"k_cache": torch.zeros(2, 64, 1, 600, dtype=torch.uint8)},
            ValueError,
            r"656 bytes \(fp8_ds_mla\), 584 bytes \(fp8_dsv4\) or 576 e4m3 values, got 600",
        ),
        (
            sparse_call,
            {"k_cache": torch.zeros(2, 64, 2, 656, dtype=torch.uint8)},
            ValueError,
            "expected num_heads_k 1, got 2",
        ),
        (
            sparse_call,
            {"k_cache": torch.zeros(2, 64, 1, 576, dtype=torch.float8_e4m3fn)},
            ValueError,
            "descale_k is missing",
        ),
        (
            sparse_call,
            {"q": randn(2, 1, 4, 512), "k_cache": torch.zeros(2, 64, 1, 656, dtype=torch.uint8)[..., :584]},
            ValueError,
            "expected stride 584 in dimension 1, got 656",
        ),
        (
            sparse_call,
            {"kv_format": "V5"},
            ValueError,
            "kv_format: expected one of V32, V32_NO_ROPE, V4, V41, got 'V5'",
        ),
        (dense_call, {"kv_format": "V32"}, ValueError, "kv_format: .* expected None while is_fp8_kvcache is False"),
        (sparse_call, {"kv_format": "V32_NO_ROPE"}, ValueError, "k_cache: expected rows of .* as kv_format is V32_NO"),
        (
            dense_call,
            {"out": randn(2, 1, 6, 500)},
            ValueError,
            r"out: expected \[2, 1, 6, 512\] of bfloat16, got \[2, 1, 6, 500\] of bfloat16",
        ),
        (dense_call, {"out": randn(2, 1, 6, 512).float()}, ValueError, r"out: expected .*, got .* of float32"),
        (sparse_fwd_call, {"out": randn(5, 4, 576)}, ValueError, r"out: expected \[5, 4, 512\] of torch.bfloat16, got"),
        (prefill_call, {"dropout_p": 0.1}, ValueError, "dropout_p: libmla is for inference; expected 0, got 0.1"),
        (prefill_call, {"k": randn(5, 4, 192)}, ValueError, "k: expected 2 heads, as v has, got 4"),
        (prefill_call, {"k": randn(5, 3, 192), "v": randn(5, 3, 128)}, ValueError, "divide the 4 query heads, got 3"),
        (prefill_call, {"v": randn(5, 128)}, ValueError, r"v: expected \[tokens, heads, channels\]"),
        (sparse_fwd_call, {"indices": torch.zeros(5, 2, 8, dtype=torch.int32)}, ValueError, "expected 1 KV heads"),
        (sparse_fwd_call, {"kv": randn(9, 576)}, ValueError, r"kv: expected \[s_kv, h_kv, d_qk\]"),
    ],
)
def test_refusals(call, changes, error, message):
    call()
    with pytest.raises(error, match=message):
        call(**changes)
