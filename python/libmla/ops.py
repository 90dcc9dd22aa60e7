# SPDX-License-Identifier: Apache-2.0
"""Offers the operations as plain functions on tensors.

Shapes name the query tokens of the batch T, the requests B, the heads H and the rows of keys S. Lengths, offsets, page
tables, indices and slots are tensors of the integer type that is said, int32 but for slot_mapping and positions, where
the other tensors lie, and so are scales: a list or another integer type is refused, on the CPU and on a GPU alike,
since nothing is converted or copied. The innermost dimension of a tensor is contiguous (but for lse); all other strides
are free. Outputs that are not given come from the framework of the inputs. On a GPU the kernels go into the framework's
current stream, and what lies in the GPU's memory (lengths, page numbers, indices) is not checked. Outputs have memory
of their own; slices of one tensor that do not touch are that.

Every function raises

- ValueError: an argument is wrong; the message names it, what was expected and what was given;
- TypeError: an argument is of a type or element type that has no meaning here, or requires a gradient: inference only;
- libmla.UnsupportedError (a RuntimeError): no backend, or not the forced one, can do it; the message says why;
- RuntimeError: a fault of the library or of the machine.
"""

from collections.abc import Callable
from typing import Any

from ._attention import decode, decode_sparse, prefill, prefill_sparse
from ._caches import append, append_rope, compress, copy_pages, finish_output, gather, merge_states
from ._indexing import append_indexer, block_table_to_csr, indexer_logits, indexer_top_k, physical_slots, top_k
from ._operation import trace_with

__all__ = [
    "append",
    "append_indexer",
    "append_rope",
    "block_table_to_csr",
    "compress",
    "copy_pages",
    "decode",
    "decode_sparse",
    "finish_output",
    "gather",
    "indexer_logits",
    "indexer_top_k",
    "merge_states",
    "physical_slots",
    "prefill",
    "prefill_sparse",
    "top_k",
]


def _traced(name: str) -> Callable[..., Any]:
    from . import torch_ops

    return getattr(torch_ops, name)


trace_with(_traced)
