# SPDX-License-Identifier: Apache-2.0
"""The parts of a running vLLM that the backends meet: configurations, layers, metadata of steps."""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata

HEADS = 4
SM_SCALE = 192**-0.5
TOPK = 16
_MODEL = {
    "model_type": "deepseek_v3",
    "architectures": ["LayersOnly"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 0,
}


class LayersOnly(torch.nn.Module):
    """A model whose layers tests make themselves."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> None:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> None:
        raise NotImplementedError


@dataclass
class Step:
    """Requests of one step: how many queries and how many tokens each has."""

    q_lens: list[int]
    kv_lens: list[int]
    tables: list[list[int]]
    page_size: int
    num_pages: int

    def starts(self) -> list[int]:
        return [sum(self.q_lens[:b]) for b in range(len(self.q_lens) + 1)]

    def slots(self, b: int) -> list[int]:
        """Where the tokens of a request lie."""
        return [
            self.tables[b][j // self.page_size] * self.page_size + j % self.page_size for j in range(self.kv_lens[b])
        ]


def step(q_lens: Sequence[int], kv_lens: Sequence[int], page_size: int = 16) -> Step:
    """Requests with pages in random places, and pages that nobody owns between them."""
    counts = [-(-length // page_size) for length in kv_lens]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages).tolist()
    tables = [order[sum(counts[:b]) :][: counts[b]] for b in range(len(counts))]
    return Step(list(q_lens), list(kv_lens), tables, page_size, num_pages)


class Drafts:
    """As much of a speculative configuration as builders look at."""

    method = "mtp"
    parallel_drafting = False
    enable_adaptive_verification = False

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens


@dataclass
class Engine:
    """vLLM with one rank, and libmla's adapter for it."""

    config: VllmConfig
    adapter: ModuleType
    device: torch.device
    _count: int = field(default=0)

    @property
    def checks_offsets(self) -> bool:
        """Whether libmla looks at query_start_loc, and so refuses one that ends before the padding does."""
        return self.device.type == "cpu" and not os.environ.get("MLA_EMULATE")

    def layers(self) -> dict[str, Any]:
        return self.config.compilation_config.static_forward_context

    def configure(
        self,
        *,
        kv_cache_dtype: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = 16,
        sparse: bool = False,
        drafts: int = 0,
    ) -> VllmConfig:
        """A configuration of its own for one test; `drafts` speculative tokens."""
        config = copy.deepcopy(self.config)
        config.cache_config.cache_dtype = kv_cache_dtype
        config.cache_config.block_size = page_size
        config.model_config.dtype = dtype
        if sparse:
            config.model_config.hf_text_config.index_topk = TOPK
        if drafts:
            config.speculative_config = Drafts(drafts)
        return config

    def layer(self, config: VllmConfig, *, sparse: bool = False, **options: Any) -> MLAAttention:
        """A layer of vLLM's own, with weights, that runs on libmla."""
        self._count += 1
        prefix = f"model.layers.{self._count}.self_attn"
        if sparse:
            options["topk_indices_buffer"] = torch.full((512, TOPK), -1, dtype=torch.int32, device=self.device)
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with set_current_vllm_config(config), self.device:
                kv_b_proj = ColumnParallelLinear(512, HEADS * 256, bias=False, prefix=f"{prefix}.kv_b_proj")
                kv_b_proj.weight.data.normal_(std=512**-0.5)
                layer = MLAAttention(
                    HEADS,
                    SM_SCALE,
                    128,
                    64,
                    128,
                    None,
                    512,
                    kv_b_proj,
                    cache_config=config.cache_config,
                    prefix=f"{prefix}.attn",
                    attn_backend=self.adapter.SparseBackend if sparse else self.adapter.DenseBackend,
                    prefill_backend_cls=self.adapter.PrefillBackend,
                    use_sparse=sparse,
                    **options,
                )
                kv_b_proj.quant_method.process_weights_after_loading(kv_b_proj)
                layer.process_weights_after_loading(config.model_config.dtype)
        finally:
            torch.set_default_dtype(before)
        return layer

    def builder(self, config: VllmConfig, layer: MLAAttention) -> Any:
        """The metadata builder of a group of one layer."""
        with set_current_vllm_config(config):
            spec = layer.get_kv_cache_spec(config)
            made = layer.attn_backend.get_builder_cls()
            return made(spec, [layer.layer_name], config, self.device)

    def cache(self, layer: MLAAttention, rows: torch.Tensor, batch: Step, k_scale: float = 1.0) -> torch.Tensor:
        """The layer's cache with the rows of all tokens, [sum of kv_lens, 576], and NaN everywhere else."""
        layer._k_scale.fill_(k_scale)
        width = 656 if layer.kv_cache_dtype == "fp8_ds_mla" else 576
        shape = (batch.num_pages, batch.page_size, width)
        if layer.kv_cache_dtype.startswith("fp8"):
            kv_cache = torch.full(shape, 0xFF, dtype=torch.uint8, device=self.device)
        else:
            names = {"bfloat16": torch.bfloat16, "float16": torch.float16, "auto": rows.dtype}
            kv_cache = torch.full(shape, torch.nan, dtype=names[layer.kv_cache_dtype], device=self.device)
        slots = torch.tensor([s for b in range(len(batch.tables)) for s in batch.slots(b)], dtype=torch.int64)
        self.update(layer, rows, slots, kv_cache)
        return kv_cache

    def update(self, layer: MLAAttention, rows: torch.Tensor, slots: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """Rows [T, 576] into the cache, as the layer does it."""
        layer.update_kv_cache(
            rows[:, :512],
            rows[:, None, 512:],
            kv_cache,
            slots.to(self.device),
            None,
            layer.kv_cache_dtype,
            layer._k_scale,
        )

    def common(self, batch: Step, *, pad_requests: int = 0, pad_tokens: int = 0, **fields: Any) -> Any:
        """What vLLM's model runner says of a step; padded as it pads for CUDA graphs."""
        q_lens, kv_lens = batch.q_lens, batch.kv_lens
        table = torch.full((len(q_lens) + pad_requests, 1 + max(map(len, batch.tables))), 2147483647)
        for b, pages in enumerate(batch.tables):
            table[b, : len(pages)] = torch.tensor(pages)
        starts = torch.tensor(batch.starts() + [sum(q_lens)] * pad_requests, dtype=torch.int32)
        lengths = torch.tensor(kv_lens + [0] * pad_requests, dtype=torch.int32)
        slots = [
            batch.slots(b)[length - q_len :] for b, (q_len, length) in enumerate(zip(q_lens, kv_lens, strict=True))
        ]
        slots = torch.tensor([s for own in slots for s in own] + [-1] * pad_tokens)
        made = {
            "query_start_loc": starts.to(self.device),
            "query_start_loc_cpu": starts,
            "seq_lens": lengths.to(self.device),
            "seq_lens_cpu_upper_bound": lengths,
            "num_reqs": len(starts) - 1,
            "num_actual_tokens": sum(q_lens) + pad_tokens,
            "max_query_len": max(q_lens),
            "max_seq_len": max(kv_lens),
            "block_table_tensor": table.int().to(self.device),
            "slot_mapping": slots.to(self.device),
            "is_prefilling": torch.zeros(len(starts) - 1, dtype=torch.bool),
            # Which vLLM works out with a Triton kernel.
            "_token_to_req_indices_cache": torch.tensor(
                [b for b, q_len in enumerate(q_lens) for _ in range(q_len)] + [0] * pad_tokens, dtype=torch.int32
            ).to(self.device),
        }
        return CommonAttentionMetadata(**{**made, **fields})


def start_engine(folder: Path) -> Engine:
    """A vLLM of one process, for a small model of DeepSeek V3's shape."""
    (folder / "config.json").write_text(json.dumps(_MODEL))
    ModelRegistry.register_model("LayersOnly", LayersOnly)
    model = ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048
    )
    device = torch.device(current_platform.device_type)
    config = VllmConfig(
        model_config=model, cache_config=CacheConfig(block_size=16), device_config=DeviceConfig(device.type)
    )
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
    version = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    adapter = importlib.import_module(f"libmla.integrations.vllm.v{version[1]}_{version[2]}")
    return Engine(config, adapter, device)
