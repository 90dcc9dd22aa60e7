# SPDX-License-Identifier: Apache-2.0
"""Tests tensors in the memory of a real GPU without a framework that computes there, by the driver alone and ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import libmla

try:
    DRIVER: Any = ctypes.CDLL("libcuda.so.1")
except OSError:
    DRIVER = None
pytestmark = pytest.mark.skipif(DRIVER is None or not libmla.info().gpus, reason="needs a GPU")

CUDA = 2  # DLPack's number of the device
TYPE_CODES = {"i": 0, "u": 1, "f": 2}
SM_SCALE = 192**-0.5


def driver(name: str, *arguments: Any) -> None:
    status = getattr(DRIVER, name)(*arguments)
    assert status == 0, f"{name}: {status}"


class _Exported(ctypes.Structure):
    """Lays out DLManagedTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class OnGpu:
    """Holds a copy of a numpy array in the memory of GPU 0. It is never freed, as tensors over it may live for long."""

    def __init__(self, array: np.ndarray) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self.like = array = np.ascontiguousarray(array)
        self.address = ctypes.c_uint64()
        driver("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(max(array.nbytes, 1)))
        driver("cuMemcpyHtoD_v2", self.address, array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes))
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._exported = _Exported(
            data=self.address.value,
            device_type=CUDA,
            ndim=array.ndim,
            type_code=TYPE_CODES[array.dtype.kind],
            type_bits=8 * array.itemsize,
            type_lanes=1,
            shape=self._shape,
        )
        self.tensor = tvm_ffi.from_dlpack(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **_: object) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._exported), b"dltensor", None)

    def back(self) -> np.ndarray:
        array = np.empty_like(self.like)
        driver("cuMemcpyDtoH_v2", array.ctypes.data_as(ctypes.c_void_p), self.address, ctypes.c_size_t(array.nbytes))
        return array


@pytest.fixture
def stream() -> Iterator[int]:
    """Makes a stream of our own on GPU 0, which libmla is told to use."""
    driver("cuInit", 0)
    context, handle = ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    driver("cuCtxSetCurrent", context)
    driver("cuStreamCreate", ctypes.byref(handle), 1)
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), handle.value):
        yield handle.value or 0
    driver("cuStreamDestroy_v2", handle)


def numbers() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        "q": random.standard_normal((3, 16, 576)).astype(np.float16),
        "cache": random.standard_normal((40, 64, 576)).astype(np.float16),
        "kv_len": np.array([900, 0, 70], np.int32),
        "block_table": random.permutation(40)[:39].reshape(3, 13).repeat(2, 1)[:, :16].astype(np.int32),
    }


def test_decode_with_a_plan(stream: int) -> None:
    given = numbers()
    wanted, wanted_lse = libmla.decode(**given, sm_scale=SM_SCALE, return_lse=True)
    here = {name: OnGpu(array) for name, array in given.items()}
    named = {name: array.tensor for name, array in here.items()}
    out, lse = OnGpu(np.zeros_like(wanted)), OnGpu(np.zeros_like(wanted_lse))
    workspace = OnGpu(np.zeros(1 << 26, np.uint8))
    plan = libmla.Plan.decode(**named, sm_scale=1.0, workspace=workspace.tensor)
    assert plan.backend.startswith("cuda")
    libmla.decode(**named, sm_scale=SM_SCALE, out=out.tensor, lse=lse.tensor, plan=plan)
    driver("cuStreamSynchronize", ctypes.c_void_p(stream))
    np.testing.assert_allclose(out.back().astype(np.float32), wanted.astype(np.float32), atol=4e-3, rtol=4e-3)
    np.testing.assert_allclose(lse.back(), wanted_lse, atol=2e-3, rtol=2e-3)


def test_the_given_stream_is_used(stream: int) -> None:
    """What is recorded into a graph was put into the stream that captures, and is computed by each launch."""
    row = np.arange(576, dtype=np.float32)[None]
    rows, slots = OnGpu(row), OnGpu(np.array([5], np.int64))
    cache = OnGpu(np.zeros((2, 4, 576), np.float16))
    driver("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 1)
    libmla.append(rows.tensor, slots.tensor, cache.tensor)
    graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
    assert (cache.back() == 0).all()
    driver("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))
    driver("cuGraphLaunch", ready, ctypes.c_void_p(stream))
    driver("cuStreamSynchronize", ctypes.c_void_p(stream))
    assert (cache.back()[1, 1] == row[0].astype(np.float16)).all()


def test_memory_that_nobody_lends(stream: int) -> None:
    here = {name: OnGpu(array).tensor for name, array in numbers().items()}
    with pytest.raises(ValueError, match="out: expected a tensor, since the framework"):
        libmla.decode(**here, sm_scale=SM_SCALE)
    out = OnGpu(np.zeros((3, 16, 512), np.float16))
    with pytest.raises(ValueError, match="workspace: expected a tensor, since the framework"):
        libmla.decode(**here, sm_scale=SM_SCALE, out=out.tensor)
    with pytest.raises(ValueError, match="workspace: expected memory where the other tensors are"):
        libmla.Plan.decode(**here, sm_scale=SM_SCALE, workspace=np.zeros(1 << 20, np.uint8))
    with pytest.raises(ValueError, match="kv_len: expected .*cuda:0"):
        libmla.decode(**{**here, "kv_len": np.array([9, 9, 9], np.int32)}, sm_scale=SM_SCALE, out=out.tensor)
