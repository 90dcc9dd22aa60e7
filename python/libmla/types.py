# SPDX-License-Identifier: Apache-2.0
"""Defines what the functions of libmla take and return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Tensor: TypeAlias = Any
"""Stands for a tensor of any framework that speaks DLPack: torch, numpy, JAX, CuPy, tvm_ffi."""

DType: TypeAlias = Any
"""Stands for an element type: "bf16", "f16", "f32", "e4m3", or a framework's own (torch.bfloat16,
numpy.dtype("float16"))."""

CacheFormat: TypeAlias = Literal[
    "bf16",
    "f16",
    "fp8",
    "fp8_ds_mla",
    "fp8_dsv4",
    "fp8_dsv41",
    "fp4_dsv41",
    "fp8_nope",
    "nvfp4_ds_mla",
    "nvfp4_ds_mla_416",
    "nvfp4_ds_mla_368",
    "nvfp4_dsv4",
    "mxfp4_dsv4",
]
IndexerFormat: TypeAlias = Literal["fp8", "mxfp4"]
LseBase: TypeAlias = Literal["e", "2"]
Compute: TypeAlias = Literal["default", "fp8", "exact"]
LengthPer: TypeAlias = Literal["token", "request"]


class UnsupportedError(RuntimeError):
    """No backend (or not the forced one) can run the problem; the message says why."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """Describes a paged latent cache: each token has one row ``[ckv | kpe]``, which all heads share.

    ======================  ==========================================================================================
    ``bf16``, ``f16``       ``kv`` [num_pages, page_size, kv_lora_rank + qk_rope_head_dim] of that element type; or
                            ``ckv`` [num_pages, page_size, kv_lora_rank] and ``kpe`` [num_pages, page_size,
                            qk_rope_head_dim], each with strides of its own (no ``kpe`` where there is no rotary part)
    ``fp8``                 the same, of e4m3 (or of uint8 that holds e4m3), with ``ckv_scale``
    ``fp8_ds_mla``,         ``kv`` [num_pages, page_size, row bytes], bytes (DeepSeek V3.2, GLM; GLM-5.3-Flash, which has
    ``fp8_nope``            no rotary channels)
    ``nvfp4_ds_mla``,       the same (V3.2, GLM) of e2m1: 432 bytes, 416 (no padding) or 368 (e4m3 rotary channels);
    ``nvfp4_ds_mla_416``,   ``ckv_scale`` may be the layer's outer scale
    ``nvfp4_ds_mla_368``
    ``mxfp4_dsv4``          the same (V4), of 368 bytes
    ``fp8_dsv4``,           ``kv`` [num_pages, page bytes or more], bytes, and ``page_size`` (DeepSeek V4; the window and
    ``fp8_dsv41``,          the compressed pool of V4.1, whose rows are 512 latent channels, the last 64 of them rotary)
    ``fp4_dsv41``,
    ``nvfp4_dsv4``
    ======================  ==========================================================================================

    :func:`libmla.row_bytes` and :func:`libmla.page_bytes` say how large packed rows and pages are.
    """

    format: CacheFormat
    kv: Tensor | None = None
    ckv: Tensor | None = None
    kpe: Tensor | None = None
    ckv_scale: Tensor | None = None
    """``fp8``: f32 [1], what stored elements are multiplied by; or [num_pages, page_size, 4], one scale for each
    quarter of a token's ckv. ``nvfp4_ds_mla`` of any length: f32 [1], what multiplies all scales of ckv; None: 1."""
    kpe_scale: Tensor | None = None
    """``fp8``: f32 [1]; None: that of ckv, which must then be [1]."""
    page_size: int = 0
    """``fp8_dsv4``, ``fp8_dsv41``, ``fp4_dsv41``, ``nvfp4_dsv4``: tokens of a page; else 0."""
    power_of_two_scales: bool = True
    """``fp8_ds_mla``, ``fp8_nope`` and ``fp8`` with scales of quarters: whether scales are powers of two (V3.2) or any numbers (GLM).
    Writers choose 2^ceil(log2(max(amax, 1e-4) / 448)) or amax / 448, amax being a group's largest magnitude."""


Arguments: TypeAlias = "dict[str, Any]"
"""Stands for the arguments of another operation, by name."""

Cache: TypeAlias = "KvCache | Tensor | tuple[Tensor, Tensor]"
"""Stands for a :class:`KvCache`, or a tensor, or a pair (ckv, kpe), of bf16, f16 or e4m3, whose format is their element
type."""

Rows: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
"""Stands for rows [ckv | kpe] as one tensor, or as the two parts."""
