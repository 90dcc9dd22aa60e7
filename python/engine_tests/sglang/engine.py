# SPDX-License-Identifier: Apache-2.0
"""A worker of SGLang, as far as an attention backend sees one: its real configuration, pools and batches."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

NOPE, ROPE, LATENT, HEADS = 128, 64, 512, 4

CONFIGS: dict[str, dict[str, Any]] = {
    "v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "kv_lora_rank": LATENT,
        "q_lora_rank": None,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": 128,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 256,
        },
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": ROPE,
        "index_topk": 512,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "sliding_window": 128,
        "compress_ratios": [0, 4, 128],
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "o_groups": 1,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}


@functools.cache
def model_folder(name: str) -> str:
    """A folder with the configuration of a small model."""
    folder = Path(tempfile.mkdtemp(prefix="libmla-sglang-"))
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return str(folder)


@functools.cache
def server_args(model: str, *options: str) -> Any:
    """SGLang's own reading of a command line that asks for libmla, resolved for the model."""
    from sglang.srt.server_args import prepare_server_args

    from libmla.integrations.sglang import register

    register()
    line = ["--model-path", model_folder(model), "--attention-backend", "libmla", "--device", "cpu"]
    args = prepare_server_args([*line, "--skip-tokenizer-init", "--load-format", "dummy", *options])
    args.resolve_once()
    return args


def publish(model: str = "v2", *options: str) -> Any:
    """Makes a configuration that of this process, as a worker does when it starts."""
    from sglang.srt.runtime_context import SpawnRanks
    from sglang.srt.runtime_context import publish as publish_args

    args = server_args(model, *options)
    publish_args(args, role="test", ranks=SpawnRanks(world_rank=0))
    return args


def make_runner(
    device: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    page_size: int = 1,
    slots: int = 1024,
    requests: int = 8,
    context: int = 384,
    layers: int = 2,
    use_mla: bool = True,
    config: Any = None,
) -> Any:
    """What a backend takes of a ModelRunner, with SGLang's own pools and translator. Every slot holds NaN."""
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool

    kv_dtype = dtype if kv_dtype is None else kv_dtype
    args = publish()
    rows = ReqToTokenPool(requests, context, device, enable_memory_saver=False)
    pool = MLATokenToKVPool(slots, page_size, kv_dtype, LATENT, ROPE, layers, device, enable_memory_saver=False)
    for buffer in pool.kv_buffer:
        buffer.fill_(127 if buffer.dtype == torch.uint8 else float("nan"))
    config = config or SimpleNamespace(
        num_attention_heads=HEADS,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=NOPE,
        v_head_dim=128,
        context_len=context,
        hf_config=SimpleNamespace(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2"),
    )
    if not hasattr(config, "hf_text_config"):
        config.hf_text_config = config.hf_config
    translator = KVIndexTranslator(
        req_to_token=rows.req_to_token,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=pool,
        page_size=page_size,
        device=device,
    )
    return SimpleNamespace(
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        page_size=page_size,
        model_config=config,
        req_to_token_pool=rows,
        token_to_kv_pool=pool,
        kv_index_translator=translator,
        use_mla_backend=use_mla,
        is_draft_worker=False,
        draft_attention_backend=None,
        server_args=args,
    )


def place(runner: Any, lengths: list[int]) -> torch.Tensor:
    """Gives requests 1, 2, ... pages in a shuffled order, and returns the slots [requests, tokens]."""
    table, page = runner.req_to_token_pool.req_to_token, runner.page_size
    pages = torch.randperm(runner.token_to_kv_pool.size // page) + 1
    used = 0
    for row, length in enumerate(lengths, 1):
        count = -(-length // page)
        slots = (pages[used : used + count, None] * page + torch.arange(page)).flatten()[:length]
        table[row, :length] = slots.to(table)
        table[row, length:] = 2**31 - 1  # what no kernel may look up
        used += count
    assert used <= len(pages)
    return table


def forward_batch(runner: Any, mode: Any, lengths: list[int], queries: list[int], **fields: Any) -> Any:
    """SGLang's batch of requests 1, 2, ...: ``lengths`` tokens each, of which the last ``queries`` are new.

    As SGLang has it, a verified batch's lengths do not count the drafts.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    device, count = runner.device, len(lengths)
    table = runner.req_to_token_pool.req_to_token
    ends = [length + new if mode.is_target_verify() else length for length, new in zip(lengths, queries)]
    new = [torch.arange(end - take, end) for end, take in zip(ends, queries)]
    slots = torch.cat([table[row, part.to(device)] for row, part in enumerate(new, 1)])
    positions = torch.cat(new).to(device)
    extend = {}
    if mode.is_extend_without_speculative():
        prefix = [length - take for length, take in zip(lengths, queries)]
        extend = {
            "extend_num_tokens": sum(queries),
            "extend_seq_lens": torch.tensor(queries, dtype=torch.int32, device=device),
            "extend_prefix_lens": torch.tensor(prefix, dtype=torch.int32, device=device),
            "extend_seq_lens_cpu": queries,
            "extend_prefix_lens_cpu": prefix,
        }
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=count,
        input_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        req_pool_indices=torch.arange(1, count + 1, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int64, device=device),
        out_cache_loc=slots.to(torch.int64),
        seq_lens_sum=sum(lengths),
        **{"positions": positions, "seq_lens_cpu": torch.tensor(lengths), **extend, **fields},
    )
    runner.kv_index_translator.bind_own_plan(batch)
    return batch
