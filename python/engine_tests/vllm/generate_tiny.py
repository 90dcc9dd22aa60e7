# SPDX-License-Identifier: Apache-2.0
"""The whole of vLLM on the CPU with libmla, and transformers' own model with the same weights; test_generate.py runs it.

Prints one JSON object: the classes that attend, and for each prompt vLLM's greedy tokens with their log probabilities,
and what transformers says of these tokens.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(
    LIBMLA_VLLM="auto",
    VLLM_PLUGINS="",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
)

import torch
import vllm.platforms
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from vllm.platforms.cpu import CpuPlatform
from vllm_stubs import register_cpu_operators

PROMPTS = [list(range(5, 25)), [3, 4, 5], list(range(100, 250))]


def main(folder: str) -> None:
    vllm.platforms._current_platform = CpuPlatform()
    register_cpu_operators()
    torch.manual_seed(1)
    config = DeepseekV3Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=128,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        vocab_size=256,
        max_position_embeddings=4096,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = DeepseekV3ForCausalLM(config).bfloat16().eval()
    model.save_pretrained(folder)

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
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, logprobs=1, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    layers = [layer for layer in runner.model.modules() if hasattr(layer, "impl")]

    found = {
        "decode": sorted({f"{type(layer.impl).__module__}.{type(layer.impl).__name__}" for layer in layers}),
        "prefill": sorted({type(layer.prefill_backend).__module__ for layer in layers}),
        "prompts": [],
    }
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        said = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        with torch.no_grad():
            logits = model.float()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1)
        best = expected.max(-1).values.tolist()
        own = expected[range(len(tokens)), tokens].tolist()
        found["prompts"].append({"tokens": tokens, "vllm": said, "transformers": own, "best": best})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
