# SPDX-License-Identifier: Apache-2.0
"""Tests libmla.deep_gemm against float64, with arguments as DeepGEMM's tests give them."""

import inspect
import math

import pytest

torch = pytest.importorskip("torch")

import libmla
from libmla import deep_gemm

HEADS = 32


def quantized(shape, seed):
    """Returns random e4m3 rows of 128 channels, and a scale for each."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, 128, generator=generator).mul(50).to(torch.float8_e4m3fn)
    return rows, torch.rand(*shape, generator=generator) * 0.01


def packed_fp4(shape, seed):
    """Returns random rows of 128 e2m1, two in an int8, four UE8M0 in an int32 for each, and their values."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (*shape, 128), generator=generator)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).view(torch.int8)
    exponents = torch.randint(118, 134, (*shape, 4), generator=generator)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()[codes & 7] * (1 - (codes >> 3) * 2)
    factors = torch.exp2(exponents.double() - 127).repeat_interleave(32, -1)
    return packed, exponents.to(torch.uint8).view(torch.int32).squeeze(-1), values * factors


def right(q, keys, scales, weights, seen):
    """Returns the logits [T, S] where query t sees keys seen[t] = (begin, end)."""
    scores = torch.relu(torch.einsum("thd,sd->ths", q.double(), keys.double()))
    logits = torch.einsum("ths,th->ts", scores, weights.double()) * scales.double()
    for t, (begin, end) in enumerate(seen):
        logits[t, : max(begin, 0)] = logits[t, max(end, 0) :] = -math.inf
    return logits


def check(logits, expected, tolerance=1e-5):
    assert logits.shape == expected.shape
    hidden = expected == -math.inf
    assert torch.equal(logits == -math.inf, hidden)
    worst = (logits.double() - expected).masked_fill(hidden, 0).abs().max()
    assert worst <= tolerance * expected.masked_fill(hidden, 0).abs().max().clamp(min=1e-9)


@pytest.mark.parametrize("num_keys", [1, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mqa_logits(num_keys, dtype):
    tokens = 7
    q, _ = quantized((tokens, HEADS), 1)
    keys, scales = quantized((num_keys,), 2)
    weights = torch.randn(tokens, HEADS, generator=torch.Generator().manual_seed(3))
    begin = torch.tensor([0, 0, 5, num_keys, 3, 0, num_keys // 2], dtype=torch.int32)
    end = torch.tensor([num_keys, 0, 9, num_keys, 2, 1, num_keys], dtype=torch.int32).clamp(max=num_keys)
    expected = right(q, keys, scales, weights, list(zip(begin.tolist(), end.tolist())))
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    logits = deep_gemm.fp8_fp4_mqa_logits((q, None), (keys, scales), weights, begin, end, logits_dtype=dtype)
    assert logits.dtype == dtype
    check(logits, expected, tolerance)
    check(deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, begin, end), expected)
    widest = int((end - begin).max())
    narrow = deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, begin, end, False, widest)
    for t, (first, last) in enumerate(zip(begin.tolist(), end.tolist())):
        wanted = torch.full((widest,), -math.inf).double()
        wanted[: max(last - first, 0)] = expected[t, first : max(last, first)]
        check(narrow[t : t + 1], wanted[None])


def test_no_keys_and_keys_with_gaps():
    q, _ = quantized((2, HEADS), 9)
    keys, scales = quantized((200,), 10)
    weights = torch.ones(2, HEADS)
    begin, end = torch.zeros(2, dtype=torch.int32), torch.full((2,), 150, dtype=torch.int32)
    assert deep_gemm.fp8_mqa_logits(q, (keys[:0], scales[:0]), weights, begin, begin).shape == (2, 0)
    narrow = deep_gemm.fp8_mqa_logits(q, (keys[:0], scales[:0]), weights, begin, begin, False, 3)
    assert (narrow == -math.inf).all() and narrow.shape == (2, 3)
    wide = torch.zeros(200, 256, dtype=torch.uint8)
    wide[:, :128] = keys.view(torch.uint8)
    with_gaps = wide.view(torch.float8_e4m3fn)[:, :128], torch.stack([scales, scales], 1)[:, 0]
    expected = deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, begin, end)
    assert torch.equal(deep_gemm.fp8_mqa_logits(q, with_gaps, weights, begin, end), expected)


@pytest.mark.parametrize("each", [True, False])
def test_paged_mqa_logits(each):
    block_kv, next_n = 64, 2
    lengths = [130, 2, 64]
    requests = len(lengths)
    keys, scales = quantized((6 * block_kv,), 4)
    # A larger block: what lies between is not part of the cache.
    memory = torch.full((6, block_kv + 1, 1, 132), 0xFF, dtype=torch.uint8)
    cache = memory[:, :block_kv]
    flat = memory.view(6, -1)
    flat[:, : block_kv * 128] = keys.view(torch.uint8).view(6, -1)
    flat[:, block_kv * 128 : block_kv * 132] = scales.view(6, -1).view(torch.uint8)
    table = torch.tensor([[4, 0, 5], [2, 2147483647, 9], [1, -7, -7]], dtype=torch.int32)
    q, _ = quantized((requests, next_n, HEADS), 5)
    weights = torch.randn(requests * next_n, HEADS, generator=torch.Generator().manual_seed(6))
    seen = [[length - 1, length] for length in lengths]
    if each:
        seen[0] = [100, 7]
    context_lens = torch.tensor(seen if each else lengths, dtype=torch.int32)
    metadata = deep_gemm.get_paged_mqa_logits_metadata(context_lens, block_kv, deep_gemm.get_num_sms())
    assert metadata.shape == (deep_gemm.get_num_sms() + 1, 2)
    logits = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, context_lens, table, metadata, 192)
    for b in range(requests):
        slots = [int(table[b, j // block_kv]) * block_kv + j % block_kv for j in range(lengths[b])]
        for i in range(next_n):
            t = b * next_n + i
            expected = torch.full((1, 192), -math.inf).double()
            of_request = right(q[b, i : i + 1], keys[slots], scales[slots], weights[t : t + 1], [(0, seen[b][i])])
            expected[:, : lengths[b]] = of_request
            check(logits[t : t + 1], expected)


@pytest.mark.parametrize("fp4_queries", [False, True])
@pytest.mark.parametrize("fp4_keys", [False, True])
def test_fp4(fp4_queries, fp4_keys):
    tokens, num_keys = 5, 150
    packed_q, q_scales, q = packed_fp4((tokens, HEADS), 11)
    if not fp4_queries:
        packed_q, q_scales = quantized((tokens, HEADS), 11)[0], None
        q = packed_q.double()
    keys, scales, values = packed_fp4((num_keys,), 12)
    one = torch.ones(num_keys)
    if not fp4_keys:
        keys, scales = quantized((num_keys,), 12)
        values, one = keys.double(), scales
    weights = torch.randn(tokens, HEADS, generator=torch.Generator().manual_seed(13))
    begin = torch.tensor([0, 3, 150, 70, 9], dtype=torch.int32)
    end = torch.tensor([150, 90, 150, 64, 10], dtype=torch.int32)
    expected = right(q, values, one, weights, list(zip(begin.tolist(), end.tolist())))
    check(deep_gemm.fp8_fp4_mqa_logits((packed_q, q_scales), (keys, scales), weights, begin, end), expected)

    block_kv, blocks = 64, 3
    width = keys.shape[1]
    cache = torch.zeros(blocks, block_kv * (width + 4), dtype=torch.uint8)
    rows, footer = (
        torch.zeros(blocks * block_kv, width, dtype=torch.uint8),
        torch.zeros(blocks * block_kv, 4, dtype=torch.uint8),
    )
    rows[:num_keys], footer[:num_keys] = keys.view(torch.uint8), scales[:, None].contiguous().view(torch.uint8)
    cache[:, : block_kv * width], cache[:, block_kv * width :] = rows.view(blocks, -1), footer.view(blocks, -1)
    lens = torch.tensor([[150], [3], [64], [0], [65]], dtype=torch.int32)
    table = torch.arange(blocks, dtype=torch.int32).expand(tokens, blocks).contiguous()
    logits = deep_gemm.fp8_fp4_paged_mqa_logits(
        (packed_q[:, None], None if q_scales is None else q_scales[:, None]),
        cache.view(blocks, block_kv, 1, width + 4),
        weights,
        lens,
        table,
        None,
        150,
    )
    check(logits, right(q, values, one, weights, [(0, n) for n in lens[:, 0].tolist()]))


def test_what_is_not_taken():
    q, scales = quantized((1, 1, HEADS), 7)
    with pytest.raises(
        ValueError, match=r"q: expected FP4, int8 \[..., 64\] and int32, or e4m3 and None, got torch.float8"
    ):
        deep_gemm.fp8_fp4_mqa_logits((q[0], scales), quantized((3,), 8), scales[0], scales, scales)
    cache = torch.zeros(1, 64, 1, 132, dtype=torch.uint8)
    lens = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="indices: expected None"):
        deep_gemm.fp8_paged_mqa_logits(q, cache, scales[0], lens, lens[None], None, 64, indices=lens)
    with pytest.raises(ValueError, match=r"kv_cache: expected blocks of \[block_kv, 1, 132\] or \[block_kv, 1, 68\]"):
        deep_gemm.fp8_paged_mqa_logits(q, cache[..., :68], scales[0], lens, lens[None], None, 64)


def test_arguments_are_the_peers():
    """The arguments are those of csrc/apis/attention.hpp at commit 54e2261 of DeepGEMM."""
    arguments = {
        "fp8_mqa_logits": "q kv weights cu_seq_len_k_start cu_seq_len_k_end clean_logits max_seqlen_k",
        "fp8_fp4_mqa_logits": "q kv weights cu_seq_len_k_start cu_seq_len_k_end clean_logits max_seqlen_k logits_dtype",
        "fp8_paged_mqa_logits": (
            "q kv_cache weights context_lens block_table schedule_meta max_context_len clean_logits indices"
        ),
        "fp8_fp4_paged_mqa_logits": (
            "q kv_cache weights context_lens block_table schedule_meta max_context_len clean_logits logits_dtype indices"
        ),
        "get_paged_mqa_logits_metadata": "context_lens block_kv num_sms indices",
    }
    for name, names in arguments.items():
        assert " ".join(inspect.signature(getattr(deep_gemm, name)).parameters) == names


def test_install_as():
    assert libmla.install_as("deep_gemm") is deep_gemm
