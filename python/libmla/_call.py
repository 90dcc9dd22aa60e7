# SPDX-License-Identifier: Apache-2.0
"""How arguments of an operation become those of the library's function, and results its results."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import tvm_ffi  # imports torch if it is there

from .context import Context
from .types import Cache, KvCache, Rows

if TYPE_CHECKING:
    from .plan import Plan

P = ParamSpec("P")
R = TypeVar("R")

NO_CACHE = (None,) * 8

_names: ContextVar[Any] = ContextVar("libmla_names", default=None)

_torch: Any = sys.modules.get("torch")
_gradients: Callable[[], bool] = (lambda: False) if _torch is None else _torch.is_grad_enabled
_TORCH_TENSORS = frozenset() if _torch is None else frozenset((_torch.Tensor, _torch.nn.Parameter))


def _refuse_gradients(name: str, arguments: tuple[Any, ...]) -> None:
    """What flows through these functions would silently lose its gradient."""
    for argument in arguments:
        if type(argument) in _TORCH_TENSORS and argument.requires_grad:
            raise TypeError(
                f"{name}: expected tensors without requires_grad, got one that has it: libmla is for inference only "
                "(call it under torch.no_grad() or torch.inference_mode(), or detach() the tensor)"
            )


def _refuse_without_memory(name: str, arguments: tuple[Any, ...]) -> None:
    """Names the tensors that DLPack cannot hand over."""
    for argument in arguments:
        if type(argument) in _TORCH_TENSORS and (argument.is_meta or argument.layout is not _torch.strided):
            raise TypeError(
                f"{name}: expected strided tensors on the CPU or a CUDA device, got one of layout {argument.layout} on "
                f"device {argument.device}"
            ) from None


def calling(names: dict[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for functions that hand their arguments on to operations: errors call these by the function's names.

    Args:
        names: the function's arguments by those of the operations: ``{"kv_len": "cache_seqlens", "q[0]": "q_nope"}``.
    """
    table = tvm_ffi.convert([text for pair in names.items() for text in pair])

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if _torch is not None and _torch.compiler.is_compiling():
                return function(*args, **kwargs)
            before = _names.set(table)
            try:
                return function(*args, **kwargs)
            finally:
                _names.reset(before)

        return call

    return decorate


def call(
    function: Callable[..., Any], name: str, context: Context | None, plan: Plan | None, arguments: tuple[Any, ...]
) -> Any:
    if _gradients():
        _refuse_gradients(name, arguments)
    try:
        # What is no context or no plan is named by the library.
        return function(_names.get(), getattr(context, "_handle", context), getattr(plan, "_handle", plan), *arguments)
    except RuntimeError:
        _refuse_without_memory(name, arguments)
        raise


def cache_fields(cache: Cache, name: str = "cache") -> tuple[Any, ...]:
    """The fields of the cache that an operation calls `name`; the library finds the format of bare tensors."""
    if type(cache) is KvCache:
        return (
            cache.format,
            cache.kv,
            cache.ckv,
            cache.kpe,
            cache.ckv_scale,
            cache.kpe_scale,
            cache.page_size,
            cache.power_of_two_scales,
        )
    if type(cache) is tuple:
        return ("", None, *parts(cache, name), None, None, 0, True)
    return ("", cache, None, None, None, None, 0, True)


def parts(pair: tuple[Any, ...], name: str) -> tuple[Any, Any]:
    if len(pair) != 2:
        raise TypeError(f"{name}: expected a pair of tensors, the latent and the rotary part, got {len(pair)}")
    return pair[0], pair[1]


def whole_and_parts(rows: Rows, name: str) -> tuple[Any, Any, Any]:
    return (None, *parts(rows, name)) if type(rows) is tuple else (rows, None, None)


def two(made: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Two outputs: the caller's own, or those that the library made."""
    if made is None:
        return first, second
    if first is None and second is None:
        return made[0], made[1]
    return (made, second) if first is None else (first, made)
