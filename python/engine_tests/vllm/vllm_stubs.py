# SPDX-License-Identifier: Apache-2.0
"""Plain replacements of vLLM's compiled operators."""

from __future__ import annotations

from typing import Any

import torch
from mla_rows import dequantized


def copy_context(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor | None = None,
    workspace_starts: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """The context of each request into dense rows, in the place of vLLM's operators of this kind."""
    ends = cu_seq_lens if cu_seq_lens is not None else workspace_starts
    first = starts if starts is not None else seq_starts
    rows = dequantized(src_cache, 1.0 if scale is None else float(scale))
    page_size = rows.shape[1]
    for b in range(len(ends) - 1):
        for row in range(int(ends[b]), int(ends[b + 1])):
            token = int(first[b]) + row - int(ends[b])
            dst[row] = rows[int(block_table[b, token // page_size]), token % page_size].to(dst.dtype)


def merge_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
) -> None:
    """Two partial results into one; o [T, H, d], lse [H, T], natural logarithms."""
    lse = torch.logaddexp(prefix_lse, suffix_lse)
    o = sum(
        part.float() * torch.exp(part_lse - lse).nan_to_num(0).t()[..., None]
        for part, part_lse in ((prefix_output, prefix_lse), (suffix_output, suffix_lse))
    )
    output.copy_(o)
    if output_lse is not None:
        output_lse.copy_(lse)


def register_cpu_operators() -> None:
    """The operators of vLLM's compiled CPU extension without which its worker does not start or step."""
    library = torch.library.Library("_C", "DEF")

    def define(schema: str, function: Any) -> None:
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")

    def slots(starts: Any, positions: Any, block_table: Any, slot_mapping: Any, block_size: int) -> None:
        count = int(starts[-1])
        request = torch.searchsorted(starts[1:], torch.arange(count), right=True)
        position = positions[:count]
        pages = block_table[request, position // block_size].long()
        slot_mapping[:count] = pages * block_size + position % block_size

    def packed_linear(out: Any, x: Any, weight: Any, bias: Any, packed: bool) -> None:
        out.copy_(torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype)))

    define("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
    define("init_cpu_threads_env(str cores) -> str", lambda cores: "")
    define("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1))
    define(
        "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, int size)"
        " -> ()",
        slots,
    )
    # With AMX, vLLM multiplies small weights by a GEMM of its own, on weights in an order of its own: here in theirs.
    define("convert_weight_packed(Tensor weight) -> Tensor", lambda weight: weight.clone())
    define(
        "weight_packed_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, bool packed) -> ()", packed_linear
    )
    register_cpu_operators.library = library  # operators live as long as it does
