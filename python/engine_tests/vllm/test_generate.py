# SPDX-License-Identifier: Apache-2.0
"""Text from vLLM's whole engine on the CPU, scheduler to sampler, with libmla in the place of its MLA backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import vllm
from vllm.triton_utils import HAS_TRITON


@pytest.mark.skipif(HAS_TRITON, reason="where Triton is, vLLM wants one that compiles for CPUs")
@pytest.mark.skipif(
    vllm.__version__.startswith("0.32."),
    reason="without Triton, vLLM 0.32 passes a kernel's replacement other arguments than it takes",
)
@pytest.mark.parametrize(
    ("model", "class_name"), [("deepseek_v3", "DeepseekV3ForCausalLM"), ("hy_v4", "HYV4ForCausalLM")]
)
def test_the_tokens_that_transformers_would_choose(tmp_path: Path, model: str, class_name: str) -> None:
    program = Path(__file__).with_name("generate_tiny.py")
    done = subprocess.run(
        [sys.executable, str(program), model, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model"] == class_name
    assert all(name.startswith("libmla.integrations.vllm.") for name in found["decode"] + found["prefill"])
    assert len(found["prompts"]) == 3
    distinct = set()
    for prompt in found["prompts"]:
        assert len(prompt["tokens"]) == 16
        distinct |= set(prompt["tokens"])
        for said, own, best in zip(prompt["vllm"], prompt["transformers"], prompt["best"], strict=True):
            # bf16 against the same weights in f32; near ties may fall either way.
            assert abs(said - own) < 0.15
            assert best - own < 0.15
    assert len(distinct) > 8
