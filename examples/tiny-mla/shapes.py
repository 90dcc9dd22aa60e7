# SPDX-License-Identifier: Apache-2.0
"""Builds the models that train.py trains: small ones with the attention of DeepSeek V3 and of DeepSeek V4."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType

import torch
from byte_tokenizer import BOS, EOS, PAD, VOCABULARY
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    PreTrainedModel,
)


@dataclass(frozen=True)
class Sizes:
    """Holds how large a model is."""

    context: int
    layers: int
    hidden: int
    intermediate: int  #: of the MLP, or of each expert
    heads: int
    latent: int  #: channels of a cached row, but for V3's 64 rotary ones


@dataclass(frozen=True)
class Shape:
    """Describes a kind of attention."""

    build: Callable[[Sizes], PreTrainedModel]
    intermediate: int  #: which makes 14 MB of the other sizes' defaults
    trained_by: str  #: the attention implementation that is fast in training
    run_by: str  #: the one that the model has when it is stored
    outputs: Callable[[nn.Module], Iterable[nn.Module]]  #: the parts of a layer that add to the residual


def deepseek_v3(sizes: Sizes) -> PreTrainedModel:
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        q_lora_rank=None,
        kv_lora_rank=sizes.latent,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=sizes.context,
        first_k_dense_replace=sizes.layers,  # dense MLPs only
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=0,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return DeepseekV3ForCausalLM(config)


def deepseek_v4(sizes: Sizes) -> PreTrainedModel:
    """Builds V4's layers in V4's order: a window of 128 keys alone, then windows with pools that hold a row for 4 and
    for 128 tokens, in turns."""
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    config = DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        head_dim=sizes.latent,
        qk_rope_head_dim=64,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=128,
        layer_types=["sliding_attention", *(kinds[layer % 2] for layer in range(sizes.layers - 1))],
        sliding_window=128,
        index_n_heads=2,
        index_head_dim=128,
        index_topk=512,  # as V4's: all rows that 2,048 tokens have, so that nothing depends on an untrained indexer
        mlp_layer_types=["moe"] * sizes.layers,
        n_routed_experts=4,
        num_experts_per_tok=2,
        hc_sinkhorn_iters=4,
        max_position_embeddings=sizes.context,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = DeepseekV4ForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp.experts.forward = MethodType(_every_expert, layer.mlp.experts)
    for name, gain in model.named_parameters():
        if name.endswith("kv_norm.weight"):
            gain.requires_grad_(False)  # trained, they grew until scores were too large for e4m3 rows
    return model


def _every_expert(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Computes what transformers' experts do, by asking all: torch.compile wants shapes that data do not change."""
    shares = hidden.new_zeros(len(hidden), experts.num_experts).scatter(1, chosen, weights.to(hidden.dtype))
    out = torch.zeros_like(hidden)
    for expert in range(experts.num_experts):
        inner = experts._apply_gate(functional.linear(hidden, experts.gate_up_proj[expert]))
        out = out + shares[:, expert, None] * functional.linear(inner, experts.down_proj[expert])
    return out


def padded(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **_):
    """Computes causal attention of queries and keys [B, H, S, 192] and values [B, H, S, 128]: outputs [B, S, H, 128].

    Values are padded to the keys' width, as fused kernels want them.
    """
    padded = functional.pad(value, (0, key.shape[-1] - value.shape[-1]))
    out = functional.scaled_dot_product_attention(query, key, padded, is_causal=True, scale=scaling)
    return out[..., : value.shape[-1]].transpose(1, 2), None


def as_stored(rows: Tensor) -> Tensor:
    """Rounds rows [..., 512] as V4's cache does, e4m3 with a power of two for each 64 channels, rotary ones bf16.
    Gradients pass as if nothing were rounded."""
    latent, rotary = rows.float().split([rows.shape[-1] - 64, 64], dim=-1)
    groups = latent.unflatten(-1, (-1, 64))
    scales = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    codes = (groups / scales).to(torch.float8_e4m3fn)
    stored = torch.cat([(codes.float() * scales).flatten(-2), rotary.bfloat16().float()], dim=-1).to(rows.dtype)
    return rows + (stored - rows).detach()


def windowed(module, query, key, value, attention_mask, scaling, sliding_window, s_aux, **_):
    """Computes attention of queries [B, H, S, D] over S rows [B, 1, S + P, D], of which each sees the last ones up to
    its own, and P compressed rows, which the mask's last columns show: outputs [B, S, H, D].

    A block of `sliding_window` queries meets its own rows and those of the block before, no others. S is a multiple.
    """
    tokens, window, key = query.shape[2], sliding_window, as_stored(key)
    rows, pool = key[:, 0, :tokens], key[:, 0, tokens:]
    blocks = rows.unflatten(1, (-1, window))
    near = torch.cat([functional.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :-1], blocks], dim=2)  # [B, N, 2 W, D]
    scores = torch.einsum("bhnwd,bnkd->bhnwk", query.unflatten(2, (-1, window)), near) * scaling
    mine = torch.arange(window, device=query.device)[:, None]
    theirs = torch.arange(-window, window, device=query.device)
    seen = ((theirs <= mine) & (theirs > mine - window)).expand(blocks.shape[1], -1, -1)
    seen = seen & ((theirs >= 0) | (torch.arange(blocks.shape[1], device=query.device)[:, None, None] > 0))
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = s_aux.to(scores.dtype).view(1, -1, 1, 1, 1).expand(*scores.shape[:4], 1)
    hidden = attention_mask[..., attention_mask.shape[-1] - pool.shape[1] :]
    far = torch.einsum("bhsd,bpd->bhsp", query, pool) * scaling + hidden
    weights = torch.cat([scores, far.unflatten(2, (-1, window)).to(scores.dtype), sinks], dim=-1).float().softmax(-1)
    near_weights, far_weights, _ = weights.to(query.dtype).split([2 * window, pool.shape[1], 1], dim=-1)
    out = torch.einsum("bhnwk,bnkd->bhnwd", near_weights, near).flatten(2, 3)
    out = out + torch.einsum("bhsp,bpd->bhsd", far_weights.flatten(2, 3), pool)
    return out.transpose(1, 2), None


def _no_columns(batch_size: int, q_length: int, dtype: torch.dtype = torch.float32, device=None, **_) -> Tensor:
    """Makes the mask of the window's rows, which `windowed` knows: of no columns, so that what the compressors add is
    all there is."""
    return torch.zeros(batch_size, 1, q_length, 0, dtype=dtype, device=device)


AttentionInterface.register("padded", padded)
AttentionInterface.register("windowed", windowed)
AttentionMaskInterface.register("windowed", _no_columns)

SHAPES = {
    "deepseek-v3": Shape(deepseek_v3, 896, "padded", "sdpa", lambda layer: (layer.self_attn.o_proj, layer.mlp)),
    "deepseek-v4": Shape(deepseek_v4, 120, "windowed", "eager", lambda layer: (layer.self_attn.o_b_proj, layer.mlp)),
}


def new_model(shape: str, sizes: Sizes, dropout: float) -> PreTrainedModel:
    """Builds a model to train, which drops a share of what its layers add."""
    kind = SHAPES[shape]
    model = kind.build(sizes)
    for name, weight in model.named_parameters():
        if name.removesuffix(".weight").endswith(("o_proj", "o_b_proj", "down_proj")):
            weight.data /= math.sqrt(2 * sizes.layers)
    if dropout:
        for layer in model.model.layers:
            for part in kind.outputs(layer):
                part.register_forward_hook(
                    lambda owner, _, out: functional.dropout(out, dropout, training=owner.training)
                )
    model.set_attn_implementation(kind.trained_by)
    return model
