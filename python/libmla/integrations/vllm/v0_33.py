# SPDX-License-Identifier: Apache-2.0
"""Holds the attention backends for vLLM 0.33: everything that depends on its interfaces."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionLayer,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
    max_decode_query_len,
)
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

import libmla

from .. import plans
from . import attention, caches, checks, workspaces

logger = init_logger("vllm.libmla")


class DenseBackend(MLACommonBackend):
    """Describes the backend for dense MLA to vLLM."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(caches.KV_CACHE_DTYPES)
    operation: ClassVar[str] = "decode"

    @staticmethod
    def get_name() -> str:
        return "LIBMLA"

    @staticmethod
    def get_impl_cls() -> type:
        return DenseImpl

    @staticmethod
    def get_builder_cls() -> type:
        return DenseBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, 64)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # supports_combination says which, and why

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        if not use_mla or dtype not in cls.supported_dtypes:
            return None
        return checks.why_not_on_cache(cls.operation, device_capability, head_size, dtype, kv_cache_dtype)

    @classmethod
    def validate_configuration(cls, *args: Any, **named: Any) -> list[str]:
        return checks.advised(super().validate_configuration(*args, **named))


class SparseBackend(DenseBackend):
    """Describes the backend for sparse MLA (DeepSeek V3.2, GLM) to vLLM.

    Every query attends to the tokens that the model's indexer picks.
    """

    operation: ClassVar[str] = "decode_sparse"

    @staticmethod
    def get_name() -> str:
        return "LIBMLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type:
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type:
        return SparseBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False


class CustomBackend(DenseBackend):
    """Stands for ``--attention-backend CUSTOM``: the dense or the sparse backend, as the model needs."""

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        config = get_current_vllm_config_or_none()
        model = None if config is None else config.model_config
        sparse = model is not None and hasattr(model.hf_text_config, "index_topk")
        return (SparseBackend if sparse else DenseBackend).full_cls_name()

    @classmethod
    def validate_configuration(cls, *args: Any, **named: Any) -> list[str]:
        given = inspect.signature(MLACommonBackend.validate_configuration).bind(*args, **named).arguments
        return (SparseBackend if given["use_sparse"] else DenseBackend).validate_configuration(**given)


@dataclass
class DecodeMetadata(MLACommonDecodeMetadata):
    """Holds the decode part of a step's metadata."""

    requests: attention.Requests


class DenseBuilder(MLACommonMetadataBuilder[MLACommonMetadata[DecodeMetadata]]):
    """Builds the metadata of a step.

    Requests of up to 1 + num_speculative_tokens queries are decoded, even if they differ in how many they have.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    supports_non_causal_multi_token_dcp: ClassVar[bool] = True

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        return max_decode_query_len(vllm_config)

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, supports_dcp_with_varlen=True)
        # Lengths of a rank's share do not move between the steps of a draft model.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1
        max_requests = _padded(vllm_config, vllm_config.scheduler_config.max_num_seqs)
        self._workspace = workspaces.for_decode(
            _impl_of(vllm_config, layer_names).layer,
            num_heads=self.num_heads * self.dcp_world_size,
            dtype=self.model_config.dtype,
            device=device,
            max_tokens=max_requests * self.reorder_batch_threshold,
            max_requests=max_requests,
        )

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> DecodeMetadata:
        return DecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            requests=attention.Requests(
                kv_len=seq_lens_device if dcp_tot_seq_lens_device is None else dcp_tot_seq_lens_device,
                block_table=block_table_tensor,
                query_start_loc=query_start_loc_device,
                max_query_len=max_query_len,
                plan=plans.StepPlan(self._workspace),
            ),
        )

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        metadata.decode.requests.plan.forget()


@dataclass(kw_only=True)
class SparseMetadata(SparseMLACommonMetadata):
    """Holds the metadata of a step."""

    plan: plans.StepPlan | None = None


class SparseBuilder(SparseMLACommonMetadataBuilder[SparseMetadata]):
    """Builds the metadata of a step."""

    metadata_cls = SparseMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        return max_decode_query_len(vllm_config)

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        checks.refuse_options(hisparse_config=vllm_config.attention_config.hisparse_config)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1
        impl = _impl_of(vllm_config, layer_names)
        self._workspace = workspaces.for_decode_sparse(
            impl.layer,
            num_heads=impl.num_heads * self.dcp_world_size,
            dtype=self.model_config.dtype,
            device=device,
            max_tokens=_padded(vllm_config, vllm_config.scheduler_config.max_num_batched_tokens),
            topk=self.topk_tokens,
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.plan = plans.StepPlan(self._workspace)
        return metadata

    def update_draft_decode_metadata(self, metadata: SparseMetadata) -> None:
        metadata.plan.forget()


def _padded(vllm_config: Any, count: int) -> int:
    """Returns ``count``, or the size of the largest CUDA graph if that is more: batches are padded up to it."""
    return max(count, vllm_config.compilation_config.max_cudagraph_capture_size or 0)


def _impl_of(vllm_config: Any, layer_names: list[str]) -> Any:
    return vllm_config.compilation_config.static_forward_context[layer_names[0]].impl


class _Impl:
    """Holds what dense and sparse layers have in common."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        checks.refuse_options(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            attn_type=None if attn_type == AttentionType.DECODER else attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
        )
        checks.require_format(kv_cache_dtype)
        if current_platform.is_cuda():
            checks.require_gpu()
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        # Queries stay as they are: kernels multiply bf16 with e4m3.
        self.supports_quant_query_input = False
        interleave = get_current_vllm_config().parallel_config.cp_kv_cache_interleave_size
        shared = self.dcp_world_size > 1
        self.layer = attention.Layer(
            sm_scale=self.scale,
            kv_cache_dtype=kv_cache_dtype,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
            context_parallel=(self.dcp_rank, self.dcp_world_size, interleave) if shared else None,
        )
        logger.info_once("%s runs on libmla %s", type(self).__name__, libmla.__version__)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        caches.append(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)


class DenseImpl(_Impl, MLACommonImpl[MLACommonMetadata[DecodeMetadata]]):
    """Computes attention of a dense layer."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata[DecodeMetadata],
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return attention.decode(
            self.layer,
            attn_metadata.decode.requests,
            q,
            kv_c_and_k_pe_cache,
            layer._k_scale,
            causal=attn_metadata.causal,
            want_lse=self.need_to_return_lse_for_decode,
            key=self,
        )


class SparseImpl(_Impl, SparseMLACommonImpl[SparseMetadata]):
    """Computes attention of a sparse layer."""

    supports_pcp: bool = False

    def __init__(self, *args: Any, sinks: torch.Tensor | None = None, **named: Any) -> None:
        super().__init__(*args, **named)
        if sinks is not None and self.dcp_world_size > 1:  # they would count once for each rank
            raise NotImplementedError(
                "libmla's attention backend: expected no sinks with decode context parallelism, got a model with them and "
                f"{self.dcp_world_size} ranks"
            )
        self.layer = replace(self.layer, attn_sink=sinks)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        # Prefills are the last requests. Those whose context is short are not attended to here.
        whole = tokens > attn_metadata.num_decode_tokens
        count = attn_metadata.num_reqs if whole else attn_metadata.num_decodes
        return attention.decode_sparse(
            self.layer,
            attention.Requests(
                kv_len=attn_metadata.seq_lens[:count],
                block_table=attn_metadata.block_table[:count],
                query_start_loc=attn_metadata.query_start_loc[: count + 1],
                max_query_len=attn_metadata.max_query_len,
                plan=attn_metadata.plan,
            ),
            q,
            self.topk_indices_buffer[:tokens],
            kv_c_and_k_pe_cache,
            layer._k_scale,
            want_lse=self.need_to_return_lse_for_decode,
            key=self,
        )


class PrefillBackend(MLAPrefillBackend):
    """Computes attention of prompts, in the up-projected form."""

    @staticmethod
    def get_name() -> str:
        return "LIBMLA"

    @classmethod
    def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
        reasons = super().validate_configuration(device_capability, selector_config)
        dims = selector_config.mla_dimensions
        reason = checks.why_not(
            "prefill",
            checks.device_of(device_capability),
            q_dtype=caches.format_of(None, selector_config.dtype),
            d_qk=dims.qk_nope_head_dim + dims.qk_rope_head_dim,
            d_v=dims.v_head_dim,
        )
        return reasons if reason is None else [*reasons, reason]

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> Any:
        # output_scale is given only where supports_quant_output says so.
        starts = self._prefill_metadata.query_start_loc
        return self._attend(q, k, v, starts, starts, causal=True, want_lse=return_softmax_lse, out=out)

    def run_prefill_context_chunk(
        self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> Any:
        return self._attend(q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, causal=False, want_lse=True, out=out)

    def _attend(self, q: Any, k: Any, v: Any, qo_indptr: Any, kv_indptr: Any, **options: Any) -> Any:
        return attention.prefill(
            q,
            k,
            v,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            sm_scale=self.scale,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
            **options,
        )
