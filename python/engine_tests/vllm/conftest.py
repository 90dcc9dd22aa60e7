# SPDX-License-Identifier: Apache-2.0
"""What the tests against the real vllm package share.

vLLM's packages are unpacked without their compiled code. What cannot be had without it is put in its place here, as
narrowly as possible: the platform, which vLLM finds by its compiled modules (on GPUs, one that promises no kernels),
and the operators that copy and merge prefixes of prompts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_PLUGINS", "")

import vllm.platforms
from vllm.platforms.interface import UnspecifiedPlatform


class GpuWithoutKernels(UnspecifiedPlatform):
    """A GPU for which vLLM has no code of its own."""

    device_type = "cuda"


if torch.cuda.is_available():
    vllm.platforms._current_platform = GpuWithoutKernels()
else:
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()

from vllm_engine import Engine, start_engine
from vllm_stubs import copy_context, merge_states


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """Every test draws the same random numbers, whichever ran before, and needs no gradients."""
    torch.manual_seed(20)
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return start_engine(tmp_path_factory.mktemp("models"))


@pytest.fixture
def engine(_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """vLLM in one process of one rank, with the adapter for its version, and no layers yet."""
    _engine.layers().clear()
    from vllm.model_executor.layers.attention import mla_attention

    for name in ("gather_and_maybe_dequant_cache", "gather_mla_context_cache_cpu"):
        monkeypatch.setattr(mla_attention.ops, name, copy_context, raising=False)
    monkeypatch.setattr(mla_attention.ops, "cp_gather_and_upconvert_fp8_kv_cache", copy_context, raising=False)
    monkeypatch.setattr(mla_attention, "merge_attn_states", merge_states)
    return _engine
