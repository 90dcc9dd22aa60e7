# SPDX-License-Identifier: Apache-2.0
"""Tests how calls of flash_mla_with_kvcache reach the library: tensors of any strides, metadata, tracing, errors."""

import gc
import math
import threading

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode

from flash_mla_problems import dense_call, dense_problem, packed_cache, randn, random_indices, sparse_call
from libmla import flash_mla
from libmla.flash_mla.flash_mla_interface import FlashMLASchedMeta

INF = math.inf


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def with_gaps(tensor):
    """Returns the same values, with gaps between requests and between query tokens."""
    big = torch.full((tensor.shape[0] + 1, tensor.shape[1] + 1, *tensor.shape[2:]), 7, dtype=tensor.dtype)
    view = big[: tensor.shape[0], : tensor.shape[1]]
    view.copy_(tensor)
    return view


# Tensors


@pytest.mark.parametrize("lens", [[50], [50, 0, 17]])
@pytest.mark.parametrize("h_k", [1, 2])
def test_several_query_tokens_one_by_one(lens, h_k):
    """Tokens of one call get what each gets by itself, where it sees as many keys; their lse lies as the peer's does."""
    q, cache, table, seqlens = dense_problem(lens, 3, 6, h_k, 16, 576)
    sink = torch.linspace(-1, 1, 6)
    out, lse = flash_mla.flash_mla_with_kvcache(with_gaps(q), cache, table, seqlens, 512, None, attn_sink=sink)
    assert lse.shape == (len(lens), 6, 3) and lse.is_contiguous() and out.is_contiguous()
    for i in range(3):
        alone = flash_mla.flash_mla_with_kvcache(q[:, i : i + 1], cache, table, seqlens, 512, None, attn_sink=sink)
        torch.testing.assert_close(out[:, i : i + 1], alone[0], atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse[:, :, i : i + 1], alone[1], atol=1e-5, rtol=1e-5)
    without_keys = seqlens == 0
    assert torch.all(lse[without_keys] == INF) and torch.all(out[without_keys] == 0)
    assert torch.all(lse[~without_keys] < INF)


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_dsv4"])
def test_gaps_between_query_tokens_change_nothing(layout):
    """q, indices and lengths are read in place or copied, as their strides ask for."""
    cache, rows = packed_cache(layout, 3, 64)
    q, indices = randn(3, 2, 5, rows.shape[1]), random_indices(3, 2, 40, 192, seed=1)
    lengths = torch.tensor([[40, 3], [0, 0], [7, 40]], dtype=torch.int32)
    extra = {"extra_k_cache": cache, "extra_indices_in_kvcache": indices.flip(2), "extra_topk_length": lengths + 1}
    named = {"indices": indices, "topk_length": lengths, **extra}
    plain = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, None, is_fp8_kvcache=True, **named)
    gaps = {name: with_gaps(value) if name != "extra_k_cache" else value for name, value in named.items()}
    others = flash_mla.flash_mla_with_kvcache(with_gaps(q), cache, None, None, 512, None, is_fp8_kvcache=True, **gaps)
    assert same(plain, others)
    assert torch.all(plain[1][1] < INF)  # by the extra pool
    only = {"indices": indices, "topk_length": lengths}
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, None, is_fp8_kvcache=True, **only)
    assert torch.all(lse[1] == INF) and torch.all(out[1] == 0) and torch.all(lse[0] < INF)


def test_heads_of_every_kv_head_get_their_part():
    """One call over two KV heads is two calls over one each, metadata or not."""
    q, cache, table, seqlens = dense_problem([50, 9], 1, 6, 2, 16, 576)
    sink = torch.tensor([0.5, -INF, 3.0, -2.0, INF, 1.0])
    for meta in (None, flash_mla.get_mla_metadata()[0]):
        whole = flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta, attn_sink=sink)
        for g in range(2):
            heads = slice(3 * g, 3 * g + 3)
            part = flash_mla.flash_mla_with_kvcache(
                q[:, :, heads], cache[:, :, g : g + 1], table, seqlens, 512, None, attn_sink=sink[heads]
            )
            assert torch.equal(whole[0][:, :, heads], part[0]) and torch.equal(whole[1][:, heads], part[1])


# Metadata


def test_metadata_is_made_when_it_is_asked_for():
    q, cache, table, seqlens = dense_problem([700, 9], 1, 6, 1, 16, 576)
    meta, _ = flash_mla.get_mla_metadata()
    assert meta.plan is None and meta.config is None and meta.num_splits is None
    assert meta.tile_scheduler_metadata is None and not meta.have_initialized
    flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta, causal=True)
    assert meta.have_initialized and meta.plan is meta.plan and meta.plan.operation == "decode"
    assert meta.config == FlashMLASchedMeta.Config(2, 1, 6, 16, 1, True, False, None, None, None, False)
    assert meta.num_splits.dtype == torch.int32 and meta.num_splits.tolist() == [meta.plan.num_splits]
    assert meta.num_splits is meta.num_splits
    assert isinstance(meta.tile_scheduler_metadata, torch.Tensor)
    assert meta.tile_scheduler_metadata.data_ptr() == torch.from_dlpack(meta.plan.workspace).data_ptr()
    assert "have_initialized=True" in repr(meta) and "h_q=6" in repr(meta)
    meta.num_splits = None
    assert meta.num_splits is None and meta.have_initialized


def test_metadata_that_forgets_its_plan_makes_another():
    q, cache, table, seqlens = dense_problem([50, 9], 1, 6, 1, 16, 576)
    meta, _ = flash_mla.get_mla_metadata()
    plans = []
    for clear in (lambda: None, lambda: setattr(meta, "have_initialized", False)):
        clear()
        flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta)
        plans.append(meta.plan)
    meta.tile_scheduler_metadata = None
    assert meta.plan is None and meta.num_splits is None and not meta.have_initialized
    flash_mla.flash_mla_with_kvcache(q[:, :, :3], cache, table, seqlens, 512, meta)  # another configuration
    assert meta.config.h_q == 3 and meta.num_splits.shape == (1,)
    assert len({id(plan) for plan in (*plans, meta.plan)}) == 3


def test_metadata_that_takes_the_fields_of_another_plans_for_itself():
    """Engines set the peer's fields one by one."""
    q, cache, table, seqlens = dense_problem([50, 9], 1, 6, 1, 16, 576)
    meta, other = (flash_mla.get_mla_metadata()[0] for _ in range(2))
    flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta)
    for field in ("have_initialized", "config", "tile_scheduler_metadata", "num_splits"):
        setattr(other, field, getattr(meta, field))
    assert other.plan is None and not other.have_initialized
    flash_mla.flash_mla_with_kvcache(q[:, :, :3], cache, table, seqlens, 512, other)
    assert other.config.h_q == 3 and other.plan is not meta.plan
    other.config = None
    assert other.plan is None and meta.config.h_q == 6


def test_a_call_that_fails_leaves_metadata_as_it_was():
    meta, _ = flash_mla.get_mla_metadata()
    with pytest.raises(ValueError, match="attn_sink"):
        dense_call(tile_scheduler_metadata=meta, attn_sink=torch.zeros(9))
    assert not meta.have_initialized and meta.config is None
    dense_call(tile_scheduler_metadata=meta)
    config = meta.config
    with pytest.raises(ValueError, match="attn_sink"):
        dense_call(tile_scheduler_metadata=meta, attn_sink=torch.zeros(9))
    assert meta.config == config


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({"q": randn(2, 1, 4, 576)}, {"q": randn(1, 1, 4, 576)}, "b 2, used with 1"),
        ({}, {"indices": random_indices(2, 1, 16, 128, 1)}, "topk 32, used with 16"),
        (
            {},
            {
                "extra_k_cache": packed_cache("fp8_ds_mla", 2, 64)[0],
                "extra_indices_in_kvcache": random_indices(2, 1, 8, 128, 1),
            },
            "extra_page_block_size None, used with 64",
        ),
        ({}, {"enable_batch_invariant": True}, "enable_batch_invariant False, used with True"),
    ],
)
def test_metadata_of_another_configuration_is_refused(first, then, message):
    meta, _ = flash_mla.get_mla_metadata()
    sparse_call(**first, tile_scheduler_metadata=meta)
    if "q" in then:
        then = then | {"indices": random_indices(1, 1, 32, 128, 1)}
    out = torch.full((*(then.get("q", first.get("q", randn(2, 1, 4, 576)))).shape[:3], 512), 7.0).bfloat16()
    with pytest.raises(ValueError, match=f"tile_scheduler_metadata: planned for {message}; calls that share it"):
        sparse_call(**then, tile_scheduler_metadata=meta, out=out)
    assert torch.all(out == 7.0)


def test_metadata_of_a_dense_call_is_none_for_sparse_ones():
    meta, _ = flash_mla.get_mla_metadata()
    dense_call(q=randn(2, 1, 4, 576), k_cache=randn(8, 64, 1, 576), tile_scheduler_metadata=meta)
    with pytest.raises(ValueError, match="planned for is_fp8_kvcache False, used with True"):
        sparse_call(tile_scheduler_metadata=meta)


def test_threads_may_share_new_metadata():
    q, cache, table, seqlens = dense_problem([700, 9], 1, 6, 1, 16, 576)
    expected = flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, None)
    meta, _ = flash_mla.get_mla_metadata()
    results = []

    def call():
        results.extend(flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta) for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80 and all(same(result, expected) for result in results)


# Errors


@pytest.mark.parametrize(
    ("call", "changes", "error", "message"),
    [
        (dense_call, {"cache_seqlens": torch.ones(2).long()}, ValueError, "cache_seqlens: expected int32, got int64"),
        (
            dense_call,
            {"cache_seqlens": torch.ones(1).int()},
            ValueError,
            r"cache_seqlens: expected \[2\], as many as q has requests, got shape \(1,\)",
        ),
        (dense_call, {"block_table": torch.zeros(3, 4).int()}, ValueError, "block_table: expected"),
        (dense_call, {"softmax_scale": math.nan}, ValueError, "softmax_scale: expected"),
        (dense_call, {"softmax_scale": "x"}, TypeError, 'softmax_scale: expected a number, got "x"'),
        (dense_call, {"causal": None}, TypeError, "causal: expected a bool"),
        (dense_call, {"block_table": [[0]]}, TypeError, "block_table: expected a tensor of int32, got a list"),
        (dense_call, {"k_cache": None}, TypeError, r"k_cache: expected a torch tensor \[num_blocks, .*, got None"),
        (dense_call, {"k_cache": "x"}, TypeError, 'k_cache: expected a tensor, got "x"'),
        (dense_call, {"descale_q": torch.ones(1)}, ValueError, "descale_q: expected none"),
        (
            sparse_call,
            {"topk_length": torch.ones(3).int()},
            ValueError,
            r"topk_length: expected \[2\] or \[2, 1\], got",
        ),
        (
            sparse_call,
            {"topk_length": torch.ones(2, 1, 1, dtype=torch.int32)},
            ValueError,
            r"topk_length: expected \[2\] or \[2, 1\], got shape \(2, 1, 1\)",
        ),
        (sparse_call, {"indices": torch.zeros(2, 1, 32)}, ValueError, "indices: expected int32, got f32"),
        (
            sparse_call,
            {"extra_k_cache": packed_cache("fp8_ds_mla", 2, 64)[0], "extra_indices_in_kvcache": torch.zeros(2, 1, 8)},
            ValueError,
            "extra_indices_in_kvcache: expected int32, got f32",
        ),
        (sparse_call, {"k_cache": torch.zeros(2, 64, 1, 656, dtype=torch.bool)}, TypeError, "k_cache: .*, got bool"),
    ],
)
def test_errors_name_what_the_caller_wrote_and_write_nothing(call, changes, error, message):
    out = torch.full((2, 1, 6 if call is dense_call else 4, 512), 7.0).bfloat16()
    with pytest.raises(error, match=message):
        call(out=out, **changes)
    assert torch.all(out == 7.0)
    with pytest.raises(error, match=message):
        call(**changes)


def test_errors_of_several_kv_heads_and_of_a_given_output():
    q, cache, table, seqlens = dense_problem([50, 9], 1, 6, 2, 16, 576)
    with pytest.raises(ValueError, match=r"attn_sink: expected \[6\], got shape \(9,\)"):
        flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, None, attn_sink=torch.zeros(9))
    with pytest.raises(ValueError, match="out: "):  # which lies where q does
        flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, None, out=q[..., :512])
    out = torch.zeros(3, 4, 6, 512).bfloat16()[:2, :3]
    with pytest.raises(ValueError, match=r"out: expected the queries of all requests at one stride, 3 \* 3072 "):
        dense_call(q=randn(2, 3, 6, 576), out=out)


def test_tensors_without_memory_are_refused():
    with pytest.raises(TypeError, match="flash_mla_with_kvcache: expected strided tensors on the CPU or a CUDA device"):
        dense_call(q=torch.empty(2, 1, 6, 576, dtype=torch.bfloat16, device="meta"))


def test_gradients_are_refused_by_the_functions_name():
    q = randn(2, 1, 6, 576).requires_grad_()
    with torch.enable_grad(), pytest.raises(TypeError, match="flash_mla_with_kvcache: expected tensors without requ"):
        dense_call(q=q)
    with torch.no_grad():
        dense_call(q=q)


@pytest.mark.parametrize("name", ["k_cache", "attn_sink", "extra_k_cache", "out", "descale_q", "descale_k"])
def test_gradients_of_no_argument_are_lost(name):
    with torch.enable_grad(), pytest.raises(TypeError, match="expected tensors without requires_grad"):
        dense_call(**{name: torch.ones(2, requires_grad=True)})


# Tracing


@pytest.fixture
def traced_call():
    """Returns a function of q and metadata, and what it returns."""
    q, cache, table, seqlens = dense_problem([50, 9], 2, 6, 1, 16, 576)

    def call(q, meta, out=None):
        return flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta, causal=True, out=out)

    torch._dynamo.reset()
    return call, q, call(q, None)


def test_compiled_calls_do_what_eager_ones_do(traced_call):
    call, q, expected = traced_call
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert same(compiled(q, None), expected)
    out = torch.zeros_like(expected[0])
    assert same(compiled(q, None, out), expected) and torch.equal(out, expected[0])
    meta, _ = flash_mla.get_mla_metadata()
    call(q, meta)
    plan = meta.plan
    assert same(compiled(q, meta), expected) and meta.plan is plan
    with pytest.raises(ValueError, match="planned for h_q 6, used with 3"):
        compiled(q[:, :, :3], meta)


def test_compiled_calls_fill_metadata(traced_call):
    call, q, expected = traced_call
    meta, _ = flash_mla.get_mla_metadata()
    compiled = torch.compile(call, backend="aot_eager")
    assert same(compiled(q, meta), expected) and meta.have_initialized
    assert same(compiled(q, meta), expected)


def test_graphs_start_metadata_that_was_reset(traced_call):
    q, cache, table, seqlens = dense_problem([50, 9], 2, 6, 1, 16, 576)
    meta, _ = flash_mla.get_mla_metadata()
    expected = flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, meta, causal=True)
    number = meta._number
    meta.have_initialized = False
    out, lse = torch.empty_like(expected[0]), torch.empty(2, 2, 6).transpose(1, 2)
    arguments = (q, cache, table, seqlens, 512, number, None, True, False, None, None, None, None, None, None, out)
    torch.ops.libmla.flash_mla_with_kvcache(*arguments, True, False, None, None, None, lse)
    assert same((out, lse), expected) and meta.have_initialized


def test_compiled_calls_say_that_their_metadata_is_gone(traced_call):
    call, q, _ = traced_call
    meta, _ = flash_mla.get_mla_metadata()
    call(q, meta)
    number = meta._number
    del meta
    gc.collect()
    lse = torch.empty(2, 6, 2)
    with pytest.raises(RuntimeError, match="the FlashMLASchedMeta that the compiled function was made with is gone"):
        torch.ops.libmla.flash_mla_with_kvcache(
            *(q, q, None, None, 512, number, None, False, False, None, None, None, None, None, None, q, True, False),
            *(None, None, None, lse),
        )


def test_fake_tensors_have_the_shapes_of_real_ones(traced_call):
    call, q, expected = traced_call
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        results = call(mode.from_tensor(q), None)
    for fake, real in zip(results, expected, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_exported_programs_hold_no_metadata(traced_call):
    call, q, expected = traced_call

    class Model(torch.nn.Module):
        def __init__(self, meta):
            super().__init__()
            self.meta = meta

        def forward(self, q):
            return call(q, self.meta)

    program = torch.export.export(Model(None), (q,))
    assert same(program.module()(q), expected)
    meta, _ = flash_mla.get_mla_metadata()
    call(q, meta)
    with pytest.raises(Exception, match="an exported program cannot hold it"):
        torch.export.export(Model(meta), (q,))
