# SPDX-License-Identifier: Apache-2.0
"""Holds what transformers calls for attention when a model's attention implementation is "libmla".

A model computes its queries, latents and rotary embeddings itself, with all its peculiarities, hands the latents to its
cache, and calls ``expand_kv`` and then the attention function of its implementation. A patched model's ``expand_kv``
does nothing, so that the function here gets latents, and decides in which form they are attended.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from .latents import Latents
from .layer import LayerAttention, Settings
from .masks import check_causal, padding_mask, real_tokens, selected_rows
from .step import Step

IMPLEMENTATION = "libmla"


def keep_latents(ckv: Any, kpe: Any) -> tuple[Any, Any]:
    """Stands in place of a module's ``expand_kv`` and returns the latents as they are: nothing is expanded."""
    return ckv, kpe


def keep_indices(topk_indices: torch.Tensor, **_: Any) -> torch.Tensor:
    """Stands in place of ``build_attention_mask_from_topk``, where a module has it.

    The indexer's choice is the mask.
    """
    return topk_indices


def settings_of(module: nn.Module) -> Any:
    """Returns how a patched module attends. Raises ValueError if it is not patched."""
    settings = getattr(module, "libmla", None)
    if settings is None:
        raise ValueError(
            f"patch: {type(module).__name__} is of a model that was not patched, but shares its config with one that "
            "was: give each model a config of its own (copy.deepcopy)"
        )
    return settings


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the attention of a patched module.

    Args:
        module: has ``kv_b_proj`` and the widths of heads.
        query: [B, H, S, qk_nope_head_dim + qk_rope_head_dim], rotated.
        key: :class:`Latents` from a LatentCache; or, without a cache, ckv [B, 1, S, kv_lora_rank].
        value: the same; or kpe [B, 1, S, qk_rope_head_dim].
        attention_mask: from :func:`padding_mask` or :func:`keep_indices`.
        scaling: the scale of scores.
        sliding_window: keys that a query sees, its own included.
        softcap: scores become softcap * tanh(score / softcap).
        s_aux: [H] sinks.
        indices: int [B, S, topk] keys that the model's indexer chose, by their places among all tokens.

    Returns:
        [B, S, H, v_head_dim] and None: there are no weights to look at.
    """
    settings: Settings = settings_of(module)
    latents = key if isinstance(key, Latents) else _uncached(query, key, value, settings)
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        indices, attention_mask = attention_mask, None
    step = _step(latents, real_tokens(attention_mask))
    if attention_mask is not None and attention_mask.ndim == 4:
        check_causal(attention_mask, step)
    options = {
        "attn_sink": None if s_aux is None else s_aux.float(),
        "logits_soft_cap": softcap or None,
        "window_left": None if sliding_window is None else sliding_window - 1,
    }
    given = {name: option for name, option in options.items() if option is not None}
    layer = LayerAttention(module, settings, latents, step, scaling, given)
    q = step.pack(query.transpose(1, 2))
    selected = None
    if settings.select_keys is not None:
        selected = layer.selected(settings.select_keys, q)
    elif indices is not None and (attention_mask is None or indices.shape[-1] < latents.end):
        selected = selected_rows(indices, step)
    out = layer.dense(q) if selected is None else layer.sparse(q, selected)
    return step.unpack(out), None


def _uncached(query: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor, settings: Settings) -> Latents:
    """Returns the rows of a forward without a cache."""
    if ckv.shape[2] != query.shape[2]:
        raise ValueError(
            "past_key_values: expected a libmla.integrations.transformers.LatentCache, or none, for a patched model, "
            "got a cache that gives plain tensors"
        )
    for name, needs in (("absorb='always'", settings.absorb == "always"), ("select_keys", settings.select_keys)):
        if needs:
            raise ValueError(
                f"use_cache: expected True for a model that was patched with {name}, got a forward without"
            )
    return Latents(ckv, kpe)


def _step(latents: Latents, valid: torch.Tensor | None) -> Step:
    if latents.cache is not None:
        return latents.cache.step(latents, valid)
    batch, _, tokens, _ = latents.ckv.shape
    no_pages = torch.zeros(batch, 1, dtype=torch.int32, device=latents.ckv.device)
    return Step(0, batch, tokens, [0] * batch, valid, no_pages, 1)


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)
