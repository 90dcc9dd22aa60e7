# SPDX-License-Identifier: Apache-2.0
"""Tests block_table_to_csr and physical_slots against plain loops, and the sizes of formats."""

from __future__ import annotations

import pytest
import torch

import batches
import libmla
from batches import ints


def test_block_table_to_csr():
    batch = batches.paged([7, 0, 33, 8], 8)
    indptr, indices = libmla.block_table_to_csr(**batch.pages(), page_size=8)
    pages = batch.pages("csr")
    assert torch.equal(indptr, pages["kv_indptr"])
    assert torch.equal(indices[: indptr[-1]], pages["kv_indices"])
    mine = torch.empty(5, dtype=torch.int32), torch.empty(9, dtype=torch.int32)
    given = libmla.block_table_to_csr(**batch.pages(), page_size=8, kv_indptr=mine[0], kv_indices=mine[1])
    assert given[0] is mine[0] and given[1] is mine[1] and torch.equal(mine[1][: indptr[-1]], pages["kv_indices"])


@pytest.mark.parametrize("form", ["block_table", "csr"])
@pytest.mark.parametrize("compact", [False, True])
def test_physical_slots(form, compact):
    batch = batches.paged([7, 33], 8)
    indices = torch.randint(-2, 40, (3, 12), dtype=torch.int32)
    lengths = ints([12, 5, 0])
    requests = [0, 1, 1]
    wanted = torch.full((3, 12), -1, dtype=torch.int32)
    for t, b in enumerate(requests):
        of_request = batch.slots(b)
        row = [of_request[j] if 0 <= j < len(of_request) else -1 for j in indices[t, : lengths[t]].tolist()]
        if compact:
            row = [slot for slot in row if slot >= 0]
        wanted[t, : len(row)] = ints(row)
    more = {"qo_indptr": batches.indptr([1, 2]), "topk_length": lengths, "page_size": 8, "compact": compact}
    slots, counts = libmla.physical_slots(indices, **batch.pages(form), **more, return_valid_count=True)
    assert torch.equal(slots, wanted)
    assert torch.equal(counts, (wanted >= 0).sum(-1).int())
    assert torch.equal(libmla.physical_slots(indices, **batch.pages(form), **more), wanted)
    mine = torch.empty(3, dtype=torch.int32)
    given = libmla.physical_slots(indices, **batch.pages(form), **more, slots=indices, valid_count=mine)
    assert given[0] is indices and given[1] is mine and torch.equal(indices, wanted)


def test_physical_slots_of_one_rank():
    kv_len, world, interleave = 20, 2, 3
    indices = torch.arange(kv_len, dtype=torch.int32)[None]
    owners = [j // interleave % world for j in range(kv_len)]
    for rank in range(world):
        local = [j for j in range(kv_len) if owners[j] == rank]
        batch = batches.paged([len(local)], 4)
        pages = batch.pages()
        pages["kv_len"] = ints([kv_len])
        slots = libmla.physical_slots(indices, **pages, page_size=4, context_parallel=(rank, world, interleave))
        of_rank = batch.slots(0)
        assert slots[0].tolist() == [of_rank[local.index(j)] if j in local else -1 for j in range(kv_len)]


def test_sizes():
    assert libmla.row_bytes("bf16", 576) == 1152
    assert libmla.row_bytes("fp8_ds_mla", 576) == 656
    assert libmla.page_bytes("fp8_dsv4", 512, 256, padded=True) == 149760
    assert libmla.page_bytes("fp8_dsv4", 512, 64) == 64 * 584
    assert libmla.indexer_page_bytes(64) == 64 * 132
    assert libmla.indexer_page_bytes(64, "mxfp4") == 64 * 68
    with pytest.raises(ValueError, match=r"row_bytes: format: expected bf16, .*, got \"int4\""):
        libmla.row_bytes("int4", 576)  # type: ignore[arg-type]


def test_backends():
    assert libmla.backends("decode")[-1] == "reference"
    with pytest.raises(ValueError, match="backends: op"):
        libmla.backends("attention")
