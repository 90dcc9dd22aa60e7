# SPDX-License-Identifier: Apache-2.0
"""Implements SGLang's backend for sparse attention with an indexer (DeepSeek V3.2, GLM-5) by libmla's kernels.

Indexer, metadata and graphs are SGLang's. Of SGLang's ways to attend, the backend takes that of ``flashmla_sparse``; it
replaces the kernel of that way and the kernel for short prompts. The packed cache is read as it is.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.dsa_backend import (
    DeepseekSparseAttnBackend,
    DeepseekSparseAttnMultiStepBackend,
    TopkTransformMethod,
)

from ..plans import StepPlans
from . import checks, pages
from .attention import Layer, Scores, sparse, up_projected

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_logger = logging.getLogger("sglang.libmla")


class DsaBackend(DeepseekSparseAttnBackend):
    """Computes sparse attention over the keys that SGLang's indexer picks."""

    def __init__(self, model_runner: ModelRunner, *args: Any, **named: Any) -> None:
        super().__init__(model_runner, *args, **named)
        self.dsa_prefill_impl = self.dsa_decode_impl = "flashmla_sparse"
        self.enable_auto_select_prefill_impl = False
        self._one = torch.ones(1, device=self.device)
        self._plans = StepPlans()
        self._layer_id = 0
        advice = "leave it out, or choose --attention-backend dsa"
        checks.refuse([checks.device(self.device), checks.feature("--dcp-size above 1", self.dcp_size > 1, advice)])
        packed = self.kv_cache_dim == pages.V32_ROW_BYTES
        kernels = checks.row(
            "decode_sparse",
            device=self.device,
            cache="fp8_ds_mla" if packed else checks.format_of(self.kv_cache_dtype),
            q_dtype=model_runner.dtype,
            num_heads=self.num_q_heads,
            d_qk=self.kv_lora_rank + self.qk_rope_head_dim,
            d_v=self.kv_lora_rank,
        )
        _logger.info("libmla: sparse MLA, %s cache%s, %s", self.kv_cache_dtype, " (packed)" if packed else "", kernels)

    def get_topk_transform_method(self, forward_mode: Any = None) -> Any:
        # The other method copies the prefix out of the pool by slots that HiSparse has not translated.
        if self.hisparse_coordinator is not None:
            return TopkTransformMethod.PAGED
        return super().get_topk_transform_method(forward_mode)

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **named: Any) -> torch.Tensor:
        self._layer_id = layer.layer_id
        return super().forward_decode(q, k, v, layer, *args, **named)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **named: Any) -> torch.Tensor:
        self._layer_id = layer.layer_id
        return super().forward_extend(q, k, v, layer, *args, **named)

    def _forward_flashmla_sparse(
        self,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        page_table_1: torch.Tensor,
        sm_scale: float,
        topk_length: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Slots count tokens, whatever the page: pages of one token name the same ones.
        cache = pages.pool_cache(kv_cache, 1, self._one)
        if topk_length is not None and len(topk_length) != len(q_all):
            topk_length = None
        return sparse(
            q_all,
            cache,
            page_table_1,
            topk_length,
            scores=Scores(sm_scale, sink=attn_sink),
            layer=Layer(self._plans, self.forward_metadata, self._layer_id),
            d_v=v_head_dim,
        )

    def _forward_standard_mha(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, metadata: Any
    ) -> torch.Tensor:
        out, _ = up_projected(
            q.view(-1, layer.tp_q_head_num, layer.head_dim),
            k.view(-1, layer.tp_k_head_num, layer.head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            qo_indptr=metadata.cu_seqlens_q,
            kv_indptr=metadata.cu_seqlens_k,
            causal=True,
            scores=Scores(layer.scaling),
        )
        return out


class DsaMultiStepDraftBackend(DeepseekSparseAttnMultiStepBackend):
    """Holds the steps of a draft, each a :class:`DsaBackend`."""

    def __init__(self, model_runner: ModelRunner, topk: int, speculative_num_steps: int, **named: Any) -> None:
        super().__init__(model_runner, topk, 1, **named)  # of one step, which makes no backends
        self.speculative_num_steps = speculative_num_steps
        self.attn_backends = [
            DsaBackend(
                model_runner,
                speculative_step_id=step,
                topk=topk,
                speculative_num_steps=speculative_num_steps,
                **named,
            )
            for step in range(speculative_num_steps - 1)
        ]
