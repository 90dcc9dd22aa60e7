# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an argument is said by an exception, and nothing is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import libmla
from capsules import CUDA, VULKAN, on_device
from small_problems import DecodeProblem, decode_problem

UNTOUCHED = 77.0
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Decode:
    """Makes a decode call with outputs, whose arguments may be spoiled."""

    def __init__(self) -> None:
        self.problem = decode_problem()
        self.out = torch.full((2, 8, 512), UNTOUCHED, dtype=torch.bfloat16)
        self.lse = torch.full((2, 8), UNTOUCHED)
        self.named: dict[str, Any] = {
            "q": self.problem.q,
            "cache": self.problem.cache,
            "out": self.out,
            "lse": self.lse,
            **self.problem.arguments,
        }

    def fails_with(self, kind: type[Exception], *words: str, **changed: Any) -> None:
        """Checks that the call raises `kind` with every word in the message, and writes nothing."""
        with pytest.raises(kind) as caught:
            libmla.decode(**{**self.named, **changed})
        for word in words:
            assert word in str(caught.value), str(caught.value)
        assert (self.out == UNTOUCHED).all() and (self.lse == UNTOUCHED).all()


@pytest.fixture
def decode() -> Decode:
    return Decode()


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose memory has been given back, as engines do with storages."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


FIELDS = ["q", "cache", "kv_len", "block_table", "out", "lse"]
SPOILED = [
    pytest.param(lambda x: x.double(), (TypeError, ValueError), "f64|float64|double", id="dtype"),
    pytest.param(lambda x: x.unsqueeze(0), ValueError, "dimensions|\\[1, ", id="dimensions"),
    pytest.param(freed, ValueError, "memory|null|data", id="freed"),
    pytest.param(on_meta, (ValueError, TypeError, RuntimeError, BufferError), "meta|device", id="meta device"),
    pytest.param(lambda x: x.to_sparse(), TypeError, "sparse", id="sparse"),
    pytest.param(lambda x: "a text", TypeError, "tensor", id="text"),
    pytest.param(lambda x: 3, TypeError, "tensor", id="number"),
    pytest.param(lambda x: x.tolist(), TypeError, "tensor|pair", id="list"),
]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(("spoil", "kind", "word"), SPOILED)
def test_every_tensor_is_checked(
    decode: Decode, field: str, spoil: Callable[[torch.Tensor], Any], kind: Any, word: str
) -> None:
    with pytest.raises(kind, match=word):
        libmla.decode(**{**decode.named, field: spoil(decode.named[field])})
    assert (decode.out == UNTOUCHED).all() and (decode.lse == UNTOUCHED).all()


@pytest.mark.parametrize("field", [field for field in FIELDS if field != "cache"])  # more pages are a cache, too
def test_extents_are_checked(decode: Decode, field: str) -> None:
    tensor = decode.named[field]
    decode.fails_with(ValueError, "expected", **{field: torch.cat([tensor, tensor[:1]])})


@pytest.mark.parametrize("field", ["q", "cache", "out"])
def test_gaps_between_the_innermost_elements(decode: Decode, field: str) -> None:
    tensor = decode.named[field]
    apart = torch.full((*tensor.shape, 2), UNTOUCHED, dtype=tensor.dtype)[..., 0]
    decode.fails_with(ValueError, "decode: ", "stride", **{field: apart})


def test_none_for_what_is_needed(decode: Decode) -> None:
    for field in ("q", "kv_len", "cache"):
        decode.fails_with((ValueError, TypeError), field if field != "cache" else "cache", **{field: None})
    decode.fails_with(ValueError, "block_table", block_table=None)


def test_missing_and_unknown_arguments(decode: Decode) -> None:
    decode.fails_with(TypeError, "no_such_thing", no_such_thing=1)
    with pytest.raises(TypeError, match="kv_len"):
        libmla.decode(decode.problem.q, decode.problem.cache, sm_scale=1.0)
    q, cache = decode.problem.q.float().numpy(), decode.problem.cache.half().numpy()
    with pytest.raises(TypeError, match="kv_len"):
        libmla.decode(q, cache, sm_scale=1.0)
    with pytest.raises(TypeError, match="positional"):
        libmla.decode(q, cache, q, kv_len=q, sm_scale=1.0)
    with pytest.raises(TypeError, match="multiple values for argument 'cache'"):
        libmla.decode(q, cache, cache=cache, kv_len=q, sm_scale=1.0)
    with pytest.raises(TypeError, match="no_such_thing"):
        libmla.decode(q, cache, kv_len=q, sm_scale=1.0, no_such_thing=1)


@pytest.mark.parametrize("field", ["q", "cache", "kv_len", "block_table"])
def test_numpy_arrays_that_run_backwards(field: str) -> None:
    problem = decode_problem(dtype=torch.float16)
    named = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in problem.arguments.items()}
    named |= {"q": problem.q.numpy(), "cache": problem.cache.numpy(), "lse": np.full((2, 8), 77, np.float32)}
    backwards = np.flip(np.ascontiguousarray(np.flip(named[field], -1)), -1)
    assert backwards.strides[-1] < 0
    with pytest.raises(ValueError, match="stride"):
        libmla.decode(**{**named, field: backwards})
    assert (named["lse"] == 77).all()


def test_only_statistics_may_run_backwards() -> None:
    problem = decode_problem(dtype=torch.float16)
    named = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in problem.arguments.items()}
    memory = np.full((2, 8), 77, np.float32)
    o, lse = libmla.decode(problem.q.numpy(), problem.cache.numpy(), lse=memory[::-1, ::-1], **named)
    problem.check(torch.from_numpy(o), torch.from_numpy(lse.copy()))
    assert (memory[::-1, ::-1] == lse).all()


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"sm_scale": 0.0}, ValueError, "sm_scale"),
        ({"sm_scale": float("nan")}, ValueError, "sm_scale"),
        ({"sm_scale": "1"}, TypeError, "sm_scale"),
        ({"causal": 3.5}, TypeError, "causal"),
        ({"window_left": -2}, ValueError, "window_left"),
        ({"window_left": 2**40}, ValueError, "window_left"),
        ({"window_left": 0.5}, TypeError, "window_left"),
        ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap"),
        ({"lse_base": "10"}, ValueError, "lse_base"),
        ({"context_parallel": (2, 2, 1)}, ValueError, "context_parallel"),
        ({"context_parallel": (0, 2)}, TypeError, "context_parallel"),
        ({"out_dtype": "i8"}, TypeError, "out_dtype"),
        ({"plan": 3}, TypeError, "plan"),
        ({"context": 3}, TypeError, "context"),
        ({"plan": libmla.Context(num_threads=1)}, TypeError, "plan"),
        ({"kv_len": torch.tensor([5, 41 + 16], dtype=torch.int32)}, ValueError, "kv_len"),
        ({"kv_len": torch.tensor([5, -1], dtype=torch.int32)}, ValueError, "kv_len"),
        ({"kv_len": torch.tensor([5, 40])}, (TypeError, ValueError), "kv_len"),
        ({"block_table": torch.full((2, 3), 10**6, dtype=torch.int32)}, ValueError, "block_table"),
        ({"q_scale": torch.ones(1)}, ValueError, "q_scale"),
        ({"attn_sink": torch.zeros(7)}, ValueError, "attn_sink"),
        ({"attn_sink": np.zeros(8)}, (TypeError, ValueError), "attn_sink"),
        ({"qo_indptr": torch.tensor([0, 1, 3], dtype=torch.int32)}, ValueError, "qo_indptr"),
    ],
)
def test_values_are_checked(decode: Decode, changed: dict[str, Any], kind: Any, words: str) -> None:
    decode.fails_with(kind, "decode: ", words, **changed)


@pytest.mark.parametrize(
    ("cache", "kind", "words"),
    [
        (libmla.KvCache("bf17", kv=torch.zeros(6, 16, 576).bfloat16()), ValueError, "format"),
        (libmla.KvCache("bf16"), ValueError, "cache"),
        (libmla.KvCache("f16", kv=torch.zeros(6, 16, 576).bfloat16()), (TypeError, ValueError), "cache"),
        (libmla.KvCache("fp8", kv=torch.zeros(6, 16, 576, dtype=torch.uint8)), ValueError, "ckv_scale"),
        (libmla.KvCache("fp8_ds_mla", kv=torch.zeros(6, 16, 655, dtype=torch.uint8)), ValueError, "656"),
        (torch.zeros(6, 16, 576), TypeError, "cache"),
        ((torch.zeros(6, 16, 512).bfloat16(),) * 3, TypeError, "pair"),
    ],
)
def test_caches_are_checked(decode: Decode, cache: Any, kind: Any, words: str) -> None:
    decode.fails_with(kind, words, cache=cache)


def test_gradients_are_refused(decode: Decode) -> None:
    for field in ("q", "cache", "lse"):
        tensor = decode.named[field].detach().clone().requires_grad_()
        with torch.enable_grad():
            decode.fails_with(TypeError, "decode: ", "inference only", **{field: tensor})
    cache = libmla.KvCache("bf16", kv=decode.problem.cache.detach().clone().requires_grad_())
    with torch.enable_grad():
        decode.fails_with(TypeError, "inference only", cache=cache)
        parameter = torch.nn.Parameter(decode.problem.q)
        decode.fails_with(TypeError, "inference only", q=parameter)
        decode.fails_with(TypeError, "inference only", q=(parameter[..., :512], decode.problem.q[..., 512:]))
    o, lse = libmla.decode(**{**decode.named, "q": parameter})
    decode.problem.check(o, lse)


def made_plan(problem: DecodeProblem, **changed: Any) -> libmla.Plan:
    return libmla.Plan.decode(problem.q, problem.cache, **{**problem.arguments, **changed})


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (lambda: made_plan(decode_problem((5, 41))), "kv_len"),
        (lambda: made_plan(decode_problem((5, 40, 1))), "plan"),
        (lambda: made_plan(decode_problem((5, 40), heads=16)), "plan"),
        (lambda: made_plan(decode_problem(), causal=False), "causal"),
        (lambda: made_plan(decode_problem(), window_left=7), "window_left"),
        (lambda: made_plan(decode_problem(), batch_invariant=True), "batch_invariant"),
    ],
)
def test_a_plan_for_something_else(decode: Decode, other: Callable[[], libmla.Plan], word: str) -> None:
    decode.fails_with(ValueError, "decode: ", word, plan=other())


def test_a_plan_of_another_operation(decode: Decode) -> None:
    indices = torch.zeros(2, 4, dtype=torch.int32)
    plan = libmla.Plan.decode_sparse(decode.problem.q, decode.problem.cache, indices, sm_scale=1.0)
    decode.fails_with(ValueError, "decode: ", "plan", plan=plan)


def test_a_plan_whose_workspace_has_a_new_owner_or_other_bytes(decode: Decode) -> None:
    workspace = torch.zeros(1 << 28, dtype=torch.uint8)  # for as many threads as the machine has
    first = made_plan(decode.problem, workspace=workspace)
    second = made_plan(decode.problem, workspace=workspace)
    decode.fails_with(ValueError, "workspace", plan=first)
    workspace.zero_()
    decode.fails_with(ValueError, "workspace", plan=second)


@pytest.mark.parametrize(
    ("workspace", "kind", "word"),
    [
        (torch.zeros(8, dtype=torch.uint8), ValueError, "bytes"),
        (torch.zeros(1 << 24, dtype=torch.uint8)[::2], ValueError, "contiguous"),
        (torch.zeros(1 << 24, dtype=torch.uint8, device="meta"), Exception, "meta|workspace|device"),
        ("memory", TypeError, "workspace"),
    ],
)
def test_workspaces_are_checked(workspace: Any, kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        made_plan(decode_problem(), workspace=workspace)


def test_a_plan_is_made_by_its_class_methods_only() -> None:
    with pytest.raises(TypeError, match="Plan.decode"):
        libmla.Plan()


def test_a_context_elsewhere(decode: Decode) -> None:
    with pytest.raises((ValueError, RuntimeError), match="device|cuda|GPU"):
        libmla.Context(device="gpu:0")
    with pytest.raises(ValueError, match="num_threads"):
        libmla.Context(num_threads=-1)
    with pytest.raises((ValueError, RuntimeError), match="backend|no_such"):
        libmla.decode(**{**decode.named, "context": libmla.Context(num_threads=1, backend="no_such")})
    with pytest.raises(TypeError):
        libmla.Context(num_threads="two")


def test_an_unsupported_problem_has_an_exception_of_its_own(decode: Decode) -> None:
    with pytest.raises(libmla.UnsupportedError) as caught:
        libmla.decode(**{**decode.named, "context": libmla.Context(num_threads=1, backend="cuda_portable")})
    assert isinstance(caught.value, RuntimeError)
    assert "cuda_portable" in str(caught.value)
    assert (decode.out == UNTOUCHED).all()


def test_writers_leave_the_cache_alone() -> None:
    problem = decode_problem()
    cache = problem.cache.clone()
    rows, slots = torch.ones(2, 576), torch.arange(2)
    for changed in (
        (rows, slots.int(), cache),
        (rows[:, :575], slots, cache),
        (rows, slots + 10**9, cache),
        (rows, slots[:1], cache),
        (rows.long(), slots, cache),
        ((rows[:, :512], rows[:, 512:], rows), slots, cache),
    ):
        with pytest.raises((ValueError, TypeError)):
            libmla.append(*changed)
    assert cache.equal(problem.cache)


def test_frozen_caches() -> None:
    cache = libmla.KvCache("bf16", kv=decode_problem().cache)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.format = "f16"


@pytest.mark.parametrize("field", ["q", "cache", "kv_len", "block_table", "out", "lse"])
@pytest.mark.parametrize(("device", "word"), [(CUDA, "cuda:0"), ((2, 5), "cuda:5"), (VULKAN, "7:0")])
def test_tensors_elsewhere(decode: Decode, field: str, device: tuple[int, int], word: str) -> None:
    """One tensor is said to lie on another device than the others; nobody follows its pointer to find out."""
    decode.fails_with((ValueError, RuntimeError), "decode: ", word, **{field: on_device(decode.named[field], device)})


def test_all_tensors_on_a_gpu_that_is_not_there(decode: Decode) -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    moved = {
        name: on_device(value, CUDA) if isinstance(value, torch.Tensor) else value
        for name, value in decode.named.items()
    }
    with pytest.raises((ValueError, RuntimeError), match="decode: .*(GPU|cuda)"):
        libmla.decode(**moved)
    assert (decode.out == UNTOUCHED).all()


@needs_gpu
def test_mixed_devices(decode: Decode) -> None:
    for field in ("q", "cache", "kv_len", "block_table", "out", "lse"):
        decode.fails_with(ValueError, "decode: ", "cuda:0", **{field: decode.named[field].cuda()})


@needs_gpu
def test_a_stream_of_another_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    problem = decode_problem()
    q, cache, kv_len, table = (x.cuda(0) for x in (problem.q, problem.cache, problem.kv_len, problem.block_table))
    with torch.cuda.stream(torch.cuda.Stream(device=1)):
        o = libmla.decode(q, cache, kv_len=kv_len, block_table=table, sm_scale=problem.sm_scale)
    torch.cuda.synchronize(0)
    problem.check(o.cpu())
