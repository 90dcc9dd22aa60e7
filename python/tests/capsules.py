# SPDX-License-Identifier: Apache-2.0
"""Exports host memory that is said to lie on another device."""

from __future__ import annotations

import ctypes
from typing import Any

import tvm_ffi

from libmla._foreign_memory import DLTensor

CPU, CUDA, VULKAN = (1, 0), (2, 0), (7, 0)


def relabelled(exporter: Any, device: tuple[int, int]) -> Any:
    """Returns a DLPack capsule of the array, on that device (type and index, as DLPack has them)."""
    capsule = exporter.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = DLTensor.from_address(pointer(capsule, b"dltensor"))
    tensor.device_type, tensor.device_id = device
    return capsule


def on_device(exporter: Any, device: tuple[int, int]) -> tvm_ffi.Tensor:
    """Returns a tensor over the array's memory that is said to lie on that device."""
    return tvm_ffi.from_dlpack(relabelled(exporter, device))
