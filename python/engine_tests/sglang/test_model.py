# SPDX-License-Identifier: Apache-2.0
"""SGLang's own model code with libmla, against transformers with the same weights: a small DeepSeek V2, end to end."""

from __future__ import annotations

import socket
from typing import Any

import engine
import pytest
import torch
from reference import error

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where a GPU is, SGLang's other layers are compiled code, which is not here"
)

TOKENS = 60


@pytest.fixture(scope="module")
def models() -> Any:
    """(SGLang's model, its configuration, tokens, logits of transformers in float32)."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
    from transformers import AutoConfig, AutoModelForCausalLM

    args = engine.publish()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}"
    )
    initialize_model_parallel()
    config = ModelConfig.from_server_args(args)
    config.context_len = 384
    torch.set_default_dtype(torch.bfloat16)
    try:
        ours = DeepseekV2ForCausalLM(config.hf_config)
    finally:
        torch.set_default_dtype(torch.float32)

    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(engine.model_folder("v2"))).eval()
    for name, weight in theirs.named_parameters():
        weight.data = (
            torch.ones_like(weight) if "norm" in name else (0.06 * torch.randn_like(weight)).bfloat16().float()
        )
    with torch.no_grad():
        ours.load_weights([(name, weight.bfloat16()) for name, weight in theirs.state_dict().items()])
        tokens = torch.randint(0, 512, (TOKENS,))
        logits = theirs.float()(tokens[None]).logits[0].double()
    yield ours, config, tokens, logits
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("page_size", "kv_dtype"), [(1, torch.bfloat16), (64, torch.bfloat16), (64, torch.float8_e4m3fn)]
)
def test_logits(models: Any, page_size: int, kv_dtype: torch.dtype) -> None:
    """A prompt; a second part of it over the first as prefix; two decoded tokens; a verified chain of drafts."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.runtime_context import get_spec

    model, config, tokens, logits = models
    runner = engine.make_runner("cpu", page_size=page_size, kv_dtype=kv_dtype, config=config)
    engine.place(runner, [TOKENS])
    with get_spec().override(speculative_num_draft_tokens=4, speculative_eagle_topk=1):
        backend = ATTENTION_BACKENDS["libmla"](runner)
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "libmla"

    done = 0
    tolerance = 3e-2 if kv_dtype == torch.bfloat16 else 8e-2
    for mode, take in (("EXTEND", 20), ("EXTEND", 13), ("DECODE", 1), ("DECODE", 1), ("TARGET_VERIFY", 4)):
        verify = mode == "TARGET_VERIFY"
        batch = engine.forward_batch(runner, ForwardMode[mode], [done if verify else done + take], [take])
        with forward_context(ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata(batch)
            hidden = model.model(tokens[done : done + take], batch.positions, batch)
        got = hidden @ model.lm_head.weight.T
        assert error(got, logits[done : done + take]) < tolerance, (mode, done)
        done += take
