# SPDX-License-Identifier: Apache-2.0
"""Writes a small model with latent attention and random weights, as a folder that the commands read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-mla"
EXAMPLE_V4 = EXAMPLE.with_name("tiny-dsv4")
CONTEXT = 256
BOS, EOS, PAD = 256, 257, 258


def write_model(folder: Path, seed: int = 5) -> Path:
    """Writes a model of two layers and three heads, with bytes as tokens.

    Weights are large, so that attention is far from uniform.
    """
    config = DeepseekV3Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=CONTEXT,
        first_k_dense_replace=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        initializer_range=0.12,
    )
    torch.manual_seed(seed)
    DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_v4_model(folder: Path, seed: int = 5) -> Path:
    """Writes a model with the attention of DeepSeek V4, as large, with bytes as tokens."""
    config = DeepseekV4Config(
        vocab_size=264,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=3,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=32,
        o_groups=1,
        o_lora_rank=32,
        layer_types=["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        mlp_layer_types=["moe"] * 3,
        sliding_window=24,
        index_n_heads=2,
        index_head_dim=64,
        n_routed_experts=2,
        num_experts_per_tok=2,
        hc_mult=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        initializer_range=0.12,
    )
    torch.manual_seed(seed)
    DeepseekV4ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@contextmanager
def example() -> Iterator[None]:
    """Lets the modules of the example be imported."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLE))


def write_tokenizer(folder: Path) -> None:
    """Writes the example's tokenizer."""
    with example():
        from byte_tokenizer import write
    write(folder, CONTEXT)


def write_model_without_latents(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=BOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
