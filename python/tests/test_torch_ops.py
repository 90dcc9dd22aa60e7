# SPDX-License-Identifier: Apache-2.0
"""Tests libmla under torch.compile and torch.export."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import io
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import example_calls
import libmla
from libmla import _core, torch_ops
from libmla._operation import OPERATIONS
from processes import python_with_torch
from small_problems import decode_problem

CALLS = example_calls.calls()
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def no_compiled_code_of_others() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def compiled(function: Callable[..., Any], backend: str = "aot_eager", dynamic: bool | None = None) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def run(case: str, named: dict[str, Any] | None = None, through: Callable[..., Any] | None = None) -> tuple[Any, Any]:
    """Returns the result of a case, and all of its arguments as they are afterwards."""
    name, args, kwargs = copy.deepcopy((CALLS[case][0], CALLS[case][1], {**CALLS[case][2], **(named or {})}))
    call = getattr(libmla, name)
    through = through or (lambda function: function)

    def function(args: Any, kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return through(function)(args, kwargs), (args, kwargs)


def assert_same(a: Any, b: Any) -> None:
    """Checks that tensors are equal bit for bit, in whatever they are nested."""
    if dataclasses.is_dataclass(a):
        a, b = [[getattr(x, field.name) for field in dataclasses.fields(x)] for x in (a, b)]
    if isinstance(a, dict):
        a, b = list(a.values()), list(b.values())
    if isinstance(a, (tuple, list)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))
    else:
        assert type(a) is type(b)


@pytest.mark.parametrize("case", CALLS)
def test_a_compiled_call_does_what_an_eager_one_does(case: str) -> None:
    assert_same(run(case, through=compiled), run(case))


@pytest.mark.parametrize("case", ["decode_sparse, finished", "finish_output, scales"])
def test_traced_outputs_with_scales_are_e4m3(case: str) -> None:
    name, args, kwargs = CALLS[case]
    flat = torch_ops._flatten(
        torch_ops._OPERATORS[name], {**dict(zip(torch_ops._OPERATORS[name].parameters, args)), **kwargs}
    )
    made = torch_ops._OPERATORS[name].make(flat)
    made_eagerly, scale, *_ = run(case)[0]
    assert (made["o"].dtype, made["o"].shape) == (made_eagerly.dtype, made_eagerly.shape)
    assert (made["scale"].dtype, made["scale"].shape) == (scale.dtype, scale.shape)


def test_traced_values_are_as_wide_as_the_library_makes_them() -> None:
    def width(cache_format: str, *widths: int) -> int:
        q, q_pe = (
            (torch.empty(1, 2, width) for width in widths) if len(widths) == 2 else (torch.empty(1, 2, *widths), None)
        )
        return torch_ops._value_width({"q": q, "q_pe": q_pe, "cache_ckv": None, "cache_format": cache_format})

    for cache_format in ("fp8_dsv4", "nvfp4_dsv4", "mxfp4_dsv4"):  # the value is the whole row
        assert width(cache_format, 512) == width(cache_format, 448, 64) == 512
    assert width("fp8_ds_mla", 576) == width("nvfp4_ds_mla", 512, 64) == 512
    assert width("bf16", 320) == width("bf16", 256, 64) == 256
    assert width("bf16", 448, 64) == 448


class Recorder:
    """Stands for torch.ops.libmla and remembers what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._operators = torch.ops.libmla

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(**kwargs: Any) -> Any:
            self.calls.append((name, copy.deepcopy(kwargs)))
            return getattr(self._operators, name)(**kwargs)

        return call


@pytest.mark.parametrize("case", [case for case in CALLS if "," not in case])
def test_operators_pass_the_checks_of_torch(case: str) -> None:
    name, args, kwargs = copy.deepcopy(CALLS[case])
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "libmla", recorder)
        getattr(torch_ops, name)(*args, **kwargs)
    [(operator, named)] = recorder.calls
    assert operator == name
    # Compilation itself is what other tests do; here, one operator of each kind must stand dynamic shapes too.
    dynamic = ("test_aot_dispatch_dynamic",) if case in ("decode", "append", "top_k") else ()
    tests = ("test_schema", "test_faketensor", *dynamic)
    torch.library.opcheck(getattr(torch.ops.libmla, operator).default, (), named, test_utils=tests)


def expect_same_arguments(found: set[str], parameters: Collection[str]) -> None:
    """Checks that operators have the arguments of a function, where caches are their fields and pairs two tensors."""
    renamed = {"q_pe": "q", "rows_pe": "rows", "o_pe": "out", "o": "out"}
    found = found | {renamed[argument] for argument in found & renamed.keys()}
    for parameter in parameters:
        fields = {field for field in found if field.startswith((f"{parameter}_kv", f"{parameter}_format"))}
        assert parameter in found or fields, parameter
    for argument in found:
        assert argument in parameters or renamed.get(argument) in parameters or "cache_" in argument, argument


@pytest.mark.parametrize("name", sorted({name for name, _, _ in CALLS.values()}))
def test_operators_take_what_functions_take(name: str) -> None:
    parameters = inspect.signature(getattr(libmla, name)).parameters
    operators = torch.ops.libmla
    forms = [getattr(operators, form) for form in (name, name + "_out") if hasattr(operators, form)]
    found = {argument.name for form in forms for argument in form.default._schema.arguments}
    for part in OPERATIONS[name].parts.values():
        of_part = {argument for argument in found if argument.startswith(f"{part.argument}_")}
        found = found - of_part | {part.argument}
        of_part = {argument.removeprefix(f"{part.argument}_") for argument in of_part}
        expect_same_arguments(
            of_part,
            inspect.signature(getattr(libmla, part.operation.name)).parameters.keys() - {"context", "q_out_dtype"},
        )
    expect_same_arguments(found, parameters.keys())
    for form in forms:
        for argument in form.default._schema.arguments:
            if argument.has_default_value() and argument.name in parameters.keys() - {"plan", "context"}:
                assert argument.default_value == parameters[argument.name].default, argument.name


def test_every_operation_has_an_example() -> None:
    assert {name for name, _, _ in CALLS.values()} == set(torch_ops.__all__)


def test_eager_calls_do_not_take_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(torch.ops, "libmla", recorder)
    run("decode")
    assert recorder.calls == []


def with_outputs(case: str) -> dict[str, torch.Tensor]:
    """Returns outputs for a case to write into, filled with what must not stay."""
    outputs = {
        "decode": {"out": torch.empty(3, 4, 512, dtype=torch.bfloat16), "lse": torch.empty(3, 4)},
        "merge_states": {"out": torch.empty(3, 4, 512)},
        "decode_sparse": {"max_logits": torch.empty(3, 4)},
        "decode_sparse, finished": {"scale": torch.empty(3, 4, 8), "lse": torch.empty(3, 4)},
        "prefill_sparse": {"max_logits": torch.empty(3, 4)},
        "physical_slots": {"valid_count": torch.empty(3, dtype=torch.int32)},
        "gather": {"out": (torch.empty(27, 512), torch.empty(27, 64))},
        "append_rope": {"q_out": torch.empty(3, 4, 576, dtype=torch.bfloat16)},
        "finish_output": {"out": torch.empty(3, 4, 512)},
        "finish_output, scales": {"scale": torch.empty(3, 4, 4)},
        "compress": {"latent": torch.empty(3, 512, dtype=torch.float16)},
        "indexer_top_k": {"logits": torch.empty(3, 32), "slots": torch.empty(3, 4, dtype=torch.int32)},
        "top_k": {"indices": torch.empty(3, 4, dtype=torch.int32)},
    }[case]
    for value in outputs.values():
        for tensor in value if type(value) is tuple else (value,):
            tensor.fill_(77)
    return outputs


@pytest.mark.parametrize(
    "case",
    [
        "decode",
        "decode_sparse",
        "decode_sparse, finished",
        "merge_states",
        "prefill_sparse",
        "physical_slots",
        "gather",
        "append_rope",
        "finish_output",
        "finish_output, scales",
        "compress",
        "indexer_top_k",
        "top_k",
    ],
)
def test_compiled_calls_write_into_given_tensors(case: str) -> None:
    assert_same(run(case, with_outputs(case), compiled), run(case, with_outputs(case)))


def test_outputs_may_be_parts_of_larger_tensors() -> None:
    problem = decode_problem()

    def function(buffer: torch.Tensor, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        libmla.decode(q, cache, out=buffer[1:3, :, 8:520], **problem.arguments)
        return buffer.sum(dtype=torch.float64)

    buffer = torch.zeros(4, 8, 528, dtype=torch.bfloat16)
    total = compiled(function)(buffer, problem.q, problem.cache)
    problem.check(buffer[1:3, :, 8:520])
    assert total == buffer.sum(dtype=torch.float64)
    assert buffer.sum(dtype=torch.float64) == buffer[1:3, :, 8:520].sum(dtype=torch.float64)


def test_writes_into_a_cache_are_seen_by_what_follows() -> None:
    problem = decode_problem((1,))
    row = torch.randn(1, 576).bfloat16()
    slot = (problem.block_table[0, :1] * 16).long()

    def function(row: torch.Tensor, cache: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        libmla.append(row, slot, cache)
        before = libmla.decode(q, cache, **problem.arguments)
        libmla.append(row * 2, slot, cache)
        return before, libmla.decode(q, cache, **problem.arguments)

    once, twice = compiled(function)(row, problem.cache, problem.q)
    # One key: the output is the key itself.
    assert once[0, 0].equal(row[0, :512])
    assert twice[0, 0].equal(2 * row[0, :512])


def test_inductor_keeps_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What inductor compiled for an earlier libmla, whose operators had other arguments, lies in the machine's cache.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    problem = decode_problem()

    def function(q: torch.Tensor, cache: torch.Tensor) -> Any:
        return libmla.decode(q, cache, return_lse=True, **problem.arguments)

    problem.check(*compiled(function, backend="inductor")(problem.q, problem.cache))


def test_one_compilation_serves_every_batch_size() -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        compilations.append(graph)
        return graph.forward

    def function(q: torch.Tensor, cache: torch.Tensor, kv_len: torch.Tensor, table: torch.Tensor) -> Any:
        return libmla.decode(q, cache, kv_len=kv_len, block_table=table, sm_scale=192**-0.5, return_lse=True)

    dynamic = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for lengths in ((5, 40), (5, 40, 3), (7, 9, 16, 1, 30)):
        problem = decode_problem(lengths)
        problem.check(*dynamic(problem.q, problem.cache, problem.kv_len, problem.block_table))
    assert len(compilations) == 1


class Layer(torch.nn.Module):
    """Computes attention as a module."""

    def __init__(self, arguments: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.arguments = arguments or {}

    def forward(self, q: torch.Tensor, cache: torch.Tensor, kv_len: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        named = {"kv_len": kv_len, "block_table": table, "sm_scale": 192**-0.5, **self.arguments}
        return libmla.decode(q * 1, cache, **named) + 1


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_the_operator(strict: bool) -> None:
    problem = decode_problem()
    inputs = (problem.q, problem.cache, problem.kv_len, problem.block_table)
    program = torch.export.export(Layer(), inputs, strict=strict)
    assert torch.ops.libmla.decode.default in {node.target for node in program.graph.nodes}
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    problem.check(torch.export.load(stored).module()(*inputs) - 1)


def test_an_exported_program_cannot_hold_a_plan() -> None:
    problem = decode_problem()
    plan = libmla.Plan.decode(problem.q, problem.cache, **problem.arguments)
    inputs = (problem.q, problem.cache, problem.kv_len, problem.block_table)
    with pytest.raises(ValueError, match="an exported program cannot hold them"):
        torch.export.export(Layer({"plan": plan}), inputs, strict=False)


def test_compiled_calls_run_the_plan_that_they_are_given() -> None:
    problems = [decode_problem((5, 40)), decode_problem((33, 2))]
    context = libmla.Context(num_threads=1, device="cpu")  # where lengths are compared
    plans = [libmla.Plan.decode(p.q, p.cache, context=context, **p.arguments) for p in problems]

    @compiled
    def function(q: torch.Tensor, cache: torch.Tensor, named: dict[str, Any], plan: libmla.Plan) -> Any:
        return libmla.decode(q, cache, plan=plan, context=context, return_lse=True, **named)

    for i in (0, 1, 0):
        problems[i].check(*function(problems[i].q, problems[i].cache, problems[i].arguments, plans[i]))
    with pytest.raises(ValueError, match="kv_len"):
        function(problems[0].q, problems[0].cache, problems[0].arguments, plans[1])


def test_fake_tensors_get_fake_results() -> None:
    problem = decode_problem()
    with FakeTensorMode() as mode:
        named = {name: mode.from_tensor(value) for name, value in problem.arguments.items() if name != "sm_scale"}
        q, cache = mode.from_tensor(problem.q), mode.from_tensor(problem.cache)
        o, lse = libmla.decode(q, cache, sm_scale=1.0, return_lse=True, **named)
    assert (type(o), o.shape, o.dtype) == (type(q), (2, 8, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 8), torch.float32)


def test_compiled_calls_refuse_gradients() -> None:
    problem = decode_problem()
    q = problem.q.requires_grad_()
    function = compiled(lambda q: libmla.decode(q, problem.cache, **problem.arguments))
    with torch.enable_grad(), pytest.raises(Exception, match="inference only"):
        function(q)
    problem.check(function(q))


def test_errors_of_compiled_calls_are_those_of_eager_ones() -> None:
    problem = decode_problem()

    def function(q: torch.Tensor) -> torch.Tensor:
        return libmla.decode(q, problem.cache, **{**problem.arguments, "sm_scale": -1.0})

    with pytest.raises(ValueError) as eager:
        function(problem.q)
    with pytest.raises(ValueError) as traced:
        compiled(function)(problem.q)
    assert str(traced.value) == str(eager.value)


def test_compiled_merges_in_place_need_both_parts_of_the_state() -> None:
    states = torch.ones(2, 3, 4, 8), torch.zeros(2, 3, 4)
    state = {"out": torch.full((3, 4, 8), 7.0), "lse": torch.full((3, 4), 7.0)}
    merge = compiled(lambda x, y, **given: libmla.merge_states(x, y, in_place=True, **given))
    for names in ((), ("out",), ("lse",)):
        with pytest.raises(Exception, match="since in_place is set"):
            merge(*states, **{name: state[name] for name in names})
    assert all((tensor == 7).all() for tensor in state.values())
    _, lse = merge(*states, **state)
    assert lse is state["lse"] and (lse > 7).all()


@needs_gpu
def test_a_cuda_graph_captures_plan_and_run() -> None:
    problem = decode_problem((5, 40))
    q, cache, kv_len, table = (x.cuda() for x in (problem.q, problem.cache, problem.kv_len, problem.block_table))
    named = {"kv_len": kv_len, "block_table": table, "sm_scale": problem.sm_scale}
    out = torch.empty(2, 8, 512, dtype=torch.bfloat16, device="cuda")
    libmla.decode(q, cache, out=out, **named)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        libmla.decode(q, cache, out=out, **named)
    kv_len.copy_(torch.tensor([30, 2]))
    out.zero_()
    graph.replay()
    problem.kv_len = kv_len.cpu()
    problem.check(out.cpu())


@needs_gpu
def test_reduced_overhead_is_a_cuda_graph() -> None:
    problem = decode_problem((5, 40))
    named = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in problem.arguments.items()}
    function = torch.compile(lambda q, cache: libmla.decode(q, cache, **named), fullgraph=True, mode="reduce-overhead")
    q, cache = problem.q.cuda(), problem.cache.cuda()
    for _ in range(4):
        problem.check(function(q, cache).cpu())


def test_nobody_has_to_import_the_operators() -> None:
    script = """
import sys
import torch
import libmla
assert "libmla.torch_ops" not in sys.modules
named = dict(kv_len=torch.tensor([3], dtype=torch.int32), block_table=torch.zeros(1, 1, dtype=torch.int32))
q, cache = torch.ones(1, 2, 576).bfloat16(), torch.ones(1, 16, 576).bfloat16()
decode = torch.compile(lambda q: libmla.decode(q, cache, sm_scale=0.1, **named), fullgraph=True, backend="eager")
assert (decode(q) == 1).all()
assert "libmla.torch_ops" in sys.modules
"""
    done = python_with_torch("-c", script)
    assert done.returncode == 0, done.stderr


def test_numbers_name_things_while_they_live() -> None:
    context = libmla.Context(num_threads=1)
    number = context._number
    assert _core.numbered(number) is context
    others = [_core.number(context) for _ in range(3000)]  # which sweeps
    assert len(set(others)) == 3000 and _core.numbered(number) is context
    del context
    gc.collect()
    assert _core.numbered(number) is None and _core.numbered(others[-1]) is None
    kept = libmla.Context(num_threads=1)
    for _ in range(3000):
        _core.number(kept)
    assert number not in _core._numbered
