# SPDX-License-Identifier: Apache-2.0
"""Holds what transformers calls for attention in a patched model of DeepSeek V4's kind.

Such a layer attends to the last rows, the window, and to rows of which each stands for several tokens, the compressed
pool, under one softmax. The model keeps both in its own cache, and hands them to the attention one behind the other.
Here they are written into pages of two libmla caches, each in its format, and attended by ``decode_sparse``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

import libmla
from libmla.types import Cache, Compute

from .attention import settings_of
from .pages import Pool, check_compute, check_format

IMPLEMENTATION = "libmla_compressed"

_ROTARY_APART = ("fp8_dsv4", "nvfp4_dsv4", "mxfp4_dsv4")
"""These keep rotary channels apart from the others, and are values together with them."""


@dataclass
class CompressedSettings:
    """Says how the layers attend; :func:`libmla.integrations.transformers.patch` says what each means."""

    cache_format: str
    pool_format: str
    page_size: int
    context: libmla.Context | None
    compute: Compute
    compressed_rows: int = 0
    """How many rows the compressor that ran last gave: its layer's attention is next."""

    def check(self, module: nn.Module) -> None:
        """Raises ValueError unless the module's rows fit both formats, and these fit each other and ``compute``."""
        rope = module.config.qk_rope_head_dim
        for name, kind in (("cache_format", self.cache_format), ("pool_format", self.pool_format)):
            check_format(kind, module.head_dim - rope, rope, name)
            check_compute(self.compute, kind)
        if (self.cache_format in _ROTARY_APART) != (self.pool_format in _ROTARY_APART):
            raise ValueError(
                f"pool_format: expected one of {', '.join(_ROTARY_APART)} beside one of these, and another beside "
                f"others, got {self.pool_format} beside {self.cache_format}"
            )


def compressed_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the modules that attend to a window and a compressed pool, of models that have such layers."""
    return [one for one in model.modules() if hasattr(one, "compressor") and hasattr(one, "sinks")]


def attach(modules: list[nn.Module], settings: CompressedSettings) -> list[RemovableHandle]:
    """Gives the modules their settings, and returns the hooks that tell these how many compressed rows there are."""
    for module in modules:
        module.libmla = settings
    compressors = (module.compressor for module in modules if module.compressor is not None)
    return [compressor.register_forward_hook(_Counter(settings)) for compressor in compressors]


@dataclass(frozen=True)
class _Counter:
    """Stands behind a compressor, and counts the rows that it gives."""

    settings: CompressedSettings

    def __call__(self, compressor: nn.Module, given: Any, made: Any) -> None:
        self.settings.compressed_rows = made[0].shape[2]


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float,
    s_aux: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the attention of a patched module.

    Args:
        module: has settings, and the widths of rows.
        query: [B, H, S, head_dim], rotated.
        key: [B, 1, W + P, head_dim]: W rows of the window, P of the compressed pool.
        value: the same.
        attention_mask: [B, 1, S, W + P], 0 where a query sees a row: the model's mask, and what the compressor adds.
        scaling: the scale of scores.
        s_aux: [H] sinks.

    Returns:
        [B, S, H, head_dim] and None: there are no weights to look at.
    """
    settings: CompressedSettings = settings_of(module)
    pooled = settings.compressed_rows if module.compressor is not None else 0
    window = key.shape[2] - pooled
    seen = attention_mask[:, 0, :, : key.shape[2]] == 0
    parts = [(settings.cache_format, key[:, 0, :window], seen[..., :window])]
    if pooled:
        parts.append((settings.pool_format, key[:, 0, window:], seen[..., window:]))
    (cache, indices), *others = (_stored(module, *part) for part in parts)
    second = {"extra_cache": others[0][0], "extra_indices": others[0][1]} if others else {}
    out = libmla.decode_sparse(
        query.transpose(1, 2).flatten(0, 1),
        cache,
        indices,
        sm_scale=scaling,
        attn_sink=s_aux.float(),
        d_v=module.head_dim,
        compute=settings.compute,
        context=settings.context,
        **second,
    )
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def _stored(module: nn.Module, cache_format: str, rows: torch.Tensor, seen: torch.Tensor) -> tuple[Cache, torch.Tensor]:
    """Writes rows [B, N, head_dim] into pages, and returns these with the slots of the rows that queries see.

    ``seen`` is bool [B, S, N]; the slots are int32 [B * S, the most that one sees], -1 behind them.
    """
    settings, rope = module.libmla, module.config.qk_rope_head_dim
    batch, number, width = rows.shape
    pool = Pool(cache_format, settings.page_size, width - rope, rope, rows.device)
    pool.reserve(-(-batch * number // settings.page_size))
    slots = torch.arange(batch * number, device=rows.device)
    libmla.append(rows.reshape(-1, width), slots, pool.cache, context=settings.context)
    query, slot = seen.flatten(0, 1).nonzero(as_tuple=True)
    counts = seen.sum(-1).flatten()
    places = torch.arange(len(query), device=rows.device) - (counts.cumsum(0) - counts)[query]
    listed = torch.full((len(counts), int(counts.max())), -1, dtype=torch.int32, device=rows.device)
    listed[query, places] = (slot + query // seen.shape[1] * number).int()
    return pool.cache, listed


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)
