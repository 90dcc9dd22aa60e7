# SPDX-License-Identifier: Apache-2.0
"""Describes one forward's batch as the kernels see it: ragged, without padding.

It is made once, and every layer uses it.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import torch

import libmla


class Step:
    """Describes B requests with S new tokens each, padding among them, after ``start`` tokens; T new tokens are real.

    Args:
        start: tokens of each request before, padding included.
        batch: B.
        tokens: S.
        past: cached tokens of each request before.
        valid: bool [B, start + S]: False where padding is; None: no padding.
        block_table: [B, pages] int32, on the device where the batch is.
        page_size: tokens of a page.
    """

    causal_mask: torch.Tensor | None = None
    """The mask that has been found to be causal."""

    def __init__(
        self,
        start: int,
        batch: int,
        tokens: int,
        past: list[int],
        valid: torch.Tensor | None,
        block_table: torch.Tensor,
        page_size: int,
    ) -> None:
        self.start, self.batch, self.tokens, self.past = start, batch, tokens, past
        self.block_table, self.page_size, self.device = block_table, page_size, block_table.device
        self.valid = None if valid is None else valid.to(self.device)
        self.q_lengths = new_lengths(valid, start, batch, tokens)
        self.plans: dict[object, libmla.Plan] = {}

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    @cached_property
    def kv_len(self) -> torch.Tensor:
        """Returns [B] int32: the cached tokens of each request, the new ones included."""
        return self._ints([old + new for old, new in zip(self.past, self.q_lengths, strict=True)])

    @cached_property
    def qo_indptr(self) -> torch.Tensor:
        """Returns [B+1] int32: the first new token of each request."""
        return self._ints([0, *accumulate(self.q_lengths)])

    @cached_property
    def request(self) -> torch.Tensor:
        """Returns [T]: the request of each new token."""
        lengths = torch.tensor(self.q_lengths, device=self.device)
        return torch.arange(self.batch, device=self.device).repeat_interleave(lengths, output_size=sum(self.q_lengths))

    @cached_property
    def positions(self) -> torch.Tensor:
        """Returns [T]: where each new token is among the tokens of its request."""
        before = accumulate([0, *self.q_lengths[:-1]])
        first = torch.tensor([old - new for old, new in zip(self.past, before, strict=True)], device=self.device)
        return first[self.request] + torch.arange(sum(self.q_lengths), device=self.device)

    @cached_property
    def slots(self) -> torch.Tensor:
        """Returns [T] int64: the slot where each new token's row goes."""
        pages = self.block_table[self.request, self.positions // self.page_size]
        return pages.long() * self.page_size + self.positions % self.page_size

    def slice_of_past(self, start: int, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Describes up to ``number`` cached tokens of each request, from ``start`` on.

        Returns:
            How many there are, [B+1] int32 the first row of each request, and [B] int32 its first token.
        """
        lengths = [min(max(old - start, 0), number) for old in self.past]
        return sum(lengths), self._ints([0, *accumulate(lengths)]), self._ints([min(start, old) for old in self.past])

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """Turns [B, S, ...] into [T, ...]."""
        return padded.flatten(0, 1) if self.valid is None else padded[self.valid[:, self.start :]]

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Turns [T, ...] into [B, S, ...], with zeros where padding is."""
        if self.valid is None:
            return packed.unflatten(0, (self.batch, self.tokens))
        padded = packed.new_zeros(self.batch, self.tokens, *packed.shape[1:])
        padded[self.valid[:, self.start :]] = packed
        return padded


def new_lengths(valid: torch.Tensor | None, start: int, batch: int, tokens: int) -> list[int]:
    """Returns how many of each request's new tokens are real."""
    return [tokens] * batch if valid is None else valid[:, start:].sum(1).tolist()
