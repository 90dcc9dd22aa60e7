# SPDX-License-Identifier: Apache-2.0
"""Measures how well a model predicts a text: windows of tokens, a score for every token, and what scores add up to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """Holds text as a model reads it."""

    windows: tuple[torch.Tensor, ...]  #: int64 [length]; the first token of each is given, the others are predicted
    bytes_per_token: float  #: of the whole text, without counting BOS

    @property
    def predicted(self) -> int:
        """Returns the number of tokens that are predicted."""
        return sum(len(window) - 1 for window in self.windows)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of text that these tokens stand for: exact where a token is a byte, else in proportion."""
        return round(self.predicted * self.bytes_per_token)

    def head(self, num_bytes: int) -> Sample:
        """Returns the first `num_bytes` bytes of the sample, cut within a window, but at least one token."""
        left = max(1, int(num_bytes / self.bytes_per_token))
        kept = []
        for window in self.windows:
            if left > 0:
                kept.append(window[: left + 1])
                left -= len(window) - 1
        return Sample(tuple(kept), self.bytes_per_token)


def sample(texts: Iterable[str], tokenizer: Any, context: int, num_bytes: int) -> Sample:
    """Returns windows of up to `context` tokens from texts, `num_bytes` bytes in all or what there is.

    The first window of every text comes first, then the second of every text, and so on. A window begins with the
    tokenizer's first token (BOS), if it has one, else with its text's last token before it.
    """
    start = tokenizer("")["input_ids"][:1]
    step = context - 1
    windows_of_texts: list[list[list[int]]] = []
    tokens = tokens_of_first_windows = text_bytes = 0
    for text in texts:
        ids = tokenizer(text)["input_ids"][len(start) :]
        cuts = range(0, len(ids), step)
        windows_of_texts.append([(start or ids[max(at - 1, 0) : at]) + ids[at : at + step] for at in cuts])
        tokens += len(ids)
        tokens_of_first_windows += min(len(ids), step)
        text_bytes += len(text.encode())
        if tokens_of_first_windows * text_bytes >= num_bytes * tokens:
            break
    rounds = zip_longest(*windows_of_texts)
    windows = [torch.tensor(ids) for turn in rounds for ids in turn if ids is not None and len(ids) > 1]
    if not windows:
        raise ValueError("--text: expected at least two tokens of text")
    return Sample(tuple(windows), text_bytes / tokens).head(num_bytes)


@dataclass(frozen=True)
class Scores:
    """Holds what a model said of a sample; one tensor for each window, one value for each predicted token, on the
    CPU."""

    bits: tuple[torch.Tensor, ...]  #: f64, -log2 of the probability of the token that came
    greedy: tuple[torch.Tensor, ...]  #: the likeliest token

    def head_of(self, sample: Sample) -> Scores:
        """Returns the scores of a sample that is the first part of this one's."""
        lengths = [len(window) - 1 for window in sample.windows]
        return Scores(
            tuple(one[:length] for one, length in zip(self.bits, lengths, strict=False)),
            tuple(one[:length] for one, length in zip(self.greedy, lengths, strict=False)),
        )

    def bits_per_byte(self, sample: Sample) -> float:
        """Returns the bits for a byte of the sample's text."""
        return float(torch.cat(self.bits).sum()) / sample.predicted / sample.bytes_per_token

    def agreement(self, other: Scores) -> float:
        """Returns the share of tokens for which both find the same one likeliest."""
        return float((torch.cat(self.greedy) == torch.cat(other.greedy)).double().mean())


def score(model: Any, sample: Sample) -> Scores:
    """Reads the windows of a sample, each in one forward pass, and returns the model's scores."""
    pairs = [_score_window(model, window) for window in sample.windows]
    return Scores(tuple(bits for bits, _ in pairs), tuple(greedy for _, greedy in pairs))


def _score_window(model: Any, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=window[None, :-1].to(model.device), use_cache=True).logits[0].double()
    nats = torch.nn.functional.cross_entropy(logits, window[1:].to(logits.device), reduction="none")
    return (nats / math.log(2)).cpu(), logits.argmax(-1).cpu()
