# SPDX-License-Identifier: Apache-2.0
"""Replaces flashinfer.cascade, which merges partial attention states.

lse is in base 2; a state without keys has lse = -inf.

A state that saw no key weighs nothing, whatever its v holds, and merging only such states gives v = 0 and s = -inf.
"""

import torch

import libmla
from libmla._call import calling

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]


@calling({"out": "v_a", "lse": "s_a", "partial_o": "v_b", "partial_lse": "s_b"})
def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state (v [T, H, d], s f32 [T, H]) of two disjoint sets of keys from that of each, in new tensors."""
    v, s = v_a.clone(), s_a.to(torch.float32, copy=True)
    _merge_into(v, s, v_b, s_b)
    return v, s


@calling({"out": "v", "lse": "s", "partial_o": "v_other", "partial_lse": "s_other"})
def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merges (v_other, s_other) into (v [T, H, d], s f32 [T, H]). Tokens whose `mask` [T] is false stay as they are."""
    if s.dtype != torch.float32:
        raise TypeError(f"s: expected float32, since it is written in place, got {s.dtype}")
    if mask is None:
        _merge_into(v, s, v_other, s_other)
        return
    merged_v, merged_s = merge_state(v, s, v_other, s_other)
    mask = mask.to(torch.bool)
    v.copy_(torch.where(mask[:, None, None], merged_v, v))
    s.copy_(torch.where(mask[:, None], merged_s, s))


@calling({"partial_o": "v", "partial_lse": "s"})
def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges states v [T, N, H, d], s f32 [T, N, H] of N disjoint sets of keys into v [T, H, d], s f32 [T, H]."""
    num_tokens, num_states, num_heads, head_dim = v.shape
    if num_states == 0:
        empty = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=v.device)
        return torch.zeros(num_tokens, num_heads, head_dim, dtype=v.dtype, device=v.device), empty
    return libmla.merge_states(v.transpose(0, 1), s.to(torch.float32).transpose(0, 1), lse_base="2")


def _merge_into(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor) -> None:
    libmla.merge_states(v_other[None], s_other.to(torch.float32)[None], lse_base="2", out=v, lse=s, in_place=True)
