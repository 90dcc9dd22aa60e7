# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4: SGLang's own pools with 256-token pages, read as they lie, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import engine
import pytest
import torch
from reference import attend, error

PAGE, HEADS, WIDTH = 256, 8, 512
RATIOS = {0: 0, 4: 1, 128: 2}  # each ratio's layer


def make_runner(device: str, ratios: Sequence[int] = (0, 4, 128), **config: Any) -> Any:
    """A worker with a V4 pool: unless told otherwise, layer 0 has the window alone, 1 and 2 a compressed pool each."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    args = engine.publish("v4")
    pool = DeepSeekV4TokenToKVPool(
        max_num_reqs=4,
        swa_size=4 * PAGE,
        c4_size=2 * PAGE,
        c128_size=PAGE,
        c4_state_pool_size=64,
        c128_state_pool_size=64,
        page_size=PAGE,
        swa_page_size=PAGE,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=len(ratios),
        device=device,
        enable_memory_saver=False,
        compression_ratios=list(ratios),
    )
    hf = SimpleNamespace(index_topk=512, model_type="deepseek_v4", architectures=["DeepseekV4ForCausalLM"])
    return SimpleNamespace(
        device=device,
        dtype=torch.bfloat16,
        page_size=PAGE,
        kv_cache_dtype=torch.float8_e4m3fn,
        model_config=SimpleNamespace(
            head_dim=512,
            v_head_dim=512,
            num_attention_heads=HEADS,
            context_len=4096,
            hf_config=hf,
            hf_text_config=hf,
            **config,
        ),
        req_to_token_pool=ReqToTokenPool(4, 4096, device, enable_memory_saver=False),
        token_to_kv_pool=pool,
        hisparse_coordinator=None,
        is_draft_worker=False,
        spec_algorithm=SpeculativeAlgorithm.from_string(None),
        server_args=args,
        use_mla_backend=True,
    )


def fill(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """Random rows in a layer's pages, as their layout has it, and what they mean: f64 [slots, 512]."""
    pages = buffer.view(torch.uint8)
    count = len(pages)
    pages.fill_(0xFF)  # NaN wherever nothing is written
    data = torch.randn(count, page_size, 448).clamp(-3, 3).to(torch.float8_e4m3fn)
    exponents = torch.randint(124, 130, (count, page_size, 7), dtype=torch.uint8)
    rope = torch.randn(count, page_size, 64).bfloat16()
    rows = torch.cat([data.view(torch.uint8), rope.view(torch.uint8)], -1)
    scales = torch.cat([exponents, torch.full((count, page_size, 1), 0xFF, dtype=torch.uint8)], -1)
    pages[:, : page_size * 576] = rows.flatten(1).to(pages.device)
    pages[:, page_size * 576 : page_size * 584] = scales.flatten(1).to(pages.device)
    factors = torch.exp2(exponents.double() - 127).repeat_interleave(64, -1)
    nope = (data.double() * factors).bfloat16().double()
    return torch.cat([nope, rope.double()], -1).flatten(0, 1)


def poison(buffer: torch.Tensor, page_size: int, used: set[int]) -> None:
    """NaN into every row that no index names."""
    pages = buffer.view(torch.uint8)
    for slot in set(range(len(pages) * page_size)) - used:
        page, offset = divmod(slot, page_size)
        pages[page, offset * 576 : offset * 576 + 576] = 0xFF


def pick(slots: int, queries: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices with -1 among them and garbage behind each row's length, and the lengths, 0 among them."""
    indices = torch.stack([torch.randperm(max(slots, width))[:width] for _ in range(queries)]).int()
    indices[indices >= slots] = -1
    length = torch.randint(1, width + 1, (queries,), dtype=torch.int32)
    indices[torch.arange(width) >= length[:, None]] = 2**31 - 1
    indices[:, 1] = -1
    length[-1] = 0
    return indices, length


def rows_of(indices: torch.Tensor, length: torch.Tensor, rows: torch.Tensor, query: int) -> torch.Tensor:
    named = indices[query, : length[query]].long()
    return rows[named[named >= 0]]


def make_backend(runner: Any, swa: Any, extra: dict[int, Any], queries: int) -> Any:
    """The backend, with SGLang's own metadata that holds these indices."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DSV4AttnMetadata, DSV4Metadata

    from libmla.integrations.sglang.v4 import V4Backend

    backend = V4Backend(runner)

    def move(pair: Any) -> Any:
        return tuple(tensor.to(runner.device) for tensor in pair)

    indices, length = move(swa)
    core = DSV4AttnMetadata(
        page_size=PAGE,
        page_table=torch.zeros(queries, 1, dtype=torch.int32),
        raw_out_loc=torch.zeros(queries, dtype=torch.int32),
        cuda_int32_kwargs=backend.cuda_int32_kwargs,
        seq_lens_casual=length,
        positions_casual=length,
        swa_page_indices=indices,
        swa_topk_lengths=length,
        index_topk=512,
        present_ratios=(4, 128),
    )
    for ratio, pair in extra.items():
        indices, length = move(pair)
        core.set_sparse_topk(ratio, page_indices=indices, topk_lengths=length)
    backend.forward_metadata = DSV4Metadata(core_attn_metadata=core, indexer_metadata=None)
    return backend


@pytest.mark.parametrize("padded_heads", [HEADS, 64])
@pytest.mark.parametrize("ratio", RATIOS)
def test_two_pools(device: str, ratio: int, padded_heads: int) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = make_runner(device)
    pool, layer_id, queries = runner.token_to_kv_pool, RATIOS[ratio], 5
    assert pool.get_swa_key_page_size() == PAGE
    window = pool.get_swa_key_buffer_radix(layer_id)
    window_rows = fill(window, PAGE)
    swa = pick(len(window_rows), queries, 128)
    poison(window, PAGE, set(swa[0].flatten().tolist()))
    extra, sizes = {}, {4: PAGE // 4, 128: PAGE // 128}
    if ratio:
        compressed = pool.get_extra_key_buffer(layer_id)
        assert pool.get_extra_key_page_size(layer_id) == sizes[ratio]
        compressed_rows = fill(compressed, sizes[ratio])
        extra[ratio] = pick(len(compressed_rows), queries, 512 if ratio == 4 else 64)
        poison(compressed, sizes[ratio], set(extra[ratio][0].flatten().tolist()))

    q = torch.randn(queries, HEADS, WIDTH).bfloat16()
    sink = torch.randn(HEADS) + 6
    sink[0] = float("-inf")
    expected = []
    for query in range(queries):
        keys = rows_of(*swa, window_rows, query)
        if ratio:
            keys = torch.cat([keys, rows_of(*extra[ratio], compressed_rows, query)])
        expected.append(attend(q[query][None], keys[:, None], keys[:, None], WIDTH**-0.5, sink=sink)[0])

    backend = make_backend(runner, swa, extra, queries)
    layer = RadixAttention(HEADS, WIDTH, WIDTH**-0.5, num_kv_heads=1, layer_id=layer_id)
    given = torch.full((queries, padded_heads, WIDTH), float("nan"), dtype=torch.bfloat16)
    given[:, :HEADS] = q
    sinks = torch.zeros(padded_heads)
    sinks[:HEADS] = sink
    given = given.to(device)
    for mode in (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
        out = backend.forward(
            given,
            given,
            given,
            layer,
            SimpleNamespace(forward_mode=mode),
            compress_ratio=ratio,
            save_kv_cache=False,
            attn_sink=sinks.to(device),
        )
        assert out.shape == given.shape
        assert error(out[:, :HEADS], torch.cat(expected)) < 1e-2


def test_more_queries_than_metadata(device: str) -> None:
    """Rows that SGLang pads a batch with attend to nothing; more metadata than queries is cut."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = make_runner(device)
    rows = fill(runner.token_to_kv_pool.get_swa_key_buffer_radix(0), PAGE)
    backend = make_backend(runner, pick(len(rows), 3, 128), {}, 3)
    layer = RadixAttention(HEADS, WIDTH, WIDTH**-0.5, num_kv_heads=1, layer_id=0)
    q = torch.randn(5, HEADS, WIDTH).bfloat16().to(device)
    named = {"compress_ratio": 0, "save_kv_cache": False, "attn_sink": torch.zeros(HEADS, device=device)}
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    whole = backend.forward(q, q, q, layer, batch, **named)
    assert whole[:2].isfinite().all() and not whole[3:].any()
    assert torch.equal(backend.forward(q[:2], q[:2], q[:2], layer, batch, **named), whole[:2])


def test_no_dense_workspace(device: str) -> None:
    """Prefill does not take SGLang's way through a workspace either, whatever its size."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend = make_backend(make_runner(device), pick(1024, 1, 128), {}, 1)
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    assert not backend._use_sparse_prefill(batch, num_qo_tokens=100_000)


@pytest.mark.parametrize("kernels", ["flashmla", "trtllm", "flashmla_mega"])
def test_other_layouts_and_kernels_are_refused(device: str, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
    from sglang.srt.runtime_context import get_exec

    from libmla.integrations.sglang.v4 import V4Backend

    runner = make_runner(device)
    monkeypatch.setattr(runner.token_to_kv_pool, "kv_layout", KVLayout.UNIFORM_FP8)
    reason = r"expected rows of v4, v41, v41_fp4, got uniform_fp8: set SGLANG_DSV4_KV_LAYOUT=v4 or v41"
    if kernels != "flashmla":
        reason = f"--dsv4-attn-backend {kernels} is not supported: set it to flashmla"
    with get_exec().kernel.override(dsv4_attn_backend=kernels), pytest.raises(ValueError, match=reason):
        V4Backend(runner)


def test_one_plan_for_layers_of_a_ratio(device: str, calls: Any) -> None:
    """A step plans once for each ratio, however many layers have it. The next step plans anew, for its own lengths."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    ratios = [0, 4, 128, 4, 128, 0, 4]
    runner = make_runner(device, ratios)
    pool, queries = runner.token_to_kv_pool, 3
    windows = [fill(pool.get_swa_key_buffer_radix(layer_id), PAGE) for layer_id in range(len(ratios))]
    compressed = {
        layer_id: fill(pool.get_extra_key_buffer(layer_id), pool.get_extra_key_page_size(layer_id))
        for layer_id, ratio in enumerate(ratios)
        if ratio
    }
    q, sink = torch.randn(queries, HEADS, WIDTH).bfloat16(), torch.zeros(HEADS)
    given, batch, backend = q.to(device), SimpleNamespace(forward_mode=ForwardMode.DECODE), None
    for _ in range(2):
        swa = pick(len(windows[0]), queries, 128)
        extra = {4: pick(len(compressed[1]), queries, 512), 128: pick(len(compressed[2]), queries, 64)}
        made = make_backend(runner, swa, extra, queries)
        if backend is None:
            backend = made
        backend.forward_metadata = made.forward_metadata
        calls.clear()
        for layer_id, ratio in enumerate(ratios):
            layer = RadixAttention(HEADS, WIDTH, WIDTH**-0.5, num_kv_heads=1, layer_id=layer_id)
            named = {"compress_ratio": ratio, "save_kv_cache": False, "attn_sink": sink.to(device)}
            out = backend.forward(given, given, given, layer, batch, **named)
            expected = []
            for query in range(queries):
                keys = rows_of(*swa, windows[layer_id], query)
                if ratio:
                    keys = torch.cat([keys, rows_of(*extra[ratio], compressed[layer_id], query)])
                expected.append(attend(q[query][None], keys[:, None], keys[:, None], WIDTH**-0.5, sink=sink)[0])
            assert error(out, torch.cat(expected)) < 1e-2
        assert calls.plans == ["decode_sparse"] * 3
        assert calls.planned_runs == ["decode_sparse"] * len(ratios) and not calls.other_runs


def test_rows_of_v41(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """V4.1's window in rows of 528 bytes and its compressed pool in rows of 288, which SGLang has on SM100."""
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    import libmla

    runner, queries, rows, buffers = make_runner(device), 3, {}, {}
    layouts = {KVLayout.V41: ("fp8_dsv41", PAGE), KVLayout.V41_FP4: ("fp4_dsv41", PAGE // 4)}
    for layout, (name, page_size) in layouts.items():
        count = torch.tensor([0, 4 * page_size], dtype=torch.int32)
        table = torch.arange(4, dtype=torch.int32)[None]
        buffer = torch.full((4, layout.page_bytes(page_size)), 0xFF, dtype=torch.uint8)
        cache = libmla.KvCache(name, kv=buffer, page_size=page_size)
        libmla.append(torch.randn(4 * page_size, WIDTH).bfloat16(), torch.arange(4 * page_size), cache)
        rows[layout] = libmla.gather(cache, kv_len=count[1:], out_indptr=count, block_table=table).double()
        buffers[layout] = buffer.to(device)
    pool = runner.token_to_kv_pool
    monkeypatch.setattr(pool, "kv_layout", KVLayout.V41)
    monkeypatch.setattr(pool, "get_swa_key_buffer_radix", lambda layer_id: buffers[KVLayout.V41])
    monkeypatch.setattr(pool, "get_extra_key_buffer", lambda layer_id: buffers[KVLayout.V41_FP4])
    monkeypatch.setattr(pool, "get_extra_key_layout", lambda layer_id: KVLayout.V41_FP4)

    swa, extra = pick(4 * PAGE, queries, 128), pick(PAGE, queries, 512)
    q, sink, expected = torch.randn(queries, HEADS, WIDTH).bfloat16(), torch.randn(HEADS), []
    for query in range(queries):
        keys = [rows_of(*swa, rows[KVLayout.V41], query), rows_of(*extra, rows[KVLayout.V41_FP4], query)]
        keys = torch.cat(keys)[:, None]
        expected.append(attend(q[query][None], keys, keys, WIDTH**-0.5, sink=sink)[0])
    backend, given = make_backend(runner, swa, {4: extra}, queries), q.to(device)
    layer = RadixAttention(HEADS, WIDTH, WIDTH**-0.5, num_kv_heads=1, layer_id=RATIOS[4])
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    named = {"compress_ratio": 4, "save_kv_cache": False, "attn_sink": sink.to(device)}
    assert error(backend.forward(given, given, given, layer, batch, **named), torch.cat(expected)) < 1e-2


def test_hisparse_is_accepted(device: str) -> None:
    """Its slots, -1 where a key is not on the device, come as any others: test_two_pools has them."""
    from libmla.integrations.sglang.v4 import V4Backend

    runner = make_runner(device)
    runner.hisparse_coordinator = SimpleNamespace()
    assert V4Backend(runner).hisparse_coordinator is runner.hisparse_coordinator
