# SPDX-License-Identifier: Apache-2.0
"""Makes small decode problems with their results in float64, for the tests of what stands around the operations."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

D_QK, D_V = 576, 512
SM_SCALE = 192**-0.5


@dataclass
class DecodeProblem:
    """Holds queries over a paged cache of one tensor, one query per request."""

    q: torch.Tensor
    cache: torch.Tensor
    kv_len: torch.Tensor
    block_table: torch.Tensor
    sm_scale: float = SM_SCALE

    @functools.cached_property
    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns o and lse, of the tensors as they are when first asked for."""
        return attention(self)

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of libmla.decode beside q and cache."""
        return {"kv_len": self.kv_len, "block_table": self.block_table, "sm_scale": self.sm_scale}

    def check(self, o: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        tolerance = {torch.float32: 2e-4, torch.float16: 4e-3}.get(o.dtype, 2e-2)
        torch.testing.assert_close(o.double(), self.expected[0], atol=tolerance, rtol=tolerance)
        if lse is not None:
            torch.testing.assert_close(lse.double(), self.expected[1], atol=2e-3, rtol=2e-3)


def attention(problem: DecodeProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes o and lse of a problem in float64."""
    page_size = problem.cache.shape[1]
    o, lse = [], []
    for b, length in enumerate(problem.kv_len.tolist()):
        pages = problem.block_table[b, : -(-length // page_size)].long()
        rows = problem.cache[pages].double().reshape(-1, D_QK)[:length]
        scores = problem.q[b].double() @ rows.T * problem.sm_scale
        lse.append(torch.logsumexp(scores, -1))
        o.append(torch.softmax(scores, -1) @ rows[:, :D_V] if length else torch.zeros(problem.q.shape[1], D_V).double())
    return torch.stack(o), torch.stack(lse)


def decode_problem(
    kv_len: tuple[int, ...] = (5, 40), heads: int = 8, page_size: int = 16, dtype: torch.dtype = torch.bfloat16
) -> DecodeProblem:
    """Returns a problem of random numbers, the same ones each time. Pages stand in the table in reverse."""
    generator = torch.Generator().manual_seed(5)
    per_request = max(1, -(-max(kv_len) // page_size))
    num_pages = per_request * len(kv_len)
    table = torch.arange(num_pages, dtype=torch.int32).flip(0).reshape(len(kv_len), per_request).contiguous()
    return DecodeProblem(
        q=torch.randn(len(kv_len), heads, D_QK, generator=generator).to(dtype),
        cache=torch.randn(num_pages, page_size, D_QK, generator=generator).to(dtype),
        kv_len=torch.tensor(kv_len, dtype=torch.int32),
        block_table=table,
    )
