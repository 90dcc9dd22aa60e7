# SPDX-License-Identifier: Apache-2.0
"""Implements SGLang's attention backend for dense MLA."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import TreeMaskMode, VerifyMask, tree_mask_numel
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view
from sglang.srt.runtime_context import get_parallel, get_spec

from . import checks, pages
from .attention import Batch, Planner, Scores, absorbed, split, up_projected

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

_logger = logging.getLogger("sglang.libmla")

# Drafts that are chains, or trees whose masks cover the drafts alone.
_SPECULATION = (None, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


class MlaBackend(AttentionBackend):
    """Computes dense attention of models with MLA.

    A batch's page table, lengths and plan are made on the device. In a CUDA graph they are part of it: replaying needs
    no preparation, and reads nothing back.

    Args:
        model_runner: SGLang's model runner, whose pools and sizes the backend takes.
        draft_step: the step of a draft that it serves, if it belongs to a :class:`MlaMultiStepDraftBackend`.
        topk: branches of a draft in that case.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner, draft_step: int | None = None, topk: int = 1) -> None:
        super().__init__()
        config = model_runner.model_config
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kv_index_translator = model_runner.kv_index_translator
        self.req_to_token = self.req_to_token_pool.req_to_token
        self.page_size = model_runner.page_size
        self.max_context_len = config.context_len
        self.kv_lora_rank = config.kv_lora_rank
        self.row_width = config.kv_lora_rank + config.qk_rope_head_dim
        num_heads = config.num_attention_heads // get_parallel().attn_tp_size
        self._check(model_runner, num_heads)

        self._planner = Planner(
            num_heads, config.kv_lora_rank, config.qk_rope_head_dim, model_runner.dtype, self.device
        )
        self._one = torch.ones(1, device=self.device)
        self._draft_step = draft_step
        self._topk = topk
        self._graphs: dict[tuple[ForwardMode, int], Batch] = {}

        spec = get_spec()
        self._num_drafts = spec.speculative_num_draft_tokens or 0
        self._drafts_branch = (spec.speculative_eagle_topk or 1) > 1
        self._verify_mask = None
        if self._num_drafts and draft_step is None and not model_runner.is_draft_worker:
            requests = self.req_to_token_pool.size
            cells = tree_mask_numel(TreeMaskMode.QLEN_ONLY, requests, self._num_drafts, self.max_context_len)
            self._verify_mask = VerifyMask(
                buffer=torch.zeros(cells, dtype=torch.bool, device=self.device),
                mode=TreeMaskMode.QLEN_ONLY,
                max_bs=requests,
                is_read=self._drafts_branch,
            )

    def _check(self, runner: ModelRunner, num_heads: int) -> None:
        parallel, translator = get_parallel(), self.kv_index_translator
        algorithm = get_spec().speculative_algorithm
        checks.refuse(
            [
                checks.device(self.device),
                checks.dense_cache(runner.kv_cache_dtype),
                checks.page_size(self.page_size, len(self._layer_buffer())),
                checks.feature("--dcp-size above 1", parallel.dcp_enabled, "leave it at 1, or choose flashinfer"),
                checks.feature("--attn-cp-size above 1", parallel.attn_cp_size > 1, "leave it at 1, or choose fa3"),
                checks.feature(
                    "--enable-unified-memory",
                    translator is not None and translator.reads_are_translated,
                    "leave it out",
                ),
                checks.feature(
                    f"--speculative-algorithm {algorithm}",
                    algorithm not in _SPECULATION,
                    "use EAGLE, or choose flashinfer",
                ),
            ]
        )
        kernels = checks.row(
            "decode",
            device=self.device,
            cache=checks.format_of(runner.kv_cache_dtype),
            q_dtype=runner.dtype,
            num_heads=num_heads,
            d_qk=self.row_width,
            d_v=self.kv_lora_rank,
        )
        _logger.info("libmla: dense MLA, %s cache, pages of %d, %s", runner.kv_cache_dtype, self.page_size, kernels)

    # What a forward pass attends to.

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        more = self._more_tokens(mode)
        longest = self.max_context_len if forward_batch.seq_lens_cpu is None else int(forward_batch.seq_lens_cpu.max())
        batch = self._new_batch(forward_batch, self._pages_of(longest + more))
        if mode.is_extend_without_speculative():
            batch.qo_indptr = _indptr(forward_batch.extend_seq_lens)
            batch.kv_indptr = _indptr(forward_batch.seq_lens)
        self._fill(batch, forward_batch, more)
        self.forward_metadata = batch

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, share_with: MlaBackend | None = None) -> None:
        rows, width = max_bs * self._topk, self._pages_of(self.req_to_token.shape[1])
        self._graph_table = (
            torch.zeros(rows, width, dtype=torch.int32, device=self.device)
            if share_with is None
            else share_with._graph_table
        )
        self._graph_kv_len = torch.zeros(rows, dtype=torch.int32, device=self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        mode = forward_batch.forward_mode
        if mode.is_extend_without_speculative():
            self.init_forward_metadata(forward_batch)
            return
        key = (ForwardMode.DECODE if mode.is_decode_or_idle() else mode, forward_batch.batch_size)
        if in_capture:
            batch = self._new_batch(forward_batch, None)
            self._fill(batch, forward_batch, self._more_tokens(mode))
            self._planner.plan(batch, self._cache())
            self._graphs[key] = batch
        self.forward_metadata = self._graphs.get(key)  # which a replay does not look at

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        batch = self.forward_metadata
        self._fill(batch, forward_batch, self._more_tokens(forward_batch.forward_mode))
        self._planner.replan(batch, self._cache())

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        return True

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        pass  # the mask's buffer is what the kernels read

    def _more_tokens(self, mode: ForwardMode) -> int:
        """Returns how many tokens a request attends to beyond SGLang's ``seq_lens``."""
        if self._draft_step is not None:
            return self._draft_step + 1
        return self._num_drafts if mode.is_target_verify() else 0

    def _pages_of(self, tokens: int) -> int:
        return -(-min(tokens, self.req_to_token.shape[1]) // self.page_size)

    def _new_batch(self, forward_batch: ForwardBatch, max_pages: int | None) -> Batch:
        """Makes a batch with room for these requests; without ``max_pages``, it lies in the graphs' memory."""
        mode, requests = forward_batch.forward_mode, forward_batch.batch_size
        rows = requests * self._topk
        if mode.is_extend_without_speculative():
            queries = forward_batch.extend_num_tokens or len(forward_batch.positions)
        elif mode.is_target_verify():
            queries = requests * self._num_drafts
        elif mode.is_draft_extend_v2():
            queries = len(forward_batch.positions) // requests * requests
        else:
            queries = rows
        if max_pages is None:
            table, kv_len = self._graph_table[:rows], self._graph_kv_len[:rows]
        else:
            table = torch.empty(rows, max_pages, dtype=torch.int32, device=self.device)
            kv_len = torch.empty(rows, dtype=torch.int32, device=self.device)
        mask = None
        if mode.is_target_verify() and self._drafts_branch:
            cells = requests * self._num_drafts**2
            given = (
                self._verify_mask.buffer if self._verify_mask.fits(requests) else forward_batch.spec_info.custom_mask
            )
            mask = given[:cells].view(queries, self._num_drafts)
        return Batch(block_table=table, kv_len=kv_len, num_queries=queries, tree_mask=mask)

    def _fill(self, batch: Batch, forward_batch: ForwardBatch, more: int) -> None:
        """Writes the page table and the lengths, by device operations on tensors of fixed shapes."""
        requests = len(batch.kv_len) // self._topk
        rows, lengths = forward_batch.req_pool_indices[:requests], forward_batch.seq_lens[:requests]
        if self._topk == 1:
            pages.page_table(self.req_to_token, rows, self.page_size, batch.block_table)
            batch.kv_len.copy_(lengths)
        else:
            steps = get_spec().speculative_num_steps
            pages.branch_table(self.req_to_token, rows, lengths, self._topk, steps, batch.block_table)
            batch.kv_len.copy_(lengths.repeat_interleave(self._topk, output_size=len(batch.kv_len)))
        if more:
            batch.kv_len.add_(more)

    # Layers.

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if save_kv_cache and k is not None:
            self._write(layer, forward_batch, k, k_rope)
        nope = q.view(-1, layer.tp_q_head_num, self.kv_lora_rank if q_rope is not None else layer.head_dim)
        if q_rope is None:
            queries = split(nope, self.kv_lora_rank)
        else:
            queries = (nope, q_rope.view(len(nope), layer.tp_q_head_num, -1)) if q_rope.numel() else (nope,)
        batch, cache = self.forward_metadata, self._cache(layer.layer_id)
        if batch.plan is None and len(nope) == batch.num_queries:
            self._planner.plan(batch, cache)
        out = absorbed(queries, cache, batch, self._scores(layer, attn_sink), self._planner)
        return out.view(-1, layer.tp_q_head_num * self.kv_lora_rank)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if (layer.head_dim, layer.v_head_dim) == (self.row_width, self.kv_lora_rank):
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, attn_sink)

        batch = self.forward_metadata
        chunk = bool(forward_batch.attn_attend_prefix_cache)
        if chunk:
            kv_indptr = forward_batch.prefix_chunk_cu_seq_lens[forward_batch.prefix_chunk_idx]
        else:
            kv_indptr = batch.kv_indptr if forward_batch.mha_one_shot else batch.qo_indptr
        out, lse = up_projected(
            q.view(-1, layer.tp_q_head_num, layer.head_dim),
            k.view(-1, layer.tp_k_head_num, layer.head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            qo_indptr=batch.qo_indptr,
            kv_indptr=kv_indptr,
            causal=not chunk,
            scores=self._scores(layer, attn_sink),
        )
        if chunk or forward_batch.mha_return_lse:
            return out, lse
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def init_mha_chunk_metadata(self, forward_batch: ForwardBatch, disable_flashinfer_ragged: bool = False) -> None:
        pass  # SGLang's own offsets of the chunks are all there is to know

    def support_triton(self) -> bool:
        return True

    def _write(
        self, layer: RadixAttention, forward_batch: ForwardBatch, k: torch.Tensor, k_rope: torch.Tensor | None
    ) -> None:
        """Appends the new tokens' rows, as the pool writes them."""
        where = KVWriteLoc.for_batch(forward_batch)
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, None)
        elif k.is_cuda:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, where, k, k_rope)
        else:  # that writer is a GPU kernel
            rows = torch.cat([k.view(len(k), 1, -1), k_rope.view(len(k), 1, -1)], -1)
            self.token_to_kv_pool.set_kv_buffer(layer, where, rows, None)

    def _scores(self, layer: RadixAttention, sink: torch.Tensor | None) -> Scores:
        return Scores(layer.scaling, layer.logit_cap or 0.0, layer.sliding_window_size, sink)

    def _layer_buffer(self, layer_id: int | None = None) -> torch.Tensor:
        if layer_id is not None:
            return self.token_to_kv_pool.get_key_buffer(layer_id)
        pool = getattr(self.token_to_kv_pool, "full_kv_pool", self.token_to_kv_pool)  # where other layers have no cache
        return pool.get_key_buffer(pool.start_layer)

    def _cache(self, layer_id: int | None = None) -> Any:
        """Returns a layer's cache; without ``layer_id``, that of any layer, since all are alike."""
        return pages.pool_cache(self._layer_buffer(layer_id), self.page_size, self._one)


class MlaMultiStepDraftBackend:
    """Holds the steps of a draft after its first token, each an :class:`MlaBackend` that sees one token more."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner, topk: int, speculative_num_steps: int) -> None:
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.attn_backends = [MlaBackend(model_runner, step, topk) for step in range(speculative_num_steps - 1)]
        self.attn_backend_list = self.attn_backends
        self.kv_index_translator = model_runner.kv_index_translator
        self.forward_metadata = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        first, *others = self.attn_backends
        first.init_cuda_graph_state(max_bs, max_num_tokens)
        for backend in others:  # the page tables of all steps are the same
            backend.init_cuda_graph_state(max_bs, max_num_tokens, first)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        inner = build_inner_fb_view(forward_batch, bs=forward_batch.batch_size, forward_mode=ForwardMode.DECODE)
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(inner, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)


def _indptr(lengths: torch.Tensor) -> torch.Tensor:
    """Returns i32 [B+1], the offsets of ragged rows of these lengths."""
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=indptr[1:])
    return indptr
