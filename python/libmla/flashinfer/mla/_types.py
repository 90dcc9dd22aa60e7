# SPDX-License-Identifier: Apache-2.0
"""Holds the plain data of flashinfer.mla: widths of models, and the metadata of a batch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MLAHeadDimensions:
    """Holds the widths of one head, in channels."""

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int


@dataclass(frozen=True)
class MLALayerDimensions:
    """Describes a layer: the widths of a head, and how many query heads there are."""

    head_dimensions: MLAHeadDimensions
    num_heads: int


deepseek_mla_dimensions = MLAHeadDimensions(128, 64, 128, 512)
smaller_mla_dimensions = MLAHeadDimensions(64, 64, 128, 256)
nope_mla_dimensions = MLAHeadDimensions(256, 0, 256, 512)

supported_mla_head_dimensions = [deepseek_mla_dimensions, smaller_mla_dimensions, nope_mla_dimensions]
"""Holds the widths that the peer names; libmla takes any."""

supported_mla_layer_dimensions = [
    MLALayerDimensions(deepseek_mla_dimensions, 128),
    MLALayerDimensions(deepseek_mla_dimensions, 64),
    MLALayerDimensions(smaller_mla_dimensions, 32),
]
"""Holds the layers that the peer names; libmla takes any number of heads."""


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Says which queries and pages belong to which request, as CSR, as a padded page table, or as both.

    Integers are int32. CSR: qo_indptr [B + 1] first query, kv_indptr [B + 1] first entry in kv_indices (page numbers),
    kv_len_arr [B] tokens. Dense: cum_seq_lens_q [B + 1] first query, block_tables [B, pages], seq_lens [B] tokens.
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> "MLAPlanMetadata":
        return cls(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> "MLAPlanMetadata":
        return cls(cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens, max_q_len=max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> "MLAPlanMetadata":
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)
