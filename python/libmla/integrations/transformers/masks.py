# SPDX-License-Identifier: Apache-2.0
"""Finds which tokens are real, and which keys a query sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .step import Step


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> torch.Tensor | None:
    """Returns the mask of a forward, which transformers asks for.

    Returns:
        bool [B, kv_length], False where padding is; None where there is none. If the model wants the whole mask (for
        its indexer), or it is more than causal: bool [B, 1, q_length, kv_length].
    """
    if allow_is_causal_skip:
        return None if attention_mask is None or attention_mask.all() else attention_mask
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        **options,
    )


def real_tokens(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Returns bool [B, tokens], False where padding is, from a mask of :func:`padding_mask`; None: all are real."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise ValueError(
            f"attention_mask: expected one that says where padding is, [B, tokens], or a causal one of bool, "
            f"[B, 1, S, tokens], got {mask.dtype} {list(mask.shape)}"
        )
    real = mask[:, 0, -1] if mask.ndim == 4 else mask
    return None if real.all() else real


def check_causal(mask: torch.Tensor, step: Step) -> None:
    """Raises ValueError unless a whole mask is causal but for padding. Looks at each mask once."""
    if step.causal_mask is mask:
        return
    at = torch.arange(mask.shape[-1], device=mask.device)
    expected = at <= at[step.start :, None]
    if step.valid is not None:
        expected = torch.where(step.valid[:, step.start :, None], expected & step.valid[:, None], mask[:, 0])
    if not torch.equal(mask[:, 0], expected.expand_as(mask[:, 0])):
        raise ValueError(
            "attention_mask: expected a causal mask with padding, got another pattern (packed sequences, blocks, or a "
            "prefix that is seen from both sides), which the kernels do not take: unpatch the model for that"
        )
    step.causal_mask = mask


def selected_rows(indices: torch.Tensor, step: Step) -> torch.Tensor:
    """Returns what an indexer chose, as cached rows.

    Args:
        indices: int [B, S, topk], keys by their places among all tokens, padding included; negative: none.
        step: the batch.

    Returns:
        int32 [T, topk], rows of the request; -1: none, or not seen.
    """
    own = torch.arange(step.start, step.start + step.tokens, device=indices.device)
    seen = (indices >= 0) & (indices <= own[:, None])
    if step.valid is not None:
        places = indices.clamp(min=0).long().flatten(1)
        seen &= step.valid.gather(1, places).view_as(seen)
        indices = (step.valid.cumsum(1) - 1).gather(1, places).view_as(indices)
    return step.pack(torch.where(seen, indices, -1).int())
