# SPDX-License-Identifier: Apache-2.0
"""Holds what surrounds a call of the library: the names of arguments for its errors, and the refusal of torch tensors
that it cannot take."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import tvm_ffi  # imports torch if it is there

P = ParamSpec("P")
R = TypeVar("R")

_names: ContextVar[Any] = ContextVar("libmla_names", default=None)
calling_names = _names.get

_torch: Any = sys.modules.get("torch")
gradients: Callable[[], bool] = (lambda: False) if _torch is None else _torch.is_grad_enabled
compiling: Callable[[], bool] = (lambda: False) if _torch is None else _torch.compiler.is_compiling
TORCH_TENSORS = frozenset() if _torch is None else frozenset((_torch.Tensor, _torch.nn.Parameter))


def refuse_gradients(name: str, arguments: tuple[Any, ...]) -> None:
    """Raises TypeError for torch tensors that require a gradient: it would silently be lost."""
    for argument in arguments:
        # Most are None, which is told soonest.
        if argument is not None and type(argument) in TORCH_TENSORS and argument.requires_grad:
            raise TypeError(
                f"{name}: expected tensors without requires_grad, got one that has it: libmla is for inference only "
                "(call it under torch.no_grad() or torch.inference_mode(), or detach() the tensor)"
            )


def refuse_without_memory(name: str, arguments: tuple[Any, ...]) -> None:
    """Raises TypeError for torch tensors that DLPack cannot hand over; the message says their layout and device."""
    for argument in arguments:
        if type(argument) in TORCH_TENSORS and (argument.is_meta or argument.layout is not _torch.strided):
            raise TypeError(
                f"{name}: expected strided tensors on the CPU or a CUDA device, got one of layout {argument.layout} on "
                f"device {argument.device}"
            ) from None


def calling(names: dict[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator for functions that hand their arguments on to operations: errors call the arguments by the
    function's names.

    Args:
        names: the function's arguments by those of the operations: ``{"kv_len": "cache_seqlens", "q[0]": "q_nope"}``.
    """
    table = tvm_ffi.convert([text for pair in names.items() for text in pair])

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if compiling():
                return function(*args, **kwargs)
            before = _names.set(table)
            try:
                return function(*args, **kwargs)
            finally:
                _names.reset(before)

        return call

    return decorate
