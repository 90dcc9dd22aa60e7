# SPDX-License-Identifier: Apache-2.0
"""Tests that errors call arguments by the names that the caller wrote, and that none is converted on the way."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import libmla
from example_calls import calls, packed_cache
from libmla import flash_mla, flashinfer

INTEGERS = (torch.int32, torch.int64)
# What only the C++ API calls a field.
CPP_NAMES = re.compile(r"\b(o|pool|extra_pool|options|q_nope|out_kv|out_ckv|out_kpe|indexer)\b[.:,]")


def parts_of(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor, Callable[[Any], Any]]]:
    """Yields the tensors of an argument, what they are called, and how one is put in another's place."""
    if isinstance(value, torch.Tensor):
        yield name, value, lambda other: other
    elif isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
        for i, part in enumerate(value):
            if part is not None:
                yield f"{name}[{i}]", part, lambda other, i=i: (*value[:i], other, *value[i + 1 :])
    elif isinstance(value, libmla.KvCache):
        fields = {field: getattr(value, field) for field in value.__dataclass_fields__}
        for field, part in fields.items():
            if isinstance(part, torch.Tensor):
                yield f"{name}.{field}", part, lambda other, f=field: libmla.KvCache(**{**fields, f: other})


def spoiled(dtypes: tuple[torch.dtype, ...] = ()) -> Iterator[Any]:
    """Yields every tensor, of these types, of every example."""
    for case, (operation, args, named) in calls().items():
        function = getattr(libmla, operation)
        bound = inspect.signature(function).bind(*args, **named).arguments
        for argument, value in bound.items():
            for name, tensor, put in parts_of(argument, value):
                if dtypes and tensor.dtype not in dtypes:
                    continue
                yield pytest.param(function, bound, argument, name, tensor, put, id=f"{case}: {name}")


@pytest.mark.parametrize(("function", "bound", "argument", "name", "tensor", "put"), list(spoiled()))
def test_every_tensor_is_called_as_the_caller_does(
    function: Any, bound: dict[str, Any], argument: str, name: str, tensor: torch.Tensor, put: Callable[[Any], Any]
) -> None:
    def message_for(spoilt: Any) -> str:
        with pytest.raises((TypeError, ValueError)) as caught:
            function(**{**bound, argument: put(spoilt)})
        return str(caught.value)

    expected = f"{function.__name__}: {name}: expected"
    other = tensor.long() if tensor.dtype == torch.int32 else tensor.int()
    for message in (message_for(other), message_for("a text")):
        assert message.startswith((expected, f"{function.__name__}: {argument}: expected"))
    flat = message_for(tensor.reshape(1, 1, 1, 1, -1))
    named = re.match(rf"{function.__name__}: (\w+)", flat)
    assert named and named[1] in inspect.signature(function).parameters, flat
    for message in (flat, message_for(other)):
        assert not CPP_NAMES.search(message), message


@pytest.mark.parametrize(("function", "bound", "argument", "name", "tensor", "put"), list(spoiled(INTEGERS)))
def test_integers_are_not_converted(
    function: Any, bound: dict[str, Any], argument: str, name: str, tensor: torch.Tensor, put: Callable[[Any], Any]
) -> None:
    kind = str(tensor.dtype).removeprefix("torch.")
    other = tensor.long() if tensor.dtype == torch.int32 else tensor.int()
    archs = libmla.info().emulated_archs
    gpus = [{"context": libmla.Context(2, device=f"emulated:sm{archs[0]}")}] if archs else []
    for spoilt in (other, tensor.tolist(), tensor.double()):
        for where in ({}, *gpus):
            with pytest.raises((TypeError, ValueError), match=f"{function.__name__}: {name}: expected .*{kind}"):
                function(**{**bound, argument: put(spoilt)}, **where)


def example(case: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    operation, args, named = calls()[case]
    function = getattr(libmla, operation)
    return function, inspect.signature(function).bind(*args, **named).arguments


MESSAGES: list[tuple[str, dict[str, Any], str]] = [
    ("decode", {"out": torch.zeros(3, 5, 512).bfloat16()}, "out: expected shape"),
    ("decode", {"attn_sink": torch.zeros(7)}, "attn_sink: expected shape"),
    ("decode", {"window_left": -2}, "window_left: expected at least -1"),
    ("decode", {"q": None}, "q: expected q, or q[0] and q[1], got none"),
    ("decode", {"o_scale": torch.ones(1)}, "o_scale: expected none, since out is bf16"),
    ("decode", {"q_scale": torch.ones(1)}, "q_scale: expected none, since q is bf16"),
    (
        "decode",
        {"kv_indptr": torch.zeros(4, dtype=torch.int32)},
        "block_table: expected either block_table or kv_indptr",
    ),
    ("decode, pairs, lse", {"q": (torch.zeros(3, 4, 512).bfloat16(),)}, "q: expected a pair of tensors"),
    (
        "decode_sparse, two pools",
        {"extra_topk_length": torch.zeros(3, 1, dtype=torch.int32)},
        "extra_topk_length: expected",
    ),
    (
        "decode_sparse",
        {"extra_cache": packed_cache("fp8_ds_mla")},
        "extra_cache.kv: expected none, since extra_indices",
    ),
    ("append", {"rows": None}, "rows: expected rows, or rows[0] and rows[1], got none"),
    ("append_rope", {"q": None, "q_scale": torch.ones(1)}, "q_scale: expected none, since q[0] is not given"),
    ("gather", {"out": torch.zeros(27, 575)}, "out: expected shape"),
    ("gather", {"out": (torch.zeros(27, 512), torch.zeros(26, 64))}, "out[1]: expected shape"),
    ("indexer_top_k", {"weights": None}, "weights: expected a tensor, got none"),
    (
        "indexer_top_k",
        {"latent_block_table": torch.full((3, 2), -1, dtype=torch.int32)},
        "latent_block_table: expected",
    ),
    ("indexer_top_k", {"block_table": torch.full((3, 2), -1, dtype=torch.int32)}, "block_table: expected page numbers"),
    ("indexer_top_k", {"slots": torch.zeros(3, 3, dtype=torch.int32)}, "k: expected at most the 3 slots of a row"),
    ("copy_pages", {"to_pages": torch.tensor([77, 1], dtype=torch.int32)}, "to_pages: expected page numbers"),
]


@pytest.mark.parametrize(("case", "changed", "message"), MESSAGES)
def test_names_in_messages(case: str, changed: dict[str, Any], message: str) -> None:
    function, bound = example(case)
    with pytest.raises((TypeError, ValueError)) as caught:
        function(**{**bound, **changed})
    said = str(caught.value)
    assert said.removeprefix(f"{function.__name__}: ").startswith(message), said


def test_numpy_arrays_that_cannot_be_written_are_named() -> None:
    out = np.zeros((2, 4, 8), np.float32)
    out.flags.writeable = False
    states = np.ones((2, 2, 4, 8), np.float32), np.zeros((2, 2, 4), np.float32)
    with pytest.raises(ValueError, match="merge_states: out: a numpy array that is to be written is read-only"):
        libmla.merge_states(*states, out=out)


LENGTHS = torch.tensor([5, 20], dtype=torch.int32)
TABLE = torch.arange(4, dtype=torch.int32).reshape(2, 2)
ROWS = torch.zeros(4, 16, 576).bfloat16()
Q = torch.zeros(2, 1, 4, 576).bfloat16()


def with_kvcache(**changed: Any) -> Any:
    named = {"q": Q, "k_cache": ROWS[:, :, None], "block_table": TABLE, "cache_seqlens": LENGTHS, "head_dim_v": 512}
    return flash_mla.flash_mla_with_kvcache(**{**named, "tile_scheduler_metadata": None, **changed})


def trtllm(**changed: Any) -> Any:
    named = {"query": Q, "kv_cache": ROWS, "workspace_buffer": Q, "block_tables": TABLE, "seq_lens": LENGTHS}
    dims = {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_seq_len": 32}
    return flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(**{**named, **dims, **changed})


def varlen(**changed: Any) -> Any:
    x = torch.zeros(3, 2, 64)
    named = {"q": x, "k": x, "v": x, "max_seqlen_qo": 3, "max_seqlen_kv": 3}
    named |= {name: torch.tensor([0, 3], dtype=torch.int32) for name in ("cu_seqlens_qo", "cu_seqlens_kv")}
    return flash_mla.flash_attn_varlen_func(**{**named, **changed})


def wrapper(**changed: Any) -> Any:
    named = {"qo_indptr": torch.arange(3, dtype=torch.int32), "kv_indptr": torch.tensor([0, 2, 4], dtype=torch.int32)}
    named |= {"kv_indices": TABLE.flatten(), "kv_len_arr": LENGTHS, "num_heads": 4, "head_dim_ckv": 512}
    named |= {"head_dim_kpe": 64, "page_size": 16, "causal": True, "sm_scale": 0.1}
    made = flashinfer.BatchMLAPagedAttentionWrapper(torch.zeros(8, dtype=torch.uint8))
    made.plan(**{**named, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, **changed})
    return made.run(Q[:, 0, :, :512], Q[:, 0, :, 512:], ROWS[..., :512], ROWS[..., 512:])


STATE = (torch.zeros(2, 4, 8), torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("call", "changed", "field"),
    [
        (with_kvcache, {"cache_seqlens": LENGTHS.long()}, "cache_seqlens: expected int32, got int64"),
        (with_kvcache, {"softmax_scale": -1.0}, "softmax_scale: expected"),
        (with_kvcache, {"k_cache": ROWS[:, :, None, :500]}, "k_cache: expected shape"),
        (with_kvcache, {"head_dim_v": 600}, "head_dim_v: expected"),
        (with_kvcache, {"descale_q": torch.ones(1)}, "descale_q: expected none, since q is bf16"),
        (varlen, {"cu_seqlens_qo": torch.tensor([0, 2], dtype=torch.int32)}, "cu_seqlens_qo: expected exactly 3"),
        (varlen, {"cu_seqlens_kv": torch.tensor([0, 3])}, "cu_seqlens_kv: expected int32, got int64"),
        (trtllm, {"seq_lens": LENGTHS.long()}, "seq_lens: expected int32, got int64"),
        (trtllm, {"block_tables": TABLE.long()}, "block_tables: expected int32, got int64"),
        (trtllm, {"bmm1_scale": -1.0}, "bmm1_scale: expected"),
        (trtllm, {"sinks": torch.zeros(5)}, "sinks: expected shape"),
        (trtllm, {"seq_lens": LENGTHS + 100}, "seq_lens: expected at most 32"),
        (wrapper, {"kv_len_arr": LENGTHS.long()}, "kv_len_arr: expected int32, got int64"),
        (
            flashinfer.merge_state,
            {"v_a": STATE[0], "s_a": STATE[1], "v_b": STATE[0][:1], "s_b": STATE[1]},
            "s_b: expected",
        ),
    ],
)
def test_the_peers_names(call: Callable[..., Any], changed: dict[str, Any], field: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(**changed)
    assert re.sub(r"^(decode|prefill|merge_states): ", "", str(caught.value)).startswith(field), str(caught.value)


def test_names_end_with_the_call() -> None:
    with pytest.raises(ValueError):
        with_kvcache(cache_seqlens=LENGTHS.long())
    named = {"block_table": TABLE, "sm_scale": 0.1}
    with pytest.raises(ValueError, match="^decode: kv_len: expected int32, got int64"):
        libmla.decode(Q[:, 0], ROWS, kv_len=LENGTHS.long(), **named)


def test_doc_comments_say_integer_types() -> None:
    """The type of every argument whose examples are tensors of integers stands in its operation's doc comment."""
    for operation, args, named in calls().values():
        function = getattr(libmla, operation)
        for argument, value in inspect.signature(function).bind(*args, **named).arguments.items():
            if not isinstance(value, torch.Tensor) or value.dtype not in INTEGERS:
                continue
            kind = str(value.dtype).removeprefix("torch.")
            line = re.search(rf"^ +[\w, ]*\b{argument}\b[\w, ]*: (.*)", function.__doc__ or "", re.MULTILINE)
            assert line and re.search(rf"{kind}|as in|page table", line[1]), (operation, argument)
