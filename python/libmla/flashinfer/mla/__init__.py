# SPDX-License-Identifier: Apache-2.0
"""Replaces flashinfer.mla, which computes attention in the absorbed form over paged latent caches."""

from libmla.flashinfer.mla._decode import (
    trtllm_batch_decode_with_kv_cache_mla,
    trtllm_prefill_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from libmla.flashinfer.mla._dsv4 import trtllm_batch_decode_sparse_mla_dsv4
from libmla.flashinfer.mla._types import (
    MLAHeadDimensions,
    MLALayerDimensions,
    MLAPlanMetadata,
    deepseek_mla_dimensions,
    nope_mla_dimensions,
    smaller_mla_dimensions,
    supported_mla_head_dimensions,
    supported_mla_layer_dimensions,
)
from libmla.flashinfer.mla._wrapper import BatchMLAPagedAttentionWrapper

batch_decode_sparse_mla_dsv4 = trtllm_batch_decode_sparse_mla_dsv4

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAHeadDimensions",
    "MLALayerDimensions",
    "MLAPlanMetadata",
    "batch_decode_sparse_mla_dsv4",
    "deepseek_mla_dimensions",
    "nope_mla_dimensions",
    "smaller_mla_dimensions",
    "supported_mla_head_dimensions",
    "supported_mla_layer_dimensions",
    "trtllm_batch_decode_sparse_mla_dsv4",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_prefill_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]
