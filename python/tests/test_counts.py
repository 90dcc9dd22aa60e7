# SPDX-License-Identifier: Apache-2.0
"""Counts that nothing can have, and states that are not there, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import libmla
from example_calls import calls

Call = Callable[[Any], Any]


def example(case: str, argument: str) -> Call:
    """Returns a call that is right but for one argument."""
    operation, args, named = calls()[case]
    return lambda value: getattr(libmla, operation)(*args, **{**named, argument: value})


COUNTS: list[tuple[str, int, Call]] = [
    ("row_bytes: d_qk", 1, lambda n: libmla.row_bytes("bf16", n)),
    ("row_bytes: d_qk", 1, lambda n: libmla.row_bytes("fp8_ds_mla", n)),
    ("page_bytes: d_qk", 1, lambda n: libmla.page_bytes("fp8_dsv4", n, 64)),
    ("page_bytes: page_size", 1, lambda n: libmla.page_bytes("fp8_dsv4", 512, n)),
    ("page_bytes: page_size", 1, lambda n: libmla.page_bytes("bf16", 576, n, padded=True)),
    ("indexer_page_bytes: page_size", 1, libmla.indexer_page_bytes),
    *(
        (f"explain: {name}", 1, lambda n, name=name: libmla.explain("decode", **{name: n}))
        for name in ("num_heads", "d_qk", "d_v", "q_len")
    ),
    ("decode: d_v", 1, example("decode", "d_v")),
    ("decode_sparse: d_v", 1, example("decode_sparse", "d_v")),
    ("decode_sparse: channels_per_scale", 1, example("decode_sparse, finished", "channels_per_scale")),
    ("prefill_sparse: d_v", 1, example("prefill_sparse", "d_v")),
    ("gather: num_rows", 0, example("gather", "num_rows")),
    ("block_table_to_csr: page_size", 1, example("block_table_to_csr", "page_size")),
    ("physical_slots: page_size", 1, example("physical_slots", "page_size")),
    ("append_indexer: page_size", 1, example("append_indexer", "page_size")),
    ("finish_output: channels_per_scale", 1, example("finish_output", "channels_per_scale")),
    ("compress: ratio", 1, example("compress, keys", "ratio")),
    ("compress: indexer_page_size", 1, example("compress, keys", "indexer_page_size")),
    ("indexer_logits: page_size", 1, example("indexer_logits", "page_size")),
    ("indexer_logits: max_kv_len", 0, example("indexer_logits", "max_kv_len")),
    ("indexer_top_k: max_kv_len", 0, example("indexer_top_k", "max_kv_len")),
    ("indexer_top_k: latent_page_size", 1, example("indexer_top_k", "latent_page_size")),
    ("top_k: k", 1, lambda n: libmla.top_k(torch.zeros(2, 9), n)),
]


@pytest.mark.parametrize(("field", "least", "call"), COUNTS)
@pytest.mark.parametrize("below", [1, 2, 7])
def test_counts_below_the_least(field: str, least: int, call: Call, below: int) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected at least {least}, got {least - below}$"):
        call(least - below)


def test_gather_of_no_rows() -> None:
    operation, args, named = calls()["gather"]
    nothing = {**named, "out_indptr": torch.zeros(4, dtype=torch.int32)}
    assert getattr(libmla, operation)(*args, **{**nothing, "num_rows": 0}).shape == (0, 576)


@pytest.mark.parametrize("given", [(), ("out",), ("lse",)])
def test_merging_in_place_needs_the_state_that_is_merged_into(given: tuple[str, ...]) -> None:
    states = (torch.ones(2, 3, 4, 8), torch.zeros(2, 3, 4))
    state = {"out": torch.full((3, 4, 8), 7.0), "lse": torch.full((3, 4), 7.0)}
    kept = {name: state[name] for name in given}
    with pytest.raises(ValueError, match="^merge_states: .*: expected a tensor, since in_place is set, got none"):
        libmla.merge_states(*states, in_place=True, **kept)
    assert all((tensor == 7).all() for tensor in kept.values())
