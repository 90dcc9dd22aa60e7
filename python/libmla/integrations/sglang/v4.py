# SPDX-License-Identifier: Apache-2.0
"""Implements SGLang's backend for DeepSeek V4 and V4.1 by libmla's kernel.

Metadata, compressors, indexer and graphs are SGLang's. The attention is one call over two pools, for decode and for
prefill: the window's and, by the layer, a compressed one, under one softmax with the sink. Pages of any size are read
as they lie: nothing is copied into smaller pages, and nothing gathered into a dense workspace.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend, DeepseekV4MultiStepBackend
from sglang.srt.runtime_context import get_exec, get_parallel

from ..plans import StepPlans
from . import checks, pages
from .attention import Layer, Scores, sparse

_logger = logging.getLogger("sglang.libmla")


class V4Backend(DeepseekV4AttnBackend):
    """Computes attention over the window's pool and a compressed one."""

    def __init__(self, model_runner: Any, *args: Any, **named: Any) -> None:
        super().__init__(model_runner, *args, **named)
        self._plans = StepPlans()
        kernels = get_exec().kernel.dsv4_attn_backend  # these have layouts, or work on queries, of their own
        special = kernels in ("trtllm", "flashmla_mega")
        layout = str(self.token_to_kv_pool.get_swa_key_layout().value)
        checks.refuse(
            [
                checks.device(str(self.device)),
                checks.feature(f"--dsv4-attn-backend {kernels}", special, "set it to flashmla"),
                None if special else checks.v4_layout(layout),
            ]
        )
        kernels = checks.row(
            "decode_sparse",
            device=str(self.device),
            cache=pages.V4_FORMATS[layout],
            q_dtype=model_runner.dtype,
            num_heads=model_runner.model_config.num_attention_heads // get_parallel().attn_tp_size,
            d_qk=512,
            d_v=512,
        )
        _logger.info(
            "libmla: V4, %s rows, window's pages of %d, %s",
            layout,
            self.token_to_kv_pool.get_swa_key_page_size(),
            kernels,
        )

    def _use_sparse_prefill(self, forward_batch: Any, *, num_qo_tokens: int) -> bool:
        return False  # that is the way through a dense workspace

    def _forward_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        compress_ratio: int,
        save_kv_cache: bool = True,
        attn_sink: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if self.mtp_enabled and forward_batch.forward_mode.is_idle():
            return torch.empty_like(q)
        if save_kv_cache:
            self.store_cache(layer.layer_id, k, forward_batch)
        pool, metadata = self.token_to_kv_pool, self.forward_metadata.core_attn_metadata
        second = None
        if compress_ratio:
            second = (
                pages.v4_cache(
                    pool.get_extra_key_buffer(layer.layer_id),
                    pool.get_extra_key_page_size(layer.layer_id),
                    pool.get_extra_key_layout(layer.layer_id).value,
                ),
                metadata.sparse_page_indices(compress_ratio),
                metadata.sparse_topk_lengths(compress_ratio),
            )
        return sparse(
            q,
            pages.v4_cache(
                pool.get_swa_key_buffer_radix(layer.layer_id),
                pool.get_swa_key_page_size(),
                pool.get_swa_key_layout().value,
            ),
            metadata.swa_page_indices,
            metadata.swa_topk_lengths,
            scores=Scores(self.softmax_scale, sink=attn_sink),
            layer=Layer(self._plans, metadata, layer.layer_id),
            second=second,
            num_heads=layer.tp_q_head_num,
        )


class V4MultiStepDraftBackend(DeepseekV4MultiStepBackend):
    """Holds the steps of a draft, each a :class:`V4Backend`."""

    def _make_step_backend(self, model_runner: Any, step_id: int) -> V4Backend:
        return V4Backend(
            model_runner,
            speculative_step_id=step_id,
            topk=self.topk,
            speculative_num_steps=self.speculative_num_steps,
        )
