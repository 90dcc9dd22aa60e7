# SPDX-License-Identifier: Apache-2.0
"""Replaces flashinfer.concat_ops, which builds the keys of up-projected prefill."""

import torch

from libmla.flashinfer._common import check_choice

__all__ = ["concat_mla_k"]


def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, *, backend: str = "default") -> None:
    """Writes [k_nope | k_rope] to k [T, H, nope + rope]: k_nope [T, H, nope], and k_rope [T, 1, rope] for all heads.

    It takes any number of heads, any widths, and any dtype that the three share; strides are free.
    """
    check_choice("backend", backend, ("default", "cake"))
    nope = k_nope.shape[-1]
    if k.shape != (*k_nope.shape[:-1], nope + k_rope.shape[-1]):
        raise ValueError(
            f"k: expected shape {(*k_nope.shape[:-1], nope + k_rope.shape[-1])}, as k_nope and k_rope say, "
            f"got {tuple(k.shape)}"
        )
    for name, part in (("k_nope", k_nope), ("k_rope", k_rope)):
        if part.dtype != k.dtype:
            raise TypeError(f"{name}: expected {k.dtype}, as k has, got {part.dtype}")
    k[..., :nope].copy_(k_nope)
    k[..., nope:].copy_(k_rope)
