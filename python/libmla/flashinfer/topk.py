# SPDX-License-Identifier: Apache-2.0
"""Replaces flashinfer.topk, which finds the k largest scores of every row, and their places in the cache.

The selection is libmla's: it is always deterministic, prefers the lower index among equal scores, gives indices in
ascending order, and ranks NaN below -inf. `deterministic` and `dsa_graph_safe` ask for what every call gives.
"""

from enum import IntEnum

import torch

import libmla
from libmla._call import calling
from libmla.flashinfer._common import int32, output

__all__ = ["TopKTieBreak", "top_k", "top_k_page_table_transform", "top_k_ragged_transform", "topk"]


class TopKTieBreak(IntEnum):
    """Says which of equal scores at the edge of the selection are taken: NONE leaves the choice (libmla: SMALL)."""

    NONE = 0
    SMALL = 1
    LARGE = 2

    def __str__(self) -> str:
        return self.name.lower()


@calling({"logits": "input"})
def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (values [T, k] of the input's dtype, indices [T, k] int64) of the k largest of each row of input [T, N].

    input is float32, float16 or bfloat16, and k <= N. With `sorted`, values descend, equal ones by ascending index.
    """
    if input.ndim != 2 or not 1 <= k <= input.shape[1]:
        raise ValueError(f"top_k: expected a 2-D input and k from 1 to its row length, got {tuple(input.shape)}, k {k}")
    indices = _select(input, None, k, tie_break).to(torch.int64)
    values = input.gather(1, indices)
    if sorted:
        values, order = torch.sort(values, dim=1, descending=True, stable=True)
        indices = indices.gather(1, order)
    return values, indices


topk = top_k


@calling({"logits": "input"})
def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the cache slots, int32 [T, k], of the k largest of input[t, row_starts[t] : row_starts[t] + lengths[t]].

    Index i, counted from row_starts[t], becomes page * page_size + i % page_size with page =
    src_page_table[row_to_batch[t], page_table_row_starts[t] + i // page_size]. src_page_table is int32 [B, pages],
    the others int32 [T]; without row_to_batch, row t is request t; without page_table_row_starts, they are row_starts.
    Behind the last selected index stands -1. `out` takes the slots, `out_raw_indices` the indices themselves.
    """
    num_rows = input.shape[0]
    if page_size < 1:
        raise ValueError(f"page_size: expected at least 1, got {page_size}")
    if page_table_row_starts is None:
        if page_size != 1 and row_starts is not None:
            raise ValueError(
                "page_table_row_starts: expected a tensor, since row_starts counts scores and a page holds "
                f"{page_size} of them, got none"
            )
        page_table_row_starts = row_starts
    out = output("out", out, (num_rows, k), torch.int32, input)
    indices = _select_window(input, row_starts, lengths, k, tie_break)
    if out_raw_indices is not None:
        output("out_raw_indices", out_raw_indices, (num_rows, k), torch.int32, input).copy_(indices)
    if row_to_batch is None:
        row_to_batch = torch.arange(num_rows, device=input.device)
    entry = indices.clamp(min=0).to(torch.int64)
    page = entry // page_size
    if page_table_row_starts is not None:
        page = page + page_table_row_starts[:, None]
    # Rows shorter than k name no page of their own; what their tail reads must only exist.
    page = page.clamp_(max=max(src_page_table.shape[1] - 1, 0))
    slots = src_page_table[row_to_batch.to(torch.int64)[:, None], page] * page_size + entry % page_size
    return out.copy_(torch.where(indices < 0, -1, slots))


@calling({"logits": "input"})
def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns int32 [T, k]: offsets[t] + the indices of the k largest scores of a part of each row.

    Of input[t], the part is the lengths[t] scores that begin at row_starts[t].

    Indices are counted from row_starts[t]; behind the last selected one stands -1. offsets, lengths and row_starts are
    int32 [T].
    """
    indices = _select_window(input, row_starts, lengths, k, tie_break)
    return torch.where(indices < 0, -1, indices + offsets[:, None]).to(torch.int32)


def _select_window(
    input: torch.Tensor, row_starts: torch.Tensor | None, lengths: torch.Tensor, k: int, tie_break: int
) -> torch.Tensor:
    """Returns the indices, int32 [T, k], of the k largest among the `lengths` scores that begin at `row_starts`."""
    scores, width = input, input.shape[1]
    if row_starts is not None:
        column = torch.arange(width, device=input.device) + row_starts[:, None]
        scores = scores.gather(1, column.clamp_(max=width - 1))
    return _select(scores, int32("lengths", lengths).clamp(min=0, max=width), k, tie_break)


def _select(scores: torch.Tensor, lengths: torch.Tensor | None, k: int, tie_break: int) -> torch.Tensor:
    """Returns the indices, int32 [T, k], of the k largest of scores[t, : lengths[t]], ascending; -1 behind the last."""
    TopKTieBreak(tie_break)
    if tie_break != TopKTieBreak.LARGE:
        return libmla.top_k(scores, k, lengths=lengths)
    # The library prefers the lower index: with every row turned around, that is the larger one.
    width = scores.shape[1]
    end = width if lengths is None else lengths[:, None].to(torch.int64)
    turned = end - 1 - torch.arange(width, device=scores.device)
    indices = libmla.top_k(scores.gather(1, turned.clamp(min=0).expand_as(scores)), k, lengths=lengths)
    chosen = torch.where(indices < 0, -1, end - 1 - indices).to(torch.int32)
    # Turned back they descend, -1 last: ascending again, as every selection is.
    ascending = torch.where(chosen < 0, width, chosen).sort(dim=1).values
    return torch.where(ascending == width, -1, ascending).to(torch.int32)
