# SPDX-License-Identifier: Apache-2.0
"""Tests arrays of other frameworks: what goes in, what comes back, and whose memory it is."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm_ffi

import example_calls
import libmla
from capsules import CPU, CUDA, relabelled
from libmla import _foreign_memory, frameworks
from libmla._operation import OPERATIONS
from processes import python
from small_problems import decode_problem

CALLS = example_calls.calls()
_NUMPY_TYPES = {torch.bfloat16: ("uint16", ml_dtypes.bfloat16), torch.float8_e4m3fn: ("uint8", ml_dtypes.float8_e4m3fn)}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype not in _NUMPY_TYPES:
        return tensor.numpy()
    plain, extended = _NUMPY_TYPES[tensor.dtype]
    return tensor.view(getattr(torch, plain)).numpy().view(extended)


def to_torch(array: Any) -> torch.Tensor:
    array = np.asarray(array)
    for dtype, (plain, extended) in _NUMPY_TYPES.items():
        if array.dtype == extended:
            return torch.from_numpy(array.view(plain).copy()).view(dtype)
    return torch.from_numpy(array.copy())


def change(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Returns `value` with all that is of a kind converted, in whatever it is nested."""
    if isinstance(value, kind):
        return convert(value)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **change(fields, kind, convert))
    if isinstance(value, dict):
        return {name: change(item, kind, convert) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(change(item, kind, convert) for item in value)
    return value


def bits(value: Any) -> Any:
    """Replaces tensors by their shape, type and bytes, which can be compared."""
    return change(value, torch.Tensor, lambda x: (tuple(x.shape), x.dtype, x.contiguous().view(torch.uint8).tolist()))


def run_torch(case: str) -> tuple[Any, Any]:
    """Returns the result of a case and its arguments afterwards."""
    name, args, kwargs = change(CALLS[case], torch.Tensor, torch.clone)
    return getattr(libmla, name)(*args, **kwargs), (args, kwargs)


@pytest.mark.parametrize("case", CALLS)
def test_numpy_arrays_give_the_bits_of_torch_tensors(case: str) -> None:
    expected, after = run_torch(case)
    name, args, kwargs = change(CALLS[case], torch.Tensor, lambda x: to_numpy(x.clone()))
    result = getattr(libmla, name)(*args, **kwargs)
    assert bits(change(result, np.ndarray, to_torch)) == bits(expected)
    for array in result if isinstance(result, tuple) else (result,):
        assert array is None or (type(array) is np.ndarray and array.flags.writeable)
    # What was written in place stands in the caller's own arrays.
    assert bits(change((args, kwargs), np.ndarray, to_torch)) == bits(after)


@pytest.mark.parametrize("case", CALLS)
def test_jax_arrays_give_the_bits_of_torch_tensors(case: str) -> None:
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)  # slot mappings are int64
    expected, (after_args, after_named) = run_torch(case)
    name, args, kwargs = change(CALLS[case], torch.Tensor, lambda x: jax.numpy.asarray(to_numpy(x)))
    signature = inspect.signature(getattr(libmla, name))
    given = signature.bind(*args, **kwargs).arguments
    after = signature.bind(*after_args, **after_named).arguments
    before = bits(change(given, jax.Array, to_torch))
    result = getattr(libmla, name)(*args, **kwargs)
    written = [argument for argument in OPERATIONS[name].written if argument in given]
    if written:
        results = list(result) if type(result) is tuple and len(written) + (expected is not None) > 1 else [result]
        result = None if expected is None else results.pop(0)
        for argument, new in zip(written, results, strict=True):
            assert bits(change(new, jax.Array, to_torch)) == bits(after[argument])
            assert isinstance(new, type(given[argument]))
    assert bits(change(given, jax.Array, to_torch)) == before
    assert bits(change(result, jax.Array, to_torch)) == bits(expected)


class Foreign:
    """Stands for an array of a framework that speaks DLPack and the array API's ``__array_namespace__`` only."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **named: Any) -> object:
        return self.array.__dlpack__(**named)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> type[Foreign]:
        return Foreign

    @staticmethod
    def from_dlpack(tensor: Any) -> Foreign:
        return Foreign(np.from_dlpack(tensor))


class Bare(Foreign):
    """Stands for an array that only exports."""

    __array_namespace__ = None


def test_any_array_that_speaks_dlpack_comes_back_as_one_of_its_kind() -> None:
    problem = decode_problem(dtype=torch.float16)
    named = change(problem.arguments, torch.Tensor, lambda x: Foreign(x.numpy()))
    o, lse = libmla.decode(Foreign(problem.q.numpy()), Foreign(problem.cache.numpy()), return_lse=True, **named)
    assert type(o) is type(lse) is Foreign
    problem.check(torch.from_numpy(o.array), torch.from_numpy(lse.array))
    lse = Foreign(np.empty((2, 8), np.float32))
    o, same = libmla.decode(Foreign(problem.q.numpy()), Foreign(problem.cache.numpy()), lse=lse, **named)
    assert same is lse
    problem.check(torch.from_numpy(o.array), torch.from_numpy(lse.array))


def test_an_array_whose_framework_cannot_import_gives_tensors_of_tvm_ffi() -> None:
    problem = decode_problem(dtype=torch.float16)
    named = change(problem.arguments, torch.Tensor, lambda x: Bare(x.numpy()))
    o = libmla.decode(Bare(problem.q.numpy()), Bare(problem.cache.numpy()), **named)
    assert type(o) is tvm_ffi.Tensor
    problem.check(torch.from_dlpack(o))


def test_tensors_of_tvm_ffi_give_such_tensors() -> None:
    problem = decode_problem()
    named = change(problem.arguments, torch.Tensor, tvm_ffi.from_dlpack)
    o = libmla.decode(tvm_ffi.from_dlpack(problem.q), tvm_ffi.from_dlpack(problem.cache), **named)
    assert type(o) is tvm_ffi.Tensor
    problem.check(torch.from_dlpack(o))


def test_given_numpy_outputs_are_filled_and_returned() -> None:
    problem = decode_problem()
    named = change(problem.arguments, torch.Tensor, to_numpy)
    out, lse = np.zeros((4, 8, 640), ml_dtypes.bfloat16)[1:3, :, 64:576], np.zeros((2, 8), np.float32)
    result = libmla.decode(to_numpy(problem.q), to_numpy(problem.cache), out=out, lse=lse, **named)
    assert result[0] is out and result[1] is lse
    problem.check(to_torch(out), to_torch(lse))


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_read_only_inputs_are_read_and_outputs_refused(dtype: torch.dtype) -> None:
    problem = decode_problem(dtype=dtype)
    named = change(problem.arguments, torch.Tensor, lambda x: read_only(to_numpy(x)))
    q, cache = read_only(to_numpy(problem.q)), read_only(to_numpy(problem.cache))
    problem.check(to_torch(libmla.decode(q, cache, **named)))
    lse = read_only(np.zeros((2, 8), np.float32))
    with pytest.raises(ValueError, match="read-only"):
        libmla.decode(q, cache, lse=lse, **named)
    with pytest.raises(ValueError, match="read-only"):
        libmla.append(q[:, 0], np.arange(2), cache)
    assert not lse.any() and to_torch(cache).equal(problem.cache)


def test_jax_outputs_are_refused() -> None:
    jax = pytest.importorskip("jax")
    problem = decode_problem()
    q, cache, named = change(
        (problem.q, problem.cache, problem.arguments), torch.Tensor, lambda x: jax.numpy.asarray(to_numpy(x))
    )
    with pytest.raises(TypeError, match="immutable"):
        libmla.decode(q, cache, lse=jax.numpy.zeros((2, 8)), **named)


def test_deleted_jax_arrays_are_refused() -> None:
    jax = pytest.importorskip("jax")
    problem = decode_problem()
    q, cache, named = change(
        (problem.q, problem.cache, problem.arguments), torch.Tensor, lambda x: jax.numpy.array(to_numpy(x))
    )
    cache.delete()
    with pytest.raises(ValueError, match="deleted"):
        libmla.decode(q, cache, **named)


def test_jax_tracers_are_refused_and_callbacks_work() -> None:
    jax = pytest.importorskip("jax")
    problem = decode_problem()
    q, cache, named = change(
        (problem.q, problem.cache, problem.arguments), torch.Tensor, lambda x: jax.numpy.asarray(to_numpy(x))
    )
    with pytest.raises(TypeError, match="pure_callback"):
        jax.jit(lambda q: libmla.decode(q, cache, **named))(q)
    shape = jax.ShapeDtypeStruct((2, 8, 512), q.dtype)
    decode = jax.jit(lambda q: 2 * jax.pure_callback(lambda q: libmla.decode(q, cache, **named), shape, q))
    problem.check(to_torch(decode(q)) / 2)


def test_outputs_outlive_what_they_were_made_of() -> None:
    problem = decode_problem()
    named = change(problem.arguments, torch.Tensor, to_numpy)
    outputs = [libmla.decode(to_numpy(problem.q), to_numpy(problem.cache), **named) for _ in range(50)]
    for output in outputs:
        problem.check(to_torch(output))


def test_plans_take_arrays() -> None:
    problem = decode_problem()
    q, cache, named = change((problem.q, problem.cache, problem.arguments), torch.Tensor, to_numpy)
    plan = libmla.Plan.decode(q, cache, **named)
    problem.check(to_torch(libmla.decode(q, cache, plan=plan, **named)))
    memory = np.zeros(1 << 28, np.uint8)  # for as many threads as the machine has
    plan = libmla.Plan.decode(q, cache, workspace=memory, **named)
    problem.check(to_torch(libmla.decode(q, cache, plan=plan, **named)))
    assert memory.any()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.zeros(1), "torch"),
        (torch.nn.Parameter(torch.zeros(1)), "torch"),
        (np.zeros(1), "numpy"),
        (tvm_ffi.from_dlpack(np.zeros(1)), "tvm_ffi"),
        (Foreign(np.zeros(1)), "dlpack"),
        (1.0, ""),
        ("bf16", ""),
        (None, ""),
    ],
)
def test_framework_of(value: Any, name: str) -> None:
    assert frameworks.framework_of(value) == name


def test_numpy_alone_is_enough() -> None:
    """libmla works without torch, ml_dtypes and JAX; numpy has no bf16 then."""
    script = """
import sys
for absent in ("torch", "ml_dtypes", "jax"):
    sys.modules[absent] = None
import numpy as np
import libmla
q, cache = np.ones((1, 4, 576), np.float16), np.ones((1, 16, 576), np.float16)
named = dict(kv_len=np.array([3], np.int32), block_table=np.zeros((1, 1), np.int32), sm_scale=0.1)
o = libmla.decode(q, cache, **named)
assert o.dtype == np.float16 and (o == 1).all(), o
try:
    libmla.decode(q.view(np.uint8)[..., :576], cache, q_scale=np.ones(1, np.float32), **named)
except TypeError as error:
    print(error)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "install ml_dtypes" in process.stdout


class StandInForCupy(types.ModuleType):
    """Has what libmla uses of CuPy, over host memory that is said to be a GPU's."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.allocated: list[int] = []
        self.stream = 4096
        module = self

        class ndarray:
            __module__ = "cupy"

            def __init__(self, host: np.ndarray) -> None:
                self.host = host
                self.data = types.SimpleNamespace(ptr=host.ctypes.data)

            def __dlpack_device__(self) -> tuple[int, int]:
                return CUDA

            def __dlpack__(self, stream: int | None = None) -> object:
                assert stream == -1, "the call is on CuPy's stream: nobody waits"
                return relabelled(self.host, CUDA)

        def from_dlpack(tensor: tvm_ffi.Tensor) -> ndarray:
            assert tensor.__dlpack_device__() == CUDA
            return ndarray(np.from_dlpack(frameworks._Capsule(relabelled(tensor, CPU), CPU)))

        def empty(size: int, dtype: str) -> ndarray:
            module.allocated.append(size)
            return ndarray(np.empty(size, dtype))

        self.ndarray, self.from_dlpack, self.empty = ndarray, from_dlpack, empty
        self.cuda = types.SimpleNamespace(
            Device=lambda index: contextlib.nullcontext(),
            get_current_stream=lambda: types.SimpleNamespace(ptr=module.stream),
        )


def test_arrays_of_cupy_use_its_stream_and_its_memory(monkeypatch: pytest.MonkeyPatch, emulated_sm90: str) -> None:
    cupy = StandInForCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    context = libmla.Context(num_threads=2, device=emulated_sm90)
    problem = decode_problem((5, 18), heads=4, dtype=torch.float16)
    q, cache, named = change(
        (problem.q, problem.cache, problem.arguments), torch.Tensor, lambda x: cupy.ndarray(x.numpy())
    )
    streams = []
    decode = OPERATIONS["decode"]
    run = decode.run

    def watched(*call: Any) -> Any:
        streams.append(tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", 0)))
        return run(*call)

    monkeypatch.setattr(decode, "run", watched)
    o, lse = frameworks.run_borrowed(
        decode, {"q": q, "cache": cache, "return_lse": True, "context": context, **named}, q
    )
    assert type(o) is type(lse) is cupy.ndarray
    problem.check(to_torch(o.host), to_torch(lse.host))
    assert {2 * 4 * 512 * 2, 2 * 4 * 4} <= set(cupy.allocated)
    assert streams == [4096]
    assert tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", 0)) != 4096


def test_memory_of_a_framework_is_held_as_long_as_it_is_used() -> None:
    def make(size: int, index: int) -> tuple[np.ndarray, int]:
        array = np.empty(size, np.uint8)
        return array, array.ctypes.data

    problem = decode_problem(dtype=torch.float16)
    q, cache, named = change((problem.q, problem.cache, problem.arguments), torch.Tensor, tvm_ffi.from_dlpack)
    before = len(_foreign_memory._held)
    with _foreign_memory.allocating(make):
        o = libmla.decode(q, cache, **named)
    assert len(_foreign_memory._held) == before + 1
    array = torch.from_dlpack(o)
    del o
    problem.check(array)
    del array
    assert len(_foreign_memory._held) == before

    def fail(size: int, index: int) -> tuple[np.ndarray, int]:
        raise MemoryError("none left")

    with _foreign_memory.allocating(fail), pytest.raises(RuntimeError, match="none left"):
        libmla.decode(q, cache, **named)
    problem.check(torch.from_dlpack(libmla.decode(q, cache, **named)))


def test_memory_lent_until_the_interpreter_ends_goes_quietly() -> None:
    # By then the names of modules may be gone, as here.
    program = """
import ctypes
from libmla import _foreign_memory as lent
address = lent._describe(object(), lent.DLTensor(ndim=1, shape=(ctypes.c_int64 * 1)(4)), 0)
held, release = lent._held, lent._release
for name in list(vars(lent)):
    setattr(lent, name, None)
release(address)
print(len(held))
"""
    ended = python("-c", program)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_waiting_for_the_default_stream() -> None:
    x = torch.ones(2048, 2048, device="cuda")
    for _ in range(50):
        x = x @ x / 2048
    done = torch.cuda.Event()
    done.record()
    _foreign_memory.wait_for_default_stream(0)
    assert done.query()
    with pytest.raises(RuntimeError, match="GPU 1000"):
        _foreign_memory.wait_for_default_stream(1000)


def test_a_machine_without_a_driver_cannot_be_waited_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    with pytest.raises((OSError, RuntimeError), match="libcuda|driver"):
        _foreign_memory.wait_for_default_stream(0)
