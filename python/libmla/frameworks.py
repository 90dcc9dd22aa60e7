# SPDX-License-Identifier: Apache-2.0
"""Lends arrays of other frameworks to the operations of :mod:`libmla.ops`.

Operations know two kinds of tensors: those of torch and those of tvm-ffi. Arrays of other frameworks (numpy, JAX, CuPy,
and whatever else speaks DLPack) become tvm-ffi tensors over the same memory, and what comes back becomes arrays of the
framework of the first array.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tvm_ffi

from ._foreign_memory import DLTensor, allocating, wait_for_default_stream

if TYPE_CHECKING:
    from ._operation import Operation

_NATIVE = "tvm_ffi"
_TORCH = "torch"
TRACED = "torch, traced"
_NUMPY = "numpy"
_JAX = "jax"
_CUPY = "cupy"
_DLPACK = "dlpack"
_NONE = ""  # not an array
DIRECT = (_TORCH, _NATIVE)

_DLPACK_CUDA = 2
_DLPACK_UINT = 1
# What a consumer says of its stream, in CUDA.
_DLPACK_DEFAULT_STREAM = 1
_DLPACK_NO_WAITING = -1
# DLPack's codes of the element types that numpy knows by ml_dtypes only, and the integers that stand in for them.
_EXTENDED_TYPES = {"bfloat16": (4, "uint16"), "float8_e4m3fn": (10, "uint8")}

framework_of_type: dict[type, str] = {tvm_ffi.Tensor: _NATIVE}


def _framework_of_class(cls: type) -> str:
    """Returns the framework whose array a class is, by the module that defines it or one of its bases."""
    for base in cls.__mro__:
        root = base.__module__.partition(".")[0]
        if root == "torch" and base.__name__ == "Tensor":
            # Subclasses may have no memory of their own (FakeTensor) or mean something else by it: torch's dispatcher
            # knows. A Parameter is a plain tensor.
            return _TORCH if cls is base or cls.__name__ in ("Parameter", "Buffer") else TRACED
        if root == "numpy" and base.__name__ == "ndarray":
            return _NUMPY
        if root in ("jax", "jaxlib") and hasattr(cls, "__dlpack__"):
            return _JAX
        if root == "cupy" and base.__name__ == "ndarray":
            return _CUPY
    return _DLPACK if hasattr(cls, "__dlpack__") else _NONE


def framework_of(value: object) -> str:
    """Returns the framework whose array a value is: "torch", "torch, traced", "numpy", "jax", "cupy", "tvm_ffi" or
    "dlpack"; "" if it is no array."""
    cls = type(value)
    framework = framework_of_type.get(cls)
    if framework is None:
        framework = framework_of_type[cls] = _framework_of_class(cls)
    return framework


def _arrays(value: object) -> Iterator[object]:
    """Yields the arrays within an argument: itself, or those of a pair, of a KvCache or of another operation's
    arguments."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, dict):
        yield from _arrays(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _arrays(getattr(value, field.name))
    elif framework_of(value):
        yield value


def leader_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Returns the first array of a call, or None: its framework is the caller's."""
    for value in (*args, *kwargs.values()):
        for array in _arrays(value):
            return array
    return None


class _Capsule:
    """Exports a DLPack capsule that exists already."""

    def __init__(self, capsule: object, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **_: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class _Writable:
    """Presents the memory of a numpy array that is marked read-only as writable. The array is an input, which the
    library only reads but which old versions of DLPack cannot export, or an output, which old versions of DLPack do not
    let numpy write."""

    def __init__(self, array: Any) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _relabelled(exporter: Any, type_code: int) -> object:
    """Returns a capsule that says another element type of the same size. Every export is a structure of its own, so
    that no other capsule changes."""
    capsule = exporter.__dlpack__()
    DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")).type_code = type_code
    return capsule


@functools.lru_cache(maxsize=64)
def _extension(dtype: Any) -> tuple[int, str] | None:
    """Returns what stands for an element type of numpy in DLPack if numpy cannot say (the type's code, and an integer
    type of the same size), else None."""
    return _EXTENDED_TYPES.get(dtype.name)


def _from_numpy(array: Any, writable: bool) -> tvm_ffi.Tensor:
    extended = _extension(array.dtype)
    plain = array if extended is None else array.view(extended[1])
    if not array.flags.writeable:
        if writable:
            raise ValueError("a numpy array that is to be written is read-only")
        plain = sys.modules["numpy"].asarray(_Writable(plain))
    return tvm_ffi.from_dlpack(plain if extended is None else _relabelled(plain, extended[0]))


def _to_numpy(tensor: tvm_ffi.Tensor) -> Any:
    numpy = sys.modules["numpy"]
    name = str(tensor.dtype)
    if name not in _EXTENDED_TYPES:
        return numpy.from_dlpack(tensor)
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(f"numpy has no {name}: install ml_dtypes, or ask for another type of the output") from None
    capsule = _relabelled(tensor, _DLPACK_UINT)
    integers = numpy.from_dlpack(_Capsule(capsule, tensor.__dlpack_device__()))
    return numpy.asarray(_Writable(integers)).view(getattr(ml_dtypes, name))


def _gpu_index(array: Any) -> int | None:
    """Returns the number of the GPU that holds an array, or None if the array lies in host memory."""
    kind, index = array.__dlpack_device__()
    return int(index) if int(kind) == _DLPACK_CUDA else None


def _cupy_memory(size: int, index: int) -> tuple[Any, int]:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(index):
        array = cupy.empty(size, "uint8")
    return array, array.data.ptr


def _jax_memory(leader: Any) -> Callable[[int, int], tuple[Any, int]]:
    def memory(size: int, _: int) -> tuple[Any, int]:
        (device,) = leader.devices()
        array = sys.modules["jax"].numpy.empty(size, "uint8", device=device).block_until_ready()
        return array, array.unsafe_buffer_pointer()

    return memory


@contextlib.contextmanager
def _in_framework(leader: Any, framework: str) -> Iterator[None]:
    """Makes the library use, within the context, the stream and the memory of a GPU array's framework."""
    index = _gpu_index(leader)
    if index is None:
        yield
        return
    # JAX keeps its streams to itself: inputs are made ready for the default stream, which is waited for.
    stream = sys.modules["cupy"].cuda.get_current_stream().ptr if framework == _CUPY else 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", index), stream))
        if framework in (_CUPY, _JAX):
            stack.enter_context(allocating(_cupy_memory if framework == _CUPY else _jax_memory(leader)))
        yield
        if framework == _JAX:
            wait_for_default_stream(index)


class _Borrowed:
    """Lends the arrays of one call to the library as tvm-ffi tensors, and turns its results back into arrays."""

    def __init__(self, leader: Any) -> None:
        self._framework = framework_of(leader)
        self._leader = leader
        self._outputs: list[tuple[tvm_ffi.Tensor, Any]] = []  # what may come back, with the caller's object for it

    def lend(self, value: Any, writable: bool = False, replaced: bool = False) -> Any:
        """Returns an argument with its arrays as tensors. With `replaced`, a copy stands for an immutable array that is
        to be written."""
        if isinstance(value, (tuple, list)):
            return type(value)(self.lend(item, writable, replaced) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _replace(value, lambda item: self.lend(item, writable, replaced))
        framework = framework_of(value)
        if framework in (_NONE, _NATIVE, _TORCH, TRACED):
            return value
        if writable and framework == _JAX:
            if not replaced:
                raise TypeError("JAX arrays are immutable: outputs come back as new arrays, leave the argument away")
            value = value.copy()
        tensor = _lend_array(value, framework, writable)
        if writable:
            self._outputs.append((tensor, value))
        return tensor

    def give_back(self, result: Any) -> Any:
        """Returns a result with its tensors as arrays of the leader's framework, or as the caller's own arrays."""
        if isinstance(result, (tuple, list)):
            return type(result)(self.give_back(item) for item in result)
        if isinstance(result, dict):
            return {name: self.give_back(item) for name, item in result.items()}
        if dataclasses.is_dataclass(result) and not isinstance(result, type):
            return _replace(result, self.give_back)
        if framework_of(result) != _NATIVE:
            return result
        for tensor, value in self._outputs:
            if result.same_as(tensor):
                return value
        return self._as_array(result)

    def _as_array(self, tensor: tvm_ffi.Tensor) -> Any:
        if self._framework == _NUMPY:
            return _to_numpy(tensor)
        if self._framework == _JAX:
            return sys.modules["jax"].numpy.from_dlpack(tensor)
        if self._framework == _CUPY:
            return sys.modules["cupy"].from_dlpack(tensor)
        namespace = getattr(self._leader, "__array_namespace__", None)
        from_dlpack = None if namespace is None else getattr(namespace(), "from_dlpack", None)
        return tensor if from_dlpack is None else from_dlpack(tensor)


def _replace(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a dataclass with its fields changed by `change`, or the same one if no field changed."""
    before = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    after = {name: change(item) for name, item in before.items()}
    changes = {name: item for name, item in after.items() if item is not before[name]}
    return dataclasses.replace(value, **changes) if changes else value


def _lend_array(array: Any, framework: str, writable: bool) -> tvm_ffi.Tensor:
    if framework == _NUMPY:
        return _from_numpy(array, writable)
    if framework == _JAX:
        if isinstance(array, sys.modules["jax"].core.Tracer):
            raise TypeError(
                "expected an array, got a tracer of JAX: libmla computes on arrays in memory (call it outside of jax.jit, "
                "or by jax.pure_callback)"
            )
        if array.is_deleted():
            raise ValueError("expected an array, got one that JAX has deleted")
        if _gpu_index(array) is not None:
            return tvm_ffi.from_dlpack(array.__dlpack__(stream=_DLPACK_DEFAULT_STREAM))
        array.block_until_ready()
    elif framework == _CUPY:
        return tvm_ffi.from_dlpack(array.__dlpack__(stream=_DLPACK_NO_WAITING))  # the call is on CuPy's own stream
    return tvm_ffi.from_dlpack(array)


def _lend_arguments(
    borrowed: _Borrowed, operation: Operation, arguments: dict[str, Any], in_place: tuple[str, ...], call: str
) -> dict[str, Any]:
    """Lends an operation's arguments; those of `in_place` are changed in place. `call` is what errors begin with."""
    outputs = tuple(output.name for output in operation.outputs)
    lent = {}
    for name, value in arguments.items():
        if name in operation.parts and value is not None:
            part = operation.parts[name]
            lent[name] = _lend_arguments(borrowed, part.operation, value, part.written, f"{call}: {name}")
            continue
        try:
            lent[name] = borrowed.lend(value, name in in_place or name in outputs, name in in_place)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{call}: {name}: {error}") from error
    return lent


def run_borrowed(operation: Operation, arguments: dict[str, Any], leader: Any) -> Any:
    """Runs an operation on arrays, of which `leader` is the first."""
    framework = framework_of(leader)
    borrowed = _Borrowed(leader)
    lent = _lend_arguments(borrowed, operation, arguments, operation.written, operation.name)
    with _in_framework(leader, framework):
        result = operation.run((), lent)
    result = borrowed.give_back(result)
    if framework == _JAX and operation.written:
        written = tuple(borrowed.give_back(lent[name]) for name in operation.written if lent.get(name) is not None)
        results = written if result is None else (result, *written)
        return results[0] if len(results) == 1 else results
    return result
