# SPDX-License-Identifier: Apache-2.0
"""Registers flash_mla_with_kvcache as an operator of torch, so that torch.compile and torch.export keep it in their
graphs. Eager calls do not go through it.

Its arguments are those of the library's function. Metadata is its number, 0 if it is None; outputs are given.
"""

from __future__ import annotations

from typing import Any

import torch

from libmla import _core

_PLACE_OF_METADATA = 5
_SCHEMA = (
    "flash_mla_with_kvcache(Tensor q, Tensor k_cache, Tensor? block_table, Tensor? cache_seqlens, SymInt head_dim_v, "
    "SymInt metadata, float? softmax_scale, bool causal, bool is_fp8_kvcache, Tensor? indices, Tensor? attn_sink, "
    "Tensor? extra_k_cache, Tensor? extra_indices_in_kvcache, Tensor? topk_length, Tensor? extra_topk_length, "
    "Tensor(y!) o, bool out_is_new, bool enable_batch_invariant, str? kv_format, Tensor? descale_q, "
    "Tensor? descale_k, Tensor(z!) lse) -> ()"
)

_library = _core.function("flash_mla_with_kvcache")


def _run(*arguments: Any) -> None:
    given = list(arguments)
    number = given[_PLACE_OF_METADATA]
    metadata = _core.numbered(number)
    if number != 0 and metadata is None:
        raise RuntimeError("the FlashMLASchedMeta that the compiled function was made with is gone")
    given[_PLACE_OF_METADATA] = None if metadata is None else metadata._handle or metadata._start()
    _library(*given)


def traced_flash_mla_with_kvcache(*arguments: Any) -> None:
    """Puts a call into the graph that torch is tracing."""
    if torch.compiler.is_exporting() and arguments[_PLACE_OF_METADATA] != 0:
        raise ValueError("tile_scheduler_metadata: lives in this process: an exported program cannot hold it")
    torch.ops.libmla.flash_mla_with_kvcache(*arguments)


_LIBRARY = torch.library.Library("libmla", "FRAGMENT")
_LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
_LIBRARY.impl("flash_mla_with_kvcache", _run, "CompositeExplicitAutograd")
torch.library.register_fake("libmla::flash_mla_with_kvcache", lambda *_: None, lib=_LIBRARY)
