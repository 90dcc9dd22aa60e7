# SPDX-License-Identifier: Apache-2.0
"""Holds what the modules of this package share: checks, scales, cache views, and the two scales of a decode call."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

import libmla
from libmla.types import CacheFormat

LOG2E = math.log2(math.e)
E4M3 = torch.float8_e4m3fn
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_ROW_FORMATS: dict[torch.dtype, CacheFormat] = {torch.bfloat16: "bf16", torch.float16: "f16", E4M3: "fp8"}

Sinks = torch.Tensor | Sequence[torch.Tensor] | None
Scale = float | torch.Tensor

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]
"""Rows [ckv | kpe] as one tensor, or as the two parts (kpe None where it has no channels)."""


def refuse(reason: str) -> NoReturn:
    """Raises libmla.UnsupportedError: the peer has this, libmla does not."""
    raise libmla.UnsupportedError(reason)


def refuse_given(function: str, **arguments: tuple[object, str]) -> None:
    """Refuses every argument whose value is given (neither None nor False), each with its reason."""
    for name, (value, reason) in arguments.items():
        if value is not None and value is not False:
            refuse(f"{function}: {name} is not supported: {reason}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_buffer(name: str, buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> None:
    """Raises ValueError unless a caller's output has this shape and dtype and lies where `like` does."""
    if tuple(buffer.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(buffer.shape)}")
    if buffer.dtype != dtype:
        raise ValueError(f"{name}: expected dtype {dtype}, got {buffer.dtype}")
    if buffer.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, got one on {buffer.device}")


def output(
    name: str, buffer: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor
) -> torch.Tensor:
    """Returns the caller's buffer, checked, or a new tensor on the device of `like`."""
    if buffer is None:
        return torch.empty(tuple(shape), dtype=dtype, device=like.device)
    check_buffer(name, buffer, shape, dtype, like)
    return buffer


def rows_view(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns `tensor` in another shape, without a copy: results written to the view arrive in it."""
    try:
        return tensor.view(tuple(shape))
    except RuntimeError:
        raise ValueError(
            f"{name}: expected strides that let {tuple(tensor.shape)} be seen as {tuple(shape)}, got {tensor.stride()}"
        ) from None


@functools.lru_cache(maxsize=256)
def _cached_scale(value: float, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=torch.float32, device=device)


def scale_tensor(value: Scale, device: torch.device) -> torch.Tensor:
    """Returns a scale as f32 [1] on the device. Numbers are kept: the tensor of a number is made once."""
    if isinstance(value, torch.Tensor):
        return value.reshape(1).to(torch.float32)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Made in a graph, it holds its value only after a replay: not one to keep.
        return torch.full((1,), float(value), dtype=torch.float32, device=device)
    return _cached_scale(float(value), device)


def lse_base(base2: bool) -> str:
    return "2" if base2 else "e"


def int32(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor`; raises TypeError unless it is int32.

    Lengths, offsets, page numbers and slots are int32 everywhere in libmla.
    """
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}: expected int32, got {str(tensor.dtype).removeprefix('torch.')}")
    return tensor


def attn_sink(sinks: Sinks) -> torch.Tensor | None:
    """Returns the sinks as f32 [H]: the peer takes a tensor, or a list of one."""
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor):
        if len(sinks) != 1:
            raise ValueError(f"sinks: expected a tensor or a list of one, got a list of {len(sinks)}")
        sinks = sinks[0]
    return sinks.to(torch.float32)


def add_sink(lse: torch.Tensor, sink: torch.Tensor, base2: bool) -> None:
    """Counts the sink in lse [T, H], in place, as the peer's packed sparse kernels do. libmla's lse excludes it."""
    if base2:
        torch.logaddexp2(lse, sink * LOG2E, out=lse)
    else:
        torch.logaddexp(lse, sink.expand_as(lse), out=lse)


def one_head(name: str, cache: torch.Tensor, kv_layout: str = "HND") -> torch.Tensor:
    """Returns [pages, page_size, width] of a cache of one KV head, which is given so, or 4-D in layout HND or NHD."""
    if cache.ndim == 3:
        return cache
    if cache.ndim != 4:
        raise ValueError(f"{name}: expected 3 or 4 dimensions, got {cache.ndim}")
    check_choice("kv_layout", kv_layout, ("HND", "NHD"))
    head = 1 if kv_layout == "HND" else 2
    if cache.shape[head] != 1:
        raise ValueError(f"{name}: expected one KV head in dimension {head} ({kv_layout}), got {cache.shape[head]}")
    return cache.squeeze(head)


def first_of(rows: Rows) -> torch.Tensor:
    """Returns the tensor, or the latent part of a pair."""
    return rows if isinstance(rows, torch.Tensor) else rows[0]


def row_cache(rows: Rows, scale: Scale = 1.0, kpe_scale: Scale | None = None) -> libmla.KvCache:
    """Returns a cache of bf16, f16 or e4m3 rows: one tensor [pages, page_size, width], or ckv and kpe apart.

    `scale` is that of e4m3 rows: a number, f32 [1], or f32 [pages, page_size, 4] for the quarters of ckv.
    """
    kv, ckv, kpe = (rows, None, None) if isinstance(rows, torch.Tensor) else (None, *rows)
    first = first_of(rows)
    if first.dtype not in _ROW_FORMATS:
        refuse(f"a cache of {first.dtype} rows is not supported: libmla reads bfloat16, float16 and float8_e4m3fn")
    if first.dtype != E4M3:
        return libmla.KvCache(_ROW_FORMATS[first.dtype], kv=kv, ckv=ckv, kpe=kpe)
    of_quarters = isinstance(scale, torch.Tensor) and scale.ndim == 3
    return libmla.KvCache(
        "fp8",
        kv=kv,
        ckv=ckv,
        kpe=kpe,
        ckv_scale=scale if of_quarters else scale_tensor(scale, first.device),
        kpe_scale=None if kpe_scale is None else scale_tensor(kpe_scale, first.device),
    )


def request_of_query(cum_seq_lens_q: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Returns [T] int64: the request of every query token; that of tokens past the last request is the last one."""
    token = torch.arange(num_tokens, device=cum_seq_lens_q.device, dtype=cum_seq_lens_q.dtype)
    request = torch.searchsorted(cum_seq_lens_q[1:].contiguous(), token, right=True)
    return request.clamp_(max=cum_seq_lens_q.numel() - 2)


def visible_keys(
    seq_lens: torch.Tensor, num_tokens: int, q_len: int, cum_seq_lens_q: torch.Tensor | None
) -> torch.Tensor:
    """Returns [T] int32: how many keys of its request each query sees (causal, the last query sees them all).

    A request has q_len queries, or those that cum_seq_lens_q gives it.
    """
    token = torch.arange(num_tokens, device=seq_lens.device, dtype=torch.int32)
    if cum_seq_lens_q is None:
        return int32("seq_lens", seq_lens).repeat_interleave(q_len)[:num_tokens] - (q_len - 1) + token % q_len
    request = request_of_query(cum_seq_lens_q, num_tokens)
    first_of_next = int32("cum_seq_lens_q", cum_seq_lens_q)[request + 1]
    return int32("seq_lens", seq_lens)[request] - first_of_next + 1 + token


def attend_scaled(
    attend: Callable[..., Any],
    q: Rows,
    *,
    out: torch.Tensor,
    bmm1_scale: Scale,
    bmm2_scale: Scale,
    o_scale: Scale | None = None,
    **arguments: Any,
) -> None:
    """Calls `attend` with scores multiplied by bmm1_scale; its output, times bmm2_scale / o_scale, goes into `out`.

    A bmm1_scale tensor stays on the device with e4m3 queries; with others its value is read, which waits for the GPU.
    """
    first = first_of(q)
    quantized = first.dtype == E4M3
    on_device = quantized and isinstance(bmm1_scale, torch.Tensor)
    arguments["q_scale"] = scale_tensor(bmm1_scale if on_device else 1.0, first.device) if quantized else None
    arguments["sm_scale"] = 1.0 if on_device else float(bmm1_scale)
    divisor = (1.0 if o_scale is None else o_scale) / bmm2_scale
    if out.dtype == E4M3:
        attend(q, out=out, o_scale=scale_tensor(divisor, out.device), **arguments)
        return
    native = out.dtype in (torch.float32, torch.bfloat16 if quantized else first.dtype)
    if native and not isinstance(divisor, torch.Tensor) and divisor == 1.0:
        attend(q, out=out, **arguments)
        return
    wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    attend(q, out=wide, **arguments)
    wide.div_(divisor)
    if out.dtype in FLOAT8:
        limit = torch.finfo(out.dtype).max
        wide.clamp_(-limit, limit)
    out.copy_(wide)
