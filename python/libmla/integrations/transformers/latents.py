# SPDX-License-Identifier: Apache-2.0
"""Holds what a layer of a model sees of the latent cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from .step import Step


class LatentLayer(CacheLayerMixin):
    """Answers what transformers asks a layer: how many tokens it has seen, padding included.

    Rows are in the cache's pages.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self) -> None:
        self.is_initialized = False
        self.length = 0
        self.batch_size = 0

    @property
    def keys(self) -> torch.Tensor:
        """Returns a tensor without data, for models that look at the shape of what transformers' layer would hold."""
        return torch.empty(self.batch_size, 1, self.length, 0, device="meta")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("past_key_values: a LatentCache's layers are written through the cache, not one by one")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= min(-tokens_to_remove, self.length)

    def reset(self) -> None:
        self.length = 0

    def offload(self) -> None: ...

    def prefetch(self) -> None: ...

    def reorder_cache(self, beam_idx: torch.Tensor) -> None: ...


class IndexedLatentLayer(LatentLayer):
    """Stands for a layer with an indexer, and holds its keys [B, tokens, channels] as transformers' own layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.indexer_keys: torch.Tensor | None = None

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        old = [] if self.indexer_keys is None else [self.indexer_keys]
        self.indexer_keys = torch.cat([*old, indexer_key_states], dim=1)
        return self.indexer_keys

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.indexer_keys is not None and tokens_to_remove:
            self.indexer_keys = self.indexer_keys[:, :tokens_to_remove]

    def reset(self) -> None:
        super().reset()
        self.indexer_keys = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys.index_select(0, beam_idx.to(self.indexer_keys.device))


class Store(Protocol):
    """Describes where rows belong, which is a LatentCache."""

    def step(self, latents: Latents, valid: torch.Tensor | None) -> Step:
        """Returns the batch that these rows belong to."""


class Latents:
    """Holds new rows of one layer on their way to the attention.

    The cache's ``update`` gives it in place of tensors.

    Args:
        ckv: [B, 1, S, rank].
        kpe: [B, 1, S, rope], rotated.
        layer: which pool they belong to.
        start: tokens before them, padding included.
        cache: where they belong; None: they are all that there is.
    """

    __slots__ = ("cache", "ckv", "kpe", "layer", "start", "written")

    def __init__(
        self, ckv: torch.Tensor, kpe: torch.Tensor, layer: int = 0, start: int = 0, cache: Store | None = None
    ) -> None:
        self.ckv, self.kpe, self.layer, self.start, self.cache = ckv, kpe, layer, start, cache
        self.written = False

    @property
    def end(self) -> int:
        return self.start + self.ckv.shape[2]

    @property
    def shape(self) -> torch.Size:
        """Returns the shape of the rows of all tokens, for models that ask how many keys there are."""
        return torch.Size((*self.ckv.shape[:2], self.end, self.ckv.shape[3]))
