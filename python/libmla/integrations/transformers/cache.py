# SPDX-License-Identifier: Apache-2.0
"""Holds the paged latent cache, as one of transformers' caches."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicIndexedLayer, DynamicLayer

from .latents import IndexedLatentLayer, LatentLayer, Latents
from .pages import Pages, check_format
from .step import Step, new_lengths


class LatentCache(Cache):
    """Holds latent rows in pages, for models that :func:`libmla.integrations.transformers.patch` has patched.

    Pages are handed out as requests grow, from pools that all layers number alike. Padding takes no room. Requests own
    pages together after :meth:`fork` (which ``copy.deepcopy`` calls): a page is copied when one of its owners is about
    to write into it.

    Args:
        config: the model's config.
        cache_format: how rows are stored: a name of :class:`libmla.KvCache`.
        page_size: tokens of a page.
        num_pages: pages of each layer's pool; None: it doubles when it is full.
        device: where the rows must be; None: wherever the model's layers are.

    Raises:
        ValueError: the format is unknown, or does not fit the model's rows; later, pages run out.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        cache_format: str = "bf16",
        page_size: int = 64,
        num_pages: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        text = config.get_text_config(decoder=True)
        for layer in getattr(text, "per_layer_config", None) or [text]:
            if getattr(layer, "kv_lora_rank", None) is None:
                raise ValueError(
                    f"config: expected that of a model with latent attention, with a kv_lora_rank, got "
                    f"{type(text).__name__}"
                )
            check_format(cache_format, layer.kv_lora_rank, layer.qk_rope_head_dim)
        for name, value in (("page_size", page_size), ("num_pages", num_pages)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")
        super().__init__(layers=[_layer_in_place_of(layer) for layer in DynamicCache(config=text).layers])
        self._device = None if device is None else torch.device(device)
        self._start(Pages(cache_format, page_size, num_pages), [])

    def _start(self, pages: Pages, tables: list[list[int]]) -> None:
        self.pages = pages
        self._tables = tables
        self._lengths = [0] * len(tables)
        self._length = 0
        self._valid: torch.Tensor | None = None
        self._past: list[int] = []
        self._steps: dict[torch.device, Step] = {}
        self._device_tables: dict[torch.device, torch.Tensor] = {}
        weakref.finalize(self, _release_all, pages, tables)

    @property
    def cache_format(self) -> str:
        return self.pages.cache_format

    @property
    def page_size(self) -> int:
        return self.pages.page_size

    @property
    def lengths(self) -> list[int]:
        """Returns the number of cached tokens of each request, without padding."""
        return list(self._lengths)

    @property
    def block_table(self) -> list[list[int]]:
        """Returns the pages of each request."""
        return [list(table) for table in self._tables]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Counts new rows, ckv [B, 1, S, rank] and kpe [B, 1, S, rope]; the attention writes and reads them."""
        if self._device is not None and key_states.device != self._device:
            raise ValueError(f"device: expected the model's layers on {self._device}, got {key_states.device}")
        while len(self.layers) <= layer_idx:
            self.layers.append(LatentLayer())
        layer = self.layers[layer_idx]
        if not isinstance(layer, LatentLayer):
            raise TypeError(f"past_key_values: layer {layer_idx} of this model is a {type(layer).__name__}, not latent")
        latents = Latents(key_states, value_states, layer_idx, layer.length, self)
        layer.length, layer.batch_size = latents.end, len(key_states)
        return latents, latents

    def step(self, latents: Latents, valid: torch.Tensor | None) -> Step:
        """Returns the batch that these rows belong to.

        A forward's first layer makes it, and takes the pages that it needs.

        Args:
            latents: from :meth:`update`.
            valid: bool [B, tokens]: False where padding is; None: no padding.

        Raises:
            ValueError: the rows do not continue the cache, or there are no pages left.
        """
        batch, _, tokens, _ = latents.ckv.shape
        if latents.start == self._length:
            if self._tables and len(self._tables) != batch:
                raise ValueError(
                    f"past_key_values: expected a batch of {len(self._tables)}, as the cache has, got {batch}: fork() "
                    "it for other requests"
                )
            past = self._lengths or [0] * batch
            valid = self._joined(valid, latents)
            new = new_lengths(valid, latents.start, batch, tokens)
            self._grow([old + more for old, more in zip(past, new, strict=True)])
            self._past, self._length, self._valid, self._steps = past, latents.end, valid, {}
        elif latents.end != self._length:
            raise ValueError(
                f"past_key_values: layer {latents.layer} continues after {latents.start} tokens, but the cache has "
                f"{self._length}: a forward that failed leaves it so; reset() it"
            )
        device = latents.ckv.device
        if device not in self._steps:
            self._steps[device] = Step(
                latents.start, batch, tokens, self._past, self._valid, self._table_on(device), self.page_size
            )
        return self._steps[device]

    def _table_on(self, device: torch.device) -> torch.Tensor:
        """Returns [B, pages] int32: the pages of each request, then zeros."""
        if device not in self._device_tables:
            width = max(1, *map(len, self._tables))
            rows = [table + [0] * (width - len(table)) for table in self._tables]
            self._device_tables[device] = torch.tensor(rows, dtype=torch.int32, device=device)
        return self._device_tables[device]

    def _joined(self, valid: torch.Tensor | None, latents: Latents) -> torch.Tensor | None:
        """Returns which of all tokens are real: what the mask says, if it agrees with what has been cached."""
        if valid is None and self._valid is None:
            return None
        shape = (len(latents.ckv), latents.end)
        valid = torch.ones(shape, dtype=torch.bool, device=latents.ckv.device) if valid is None else valid
        if valid.shape != shape:
            raise ValueError(f"attention_mask: expected shape {list(shape)}, got {list(valid.shape)}")
        seen = valid[:, : latents.start]
        if not (seen.all() if self._valid is None else torch.equal(seen, self._valid.to(seen.device))):
            raise ValueError(
                "attention_mask: expected what it said of the tokens that are in the cache when they were cached: they "
                "cannot be masked, or shown, later"
            )
        return valid

    def _grow(self, lengths: list[int]) -> None:
        """Gives every request the pages that it needs, and makes it the only owner of those that it writes into."""
        tables, size = self._tables or [[] for _ in lengths], self.page_size
        written = [
            (table, old // size)
            for table, old, new in zip(tables, self._lengths, lengths, strict=False)
            if new > old and old % size and self.pages.is_shared(table[old // size])
        ]
        more = [max(-(-length // size) - len(table), 0) for table, length in zip(tables, lengths, strict=True)]
        fresh = self.pages.take(len(written) + sum(more))
        copies = []
        for table, at in written:
            copies.append((table[at], fresh.pop()))
            table[at] = copies[-1][1]
        self.pages.copy(copies)
        self.pages.release(page for page, _ in copies)
        for table, number in zip(tables, more, strict=True):
            table.extend(fresh.pop() for _ in range(number))
        self._lengths = lengths
        if copies or any(more):
            self._replace_tables(tables)

    def _replace_tables(self, tables: list[list[int]]) -> None:
        self._tables[:] = tables
        self._device_tables = {}

    def fork(self, requests: Sequence[int] | None = None) -> LatentCache:
        """Returns a cache that goes on where these requests are; nothing is copied but an indexer's keys.

        Args:
            requests: their numbers; one may occur several times, as for prompts behind one prefix; None: all, in order.
        """
        other = copy.copy(self)
        other.layers = copy.deepcopy(self.layers)
        tables = self.block_table
        for table in tables:
            self.pages.share(table)
        other._start(self.pages, tables)
        other._lengths, other._length, other._valid = self._lengths, self._length, self._valid
        if requests is not None:
            other._select(torch.as_tensor(requests, dtype=torch.long))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> LatentCache:
        return self.fork()

    def _select(self, requests: torch.Tensor) -> None:
        """Puts what was request ``requests[i]`` in the place of request i."""
        chosen = requests.tolist()
        outside = [i for i in chosen if not 0 <= i < len(self._tables)]
        if outside and self._tables:
            raise ValueError(f"requests: expected 0 to {len(self._tables) - 1}, got {outside[0]}")
        super().reorder_cache(requests)
        if not self._tables:
            return
        tables = [list(self._tables[i]) for i in chosen]
        for table in tables:
            self.pages.share(table)
        _release_all(self.pages, self._tables)
        self._replace_tables(tables)
        self._lengths = [self._lengths[i] for i in chosen]
        if self._valid is not None:
            self._valid = self._valid[requests.to(self._valid.device)]
        for layer in self.layers:
            if isinstance(layer, LatentLayer):
                layer.batch_size = len(chosen)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        every = torch.arange(len(self._tables))
        self._select(every[torch.as_tensor(indices).cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(torch.arange(len(self._tables)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens of every request, padding counted, and frees their pages."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: expected 0 or less, the number of tokens to remove as transformers counts it, got "
                f"{tokens_to_remove}"
            )
        super().crop(tokens_to_remove)
        self._length = max(self._length + tokens_to_remove, 0)
        if self._valid is None:
            self._lengths = [self._length] * len(self._tables)
        else:
            self._valid = self._valid[:, : self._length]
            self._lengths = self._valid.sum(1).tolist()
        for table, length in zip(self._tables, self._lengths, strict=True):
            kept = -(-length // self.page_size)
            self.pages.release(table[kept:])
            del table[kept:]

    def reset(self) -> None:
        """Forgets all requests and frees their pages."""
        super().reset()
        _release_all(self.pages, self._tables)
        self._replace_tables([])
        self._lengths, self._length, self._valid = [], 0, None

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Returns how many tokens one request may have; -1: no limit."""
        return -1 if self.pages.limit is None else self.pages.limit * self.page_size

    def __repr__(self) -> str:
        return f"LatentCache({self.cache_format}, page_size={self.page_size}, lengths={self._lengths})"


def _layer_in_place_of(layer: Any) -> Any:
    """Returns a latent layer in the place of one that would hold keys and values.

    Other layers, such as recurrent states, stay as they are.
    """
    if isinstance(layer, DynamicIndexedLayer):
        return IndexedLatentLayer()
    return LatentLayer() if isinstance(layer, DynamicLayer) else layer


def _release_all(pages: Pages, tables: list[list[int]]) -> None:
    for table in tables:
        pages.release(table)
