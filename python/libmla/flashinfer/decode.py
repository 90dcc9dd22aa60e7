# SPDX-License-Identifier: Apache-2.0
"""Replaces flashinfer.decode: offers the MLA functions under the name of the module where they once were."""

from libmla.flashinfer.mla import (
    trtllm_batch_decode_sparse_mla_dsv4,
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)

__all__ = [
    "trtllm_batch_decode_sparse_mla_dsv4",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]
