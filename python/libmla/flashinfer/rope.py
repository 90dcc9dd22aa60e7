# SPDX-License-Identifier: Apache-2.0
"""Replaces flashinfer.rope, which rotates and quantizes the queries and the latent keys of MLA in one pass."""

from typing import Any

import torch

import libmla
from libmla._call import calling
from libmla.flashinfer._common import E4M3, FLOAT8, check_choice, output, row_cache, scale_tensor

__all__ = ["mla_rope_quantize_fp8"]

_Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@calling(
    {
        "q[0]": "q_nope",
        "q[1]": "q_rope",
        "q_scale": "quant_scale_q",
        "q_out": "q_nope_out",
        "ckv": "k_nope",
        "kpe": "k_rope",
        "cos_sin": "cos_sin_cache",
        "positions": "pos_ids",
        "cache.ckv": "k_nope_out",
        "cache.kpe": "k_rope_out",
        "cache.ckv_scale": "quant_scale_kv",
    }
)
def mla_rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> _Four:
    """Rotates q_rope [T, H, rope] and k_rope [T, rope] by the angles of pos_ids [T], multiplies them and q_nope
    [T, H, nope], k_nope [T, nope] by their quantization scale, and rounds to e4m3 (or e5m2).

    cos_sin_cache f32 [max_positions, rope] holds cosines, then sines. `is_neox` pairs channels (i, i + rope / 2), else
    (2i, 2i + 1). Returns (q_rope_out, k_rope_out, q_nope_out, k_nope_out), of the inputs' shapes. Rotation and scaling
    are done in f32 and rounded once; values beyond the largest saturate. quantize_dtype is by default that of the given
    outputs, or e4m3.
    """
    given = [tensor for tensor in (q_rope_out, k_rope_out, q_nope_out, k_nope_out) if tensor is not None]
    dtype = quantize_dtype or (given[0].dtype if given else E4M3)
    check_choice("quantize_dtype", dtype, FLOAT8)
    q_rope_out = output("q_rope_out", q_rope_out, q_rope.shape, dtype, q_rope)
    q_nope_out = output("q_nope_out", q_nope_out, q_nope.shape, dtype, q_nope)
    k_rope_out = output("k_rope_out", k_rope_out, k_rope.shape, dtype, k_rope)
    k_nope_out = output("k_nope_out", k_nope_out, k_nope.shape, dtype, k_nope)
    angles: dict[str, Any] = {
        "cos_sin": cos_sin_cache,
        "positions": pos_ids.to(torch.int64),
        "interleaved": not is_neox,
    }
    if dtype == E4M3:
        both = _joined(q_nope_out, q_rope_out)
        libmla.append_rope(
            k_nope,
            k_rope,
            torch.arange(q_rope.shape[0], dtype=torch.int64, device=q_rope.device),
            row_cache((k_nope_out[:, None], k_rope_out[:, None]), 1.0 / quant_scale_kv),
            q=(q_nope, q_rope),
            q_scale=scale_tensor(1.0 / quant_scale_q, q_rope.device),
            q_out=both,
            **angles,
        )
        if both.data_ptr() != q_nope_out.data_ptr():
            q_nope_out.copy_(both[..., : q_nope.shape[-1]])
            q_rope_out.copy_(both[..., q_nope.shape[-1] :])
    else:
        _rotate_wide(q_nope, q_rope, quant_scale_q, q_nope_out, q_rope_out, angles)
        one_head = (k_nope[:, None], k_rope[:, None], quant_scale_kv, k_nope_out[:, None], k_rope_out[:, None])
        _rotate_wide(*one_head, angles)
    return q_rope_out, k_rope_out, q_nope_out, k_nope_out


def _joined(nope_out: torch.Tensor, rope_out: torch.Tensor) -> torch.Tensor:
    """Returns one tensor [nope | rope]: the outputs themselves where the caller laid them out so, else a new one."""
    nope, rope = nope_out.shape[-1], rope_out.shape[-1]
    shape = (*nope_out.shape[:-1], nope + rope)
    adjacent = (
        nope_out.stride() == rope_out.stride()
        and nope_out.untyped_storage().data_ptr() == rope_out.untyped_storage().data_ptr()
        and rope_out.storage_offset() == nope_out.storage_offset() + nope
        and nope_out.stride(-2) >= nope + rope
    )
    if adjacent:
        return nope_out.as_strided(shape, nope_out.stride(), nope_out.storage_offset())
    return torch.empty(shape, dtype=nope_out.dtype, device=nope_out.device)


def _rotate_wide(
    nope: torch.Tensor,
    rope: torch.Tensor,
    scale: float,
    nope_out: torch.Tensor,
    rope_out: torch.Tensor,
    angles: dict[str, Any],
) -> None:
    """Rotates rows as queries [T, H, width], in f32 first, for output types that the library does not write."""
    width = nope.shape[-1]
    no_cache = torch.empty(1, 1, width + rope.shape[-1], dtype=torch.bfloat16, device=nope.device)
    no_slot = torch.full((nope.shape[0],), -1, dtype=torch.int64, device=nope.device)
    wide = torch.empty(*nope.shape[:-1], no_cache.shape[-1], dtype=torch.float32, device=nope.device)
    libmla.append_rope(nope[:, 0], rope[:, 0], no_slot, no_cache, q=(nope, rope), q_out=wide, **angles)
    limit = torch.finfo(nope_out.dtype).max
    wide.mul_(scale).clamp_(-limit, limit)
    nope_out.copy_(wide[..., :width])
    rope_out.copy_(wide[..., width:])
