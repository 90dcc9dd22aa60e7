# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4: SGLang's own pools with 256-token pages, read as they lie, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import engine
import pytest
import torch
from reference import attend, error

PAGE, HEADS, WIDTH = 256, 8, 512
RATIOS = {0: 0, 4: 1, 128: 2}  # each ratio's layer


def make_runner(device: str, **config: Any) -> Any:
    """A worker with a V4 pool: layer 0 has the window alone, 1 and 2 a compressed pool each."""
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
        layer_num=3,
        device=device,
        enable_memory_saver=False,
        compression_ratios=[0, 4, 128],
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


def test_other_layout_is_refused(device: str) -> None:
    from libmla.integrations.sglang.v4 import V4Backend

    runner = make_runner(device)
    runner.token_to_kv_pool.get_swa_key_bytes_per_token = lambda: 528
    with pytest.raises(ValueError, match=r"rows of 584 bytes \(V4\), got 528: set SGLANG_DSV4_KV_LAYOUT=v4"):
        V4Backend(runner)
