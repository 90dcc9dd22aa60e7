# SPDX-License-Identifier: Apache-2.0
"""Tests the arguments of the operations against what the library says of its fields: nothing is ordered by hand."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

import libmla
from libmla import _core, torch_ops
from libmla._operation import OPERATIONS, Operation, Output
from small_problems import decode_problem


def passed(name: str) -> list[str]:
    return [str(argument) for argument in _core.function("arguments")(name)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_arguments_are_those_that_the_library_names(name: str) -> None:
    parameters = set(OPERATIONS[name].signature.parameters) - {"context", "plan"}
    assert {re.match(r"\w+", argument).group() for argument in passed(name)} == parameters
    assert len(set(passed(name))) == len(passed(name))


def test_a_cache_has_the_fields_that_the_library_names() -> None:
    fields = [argument.removeprefix("cache.") for argument in passed("decode") if argument.startswith("cache.")]
    assert fields == [field.name for field in dataclasses.fields(libmla.KvCache)]


def test_an_unknown_operation_has_no_arguments() -> None:
    with pytest.raises(ValueError, match="^arguments: operation: expected one of those that libmla knows, got decoed$"):
        passed("decoed")


# What top_k takes beside what the tests declare.
REST = "lengths=None, starts=None, blocks=None, block_size=1"


def declared(parameters: str, *outputs: Output) -> Operation:
    """Returns top_k, declared with other parameters."""
    words: dict[str, Any] = {}
    exec(f"def top_k({parameters}): ...", words)  # noqa: S102
    return Operation(words["top_k"], outputs, (), {})


@pytest.mark.parametrize(
    "parameters, names",
    [
        (f"logits, k, *, {REST}, context=None", "indices"),
        (f"logits, k, *, {REST}, indices=None, mask=None, context=None", "mask"),
    ],
)
def test_a_signature_that_differs_is_refused(parameters: str, names: str) -> None:
    with pytest.raises(RuntimeError, match=f"^top_k: libmla's Python and its library are of different .*: {names}$"):
        declared(parameters)


def test_the_order_of_a_signature_does_not_matter() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    turned = declared(f"k, logits, *, context=None, indices=None, {REST}", Output("indices"))
    assert turned.run((2, logits), {}).tolist() == [[1, 2]]


def test_python_says_what_does_not_fit_a_signature() -> None:
    logits = torch.zeros(1, 2)
    for args, named, message in (
        ((logits,), {}, r"top_k\(\) missing 1 required positional argument: 'k'"),
        ((logits, 1), {"k": 1}, r"top_k\(\) got multiple values for argument 'k'"),
        ((logits, 1), {"length": logits}, r"top_k\(\) got an unexpected keyword argument 'length'"),
        ((logits, 1, None), {}, r"top_k\(\) takes 2 positional arguments but 3 were given"),
    ):
        with pytest.raises(TypeError, match=message):
            libmla.top_k(*args, **named)
    problem = decode_problem()
    with pytest.raises(TypeError, match=r"decode\(\) missing 1 required keyword-only argument: 'kv_len'"):
        libmla.decode(problem.q, problem.cache, sm_scale=1.0)


def test_what_the_library_is_called_with_has_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    decode = OPERATIONS["decode_sparse"]
    monkeypatch.setattr(decode, "_library", lambda *values: calls.append(values))
    given = {name: object() for name in decode.signature.parameters}
    given["q"] = (object(), object())
    given["cache"] = libmla.KvCache(*(object() for _ in dataclasses.fields(libmla.KvCache)))
    given["extra_cache"] = (object(), object())
    decode.run((), given)
    (_, context, plan, *values) = calls[0]
    assert context is given["context"] and plan is given["plan"]
    bare = libmla.KvCache("", ckv=given["extra_cache"][0], kpe=given["extra_cache"][1])
    flat = {"q": None, "q[0]": given["q"][0], "q[1]": given["q"][1]}
    for name, cache in (("cache", given["cache"]), ("extra_cache", bare)):
        flat.update((f"{name}.{field.name}", getattr(cache, field.name)) for field in dataclasses.fields(cache))
    for argument, value in zip(passed("decode_sparse"), values, strict=True):
        assert value is flat.get(argument, given.get(argument)), argument


def test_torch_knows_every_type_of_a_signature() -> None:
    with pytest.raises(KeyError, match="Colour"):
        torch_ops._type("Colour | None")
    assert torch_ops._type("Tensor | None", "(a!)") == "Tensor(a!)?"
    assert set(torch_ops._OPERATORS) == set(OPERATIONS)
