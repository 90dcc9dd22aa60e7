# SPDX-License-Identifier: Apache-2.0
"""Makes small models of every architecture of transformers that has latent attention, with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from libmla.integrations.transformers.pages import Pool

VOCABULARY = 160
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

# Latents as large as real ones; all else small.
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 24,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Every token takes all experts, and only the first layer's indexer chooses: small differences stay small.
_EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_INDEXER = {"index_topk": 8, "index_n_heads": 8, "index_head_dim": 96}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.8,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}

_INDEXED = "indexed_attention" if "indexed_attention" in DYNAMIC_LAYER_TYPE_MAPPING else "deepseek_sparse_attention"
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 2,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2", {**_EXPERTS, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", _EXPERTS),
    "deepseek_v3_yarn": ("DeepseekV3", {**_EXPERTS, "rope_parameters": _YARN, "rope_interleave": False}),
    "kimi_k25": ("Kimi_K25", {**_EXPERTS, "model_type": "kimi_k2"}),
    "deepseek_v32": ("DeepseekV32", {**_EXPERTS, **_INDEXER, "num_hidden_layers": 1, "first_k_dense_replace": 0}),
    "glm4_moe_lite": ("Glm4MoeLite", _EXPERTS),
    "glm_moe_dsa": ("GlmMoeDsa", {**_EXPERTS, **_INDEXER, "indexer_types": ["full", "shared"]}),
    "longcat_flash": (
        "LongcatFlash",
        {
            "num_layers": 1,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "moe_topk": 3,
            "n_routed_experts": 2,
            "zero_expert_num": 1,
        },
    ),
    "minicpm3": ("MiniCPM3", {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "scale_emb": 1, "scale_depth": 1.4}),
    "youtu": ("Youtu", {}),
    "mistral4": ("Mistral4", {**_EXPERTS, "kv_lora_rank": 256}),
    "kimi_linear": ("KimiLinear", _LINEAR),
    "bailing_hybrid": ("BailingHybrid", {**_LINEAR, "head_dim": 16, "n_group": 1, "topk_group": 1}),
    "axk1": ("AXK1", _EXPERTS),
    "axk2": ("AXK2", {**_EXPERTS, **_INDEXER, "num_hidden_layers": 1, "first_k_dense_replace": 0}),
    "hy_v4": ("HYV4", {**_EXPERTS, **_INDEXER, "indexer_types": ["full", "shared"], "learnable_sink_init": 0.5}),
    "dots3_note": (
        "Dots3Note",
        {
            **_EXPERTS,
            **_INDEXER,
            "num_hidden_layers": 3,
            "layer_types": [_INDEXED, "sliding_attention", "full_attention"],
            "use_dsa": None,
            "sliding_window": 6,
            "shared_experts_intermediate_size": 32,
            "head_dim": 96,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 48,
            "swa_kv_lora_rank": 256,
            "swa_head_dim": 96,
            "swa_qk_nope_head_dim": 32,
            "swa_v_head_dim": 24,
        },
    ),
    "glm5_next": (
        "Glm5Next",
        {
            **_EXPERTS,
            **_INDEXER,
            **_LINEAR,
            "qk_rope_head_dim": 0,
            "layer_types": [_INDEXED, _INDEXED],
            "indexer_types": ["full", "shared"],
            "index_kpool": 4,
            "hc_mult": 2,
        },
    ),
    "mistral_large4": (
        "MistralLarge4",
        {
            **_EXPERTS,
            **_INDEXER,
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "kv_source_layers": [0, 1, 0],
            "indexer_types": ["full", "shared", "shared"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
"""The name of each model's classes, and what its config has of its own."""

WITH_POOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v4": (
        "DeepseekV4",
        {
            **_EXPERTS,
            **_INDEXER,
            "num_hidden_layers": 3,
            "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5},
            "mlp_layer_types": ["moe"] * 3,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "o_groups": 2,
            "o_lora_rank": 24,
            "sliding_window": 6,
            "index_topk": 3,
            "hc_mult": 2,
        },
    )
}
"""The same, of models that attend to a window and a compressed pool."""

_VISION = {
    "kimi_k25": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 16},
    "glm5_next": {"depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16, "out_hidden_size": 64},
    "mistral_large4": {
        "model_type": "pixtral",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 1,
        "intermediate_size": 16,
    },
}


def installed() -> list[str]:
    """Returns the architectures that the installed transformers has."""
    return [name for name, (prefix, _) in ARCHITECTURES.items() if hasattr(transformers, f"{prefix}Config")]


def tiny_model(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any) -> PreTrainedModel:
    """Makes a model in whose logits attention has a large share.

    Args:
        name: one of :data:`ARCHITECTURES` or :data:`WITH_POOLS`.
        dtype: type of the weights.
        device: where the weights are.
        changes: fields of the config that differ.
    """
    prefix, own = {**ARCHITECTURES, **WITH_POOLS}[name]
    fields = {**_SHAPE, **own, **changes}
    if "num_layers" in fields:
        del fields["num_hidden_layers"]
    if name in _VISION:
        parts = {"text_config": fields, "vision_config": _VISION[name], "tie_word_embeddings": False}
        config = getattr(transformers, f"{prefix}Config")(**parts)
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    else:
        kind = "TextConfig" if hasattr(transformers, f"{prefix}TextConfig") else "Config"
        model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}{kind}")(**fields))
    for path, weight in model.named_parameters():
        if weight.ndim >= 2 and not path.endswith("embed_tokens.weight"):
            smaller = 0.5 if "o_proj" in path or "down_proj" in path else 1.0
            weight.data.normal_(std=smaller * weight.shape[-1] ** -0.5)
        elif path.endswith("embed_tokens.weight"):
            weight.data.normal_()
        elif "softmax_scaling" in path:
            weight.data.uniform_(0.1, 0.3)
        elif path.endswith("sinks"):
            weight.data.normal_()
    return model.eval().to(device=device, dtype=dtype)


def tokens(batch: int, length: int, device: str = "cpu") -> torch.Tensor:
    """Returns random tokens [batch, length]; none is padding."""
    return torch.randint(2, VOCABULARY, (batch, length)).to(device)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns ||got - expected|| / ||expected||."""
    assert got.shape == expected.shape
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(autouse=True)
def poisoned_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the rows of a cache that nobody has written NaN, in every format."""
    reserve = Pool.reserve

    def poison(pool: Pool, num_pages: int) -> None:
        before = len(pool.data)
        reserve(pool, num_pages)
        pool.data[before:].view(torch.uint8).fill_(0xFF)

    monkeypatch.setattr(Pool, "reserve", poison)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Computes with one thread: more cost time where everything is small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
