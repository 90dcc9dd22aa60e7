# SPDX-License-Identifier: Apache-2.0
"""Provides what calls on GPU arrays need where the framework offers tvm-ffi neither an allocator nor a stream."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import tvm_ffi


class DLTensor(ctypes.Structure):
    """Mirrors DLTensor of dlpack.h, with which a DLManagedTensor begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    """Mirrors DLManagedTensorVersioned of dlpack.h, version 1."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


_SetError = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
_Allocator = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(DLTensor), ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, _SetError
)
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# What the library still holds: each structure by its address, with the array whose memory it describes.
_held: dict[int, tuple[Any, ...]] = {}


@_Deleter
def _release(address: int, held: dict[int, tuple[Any, ...]] = _held) -> None:
    # Bound to its argument: an interpreter that ends takes the module's names away before the last outputs go.
    held.pop(address, None)


def _describe(array: Any, prototype: DLTensor, data: int) -> int:
    """Returns the address of a managed tensor over `data`, which belongs to `array`."""
    shape = (ctypes.c_int64 * prototype.ndim)(*prototype.shape[: prototype.ndim])
    strides = (ctypes.c_int64 * prototype.ndim)()
    step = 1
    for i in reversed(range(prototype.ndim)):
        strides[i] = step
        step *= shape[i]
    managed = _ManagedTensor(major=1, deleter=ctypes.cast(_release, ctypes.c_void_p).value, tensor=prototype)
    managed.tensor.data = data
    managed.tensor.byte_offset = 0
    managed.tensor.shape = shape
    managed.tensor.strides = strides
    address = ctypes.addressof(managed)
    _held[address] = (managed, shape, strides, array)
    return address


def _allocator(make: Callable[[int, int], tuple[Any, int]]) -> Any:
    @_Allocator
    def allocate(prototype: Any, out: Any, error: int, set_error: Callable[[int, bytes, bytes], None]) -> int:
        try:
            wanted = prototype.contents
            bytes_wanted = wanted.type_bits // 8
            for extent in wanted.shape[: wanted.ndim]:
                bytes_wanted *= extent
            array, data = make(bytes_wanted, wanted.device_id)
            out[0] = _describe(array, wanted, data)
        except Exception as problem:  # noqa: BLE001 (the caller is C: nothing may pass it)
            set_error(error, b"RuntimeError", str(problem).encode())
            return -1
        return 0

    return allocate


@contextlib.contextmanager
def allocating(make: Callable[[int, int], tuple[Any, int]]) -> Iterator[None]:
    """Makes this thread's calls take memory, within the context, from `make(bytes, device index)`, which returns an
    array and its address."""
    allocator = _allocator(make)
    before = ctypes.c_void_p()
    set_allocator = tvm_ffi.LIB.TVMFFIEnvSetDLPackManagedTensorAllocator
    set_allocator(allocator, 0, ctypes.byref(before))
    try:
        yield
    finally:
        set_allocator(before, 0, None)


def wait_for_default_stream(index: int) -> None:
    """Waits until GPU `index` has done what stands in its default stream."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()

    def check(error: int) -> None:
        if error != 0:
            raise RuntimeError(f"the CUDA driver reports error {error} for GPU {index}")

    check(driver.cuInit(0))
    check(driver.cuDeviceGet(ctypes.byref(device), index))
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    try:
        check(driver.cuCtxPushCurrent_v2(context))
        error = driver.cuStreamSynchronize(None)
        check(driver.cuCtxPopCurrent_v2(ctypes.byref(context)))
        check(error)
    finally:
        check(driver.cuDevicePrimaryCtxRelease_v2(device))
