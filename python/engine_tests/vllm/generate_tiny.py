# SPDX-License-Identifier: Apache-2.0
"""The whole of vLLM on the CPU with libmla, and transformers' own model with the same weights; test_generate.py runs it.

    python generate_tiny.py MODEL FOLDER

MODEL is a name of MODELS, and its checkpoint goes to FOLDER. Prints one JSON object: the model's class in vLLM, the
classes that attend, and for each prompt vLLM's greedy tokens with their log probabilities, and what transformers says of
these tokens.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(
    LIBMLA_VLLM="auto",
    VLLM_PLUGINS="",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
)

import torch
import vllm.platforms
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, HYV4Config, HYV4ForCausalLM
from vllm.platforms.cpu import CpuPlatform
from vllm_stubs import register_cpu_operators

PROMPTS = [list(range(5, 25)), [3, 4, 5], list(range(100, 250))]

# Without experts: on CPUs vLLM's are compiled code.
SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def deepseek_v3(folder: str) -> tuple[Any, dict[str, Any]]:
    """Saves the model and returns it, with what vLLM shall read otherwise in its configuration."""
    model = DeepseekV3ForCausalLM(DeepseekV3Config(first_k_dense_replace=2, **SMALL)).bfloat16().eval()
    model.save_pretrained(folder)
    return model, {}


def hy_v4(folder: str) -> tuple[Any, dict[str, Any]]:
    """As above: Hy4 with its residual streams and its gated attention, but with neither sinks nor indexers.

    vLLM refuses sparse layers on CPUs, and its dense ones take no sinks. In transformers all layers have both: with -inf
    for sinks, and no more tokens than an indexer picks, they compute the same.
    """
    model = HYV4ForCausalLM(HYV4Config(mlp_layer_types=["dense"] * 2, **SMALL)).bfloat16().eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(float("-inf"))
    published = {
        "hc_head.hc_": "hc_head.hc_head_",
        "attn_hc.": "hc_attn_layer.hc_pre.hc_",
        "ffn_hc.": "hc_mlp_layer.hc_pre.hc_",
        "self_attn.gate_proj": "self_attn.linear_gate",
    }
    weights = {}
    for name, weight in model.state_dict().items():
        if "sinks" in name or "indexer" in name:
            continue
        heads = {"q_b_proj": SMALL["num_attention_heads"], "kv_a_proj_with_mqa": 1}.get(name.split(".")[-2])
        for part, name_there in published.items():
            name = name.replace(part, name_there)
        weights[name] = weight if heads is None else pairs_of_neighbours(weight, heads)
    model.save_pretrained(folder, state_dict=weights, save_original_format=False)
    return model, {"layer_types": ["full_attention"] * 2, "learnable_sink": False}


def pairs_of_neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Puts rows of rotary channels that transformers rotates together, half a head apart, where vLLM has them."""
    rows = weight.clone().view(heads, -1, weight.shape[1])
    rotary = rows[:, -SMALL["qk_rope_head_dim"] :]
    rotary.copy_(rotary.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))
    return rows.view_as(weight)


MODELS = {"deepseek_v3": deepseek_v3, "hy_v4": hy_v4}


def main(name: str, folder: str) -> None:
    vllm.platforms._current_platform = CpuPlatform()
    register_cpu_operators()
    torch.manual_seed(1)
    model, overrides = MODELS[name](folder)

    from vllm import LLM, SamplingParams

    from libmla.integrations.vllm import register

    register()
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        compilation_config={"custom_ops": ["none"]},
        hf_overrides=overrides,
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, logprobs=1, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    layers = [layer for layer in runner.model.modules() if hasattr(layer, "impl")]

    found = {
        "model": type(runner.model).__name__,
        "decode": sorted({f"{type(layer.impl).__module__}.{type(layer.impl).__name__}" for layer in layers}),
        "prefill": sorted({type(layer.prefill_backend).__module__ for layer in layers}),
        "prompts": [],
    }
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        said = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        with torch.no_grad():
            logits = model.float()(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1)
        best = expected.max(-1).values.tolist()
        own = expected[range(len(tokens)), tokens].tolist()
        found["prompts"].append({"tokens": tokens, "vllm": said, "transformers": own, "best": best})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
