# SPDX-License-Identifier: Apache-2.0
"""Whether the classes are what vLLM calls, and what they say they can do."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
from vllm_engine import Engine

import libmla
from libmla.integrations.vllm import checks

CLASSES = {
    "DenseBackend": mla_attention.MLACommonBackend,
    "SparseBackend": mla_attention.MLACommonBackend,
    "CustomBackend": mla_attention.MLACommonBackend,
    "DenseBuilder": mla_attention.MLACommonMetadataBuilder,
    "SparseBuilder": sparse_mla_attention.SparseMLACommonMetadataBuilder,
    "DenseImpl": mla_attention.MLACommonImpl,
    "SparseImpl": sparse_mla_attention.SparseMLACommonImpl,
    "PrefillBackend": MLAPrefillBackend,
}
CONFIGURATION: dict[str, Any] = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 64,
    "use_mla": True,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": None,  # libmla's verdict is then on the CPU
    "attn_type": "decoder",
}


@pytest.mark.parametrize("name", CLASSES)
def test_hierarchy_and_signatures(engine: Engine, name: str) -> None:
    """Nothing is left abstract, and what is overridden takes what the base takes, in the same order."""
    made, base = getattr(engine.adapter, name), CLASSES[name]
    assert issubclass(made, base)
    assert not inspect.isabstract(made)
    ours = {method for one in made.__mro__ if one.__module__.startswith("libmla.") for method in vars(one)}
    overridden = [method for method in ours if callable(getattr(base, method, None)) and method != "__class_getitem__"]
    assert overridden
    for method in overridden:
        if method in ("__init__", "__doc__", "__module__"):
            continue
        theirs = inspect.signature(getattr(base, method)).parameters
        own = inspect.signature(getattr(made, method)).parameters
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in own.values()):
            continue
        assert list(own)[: len(theirs)] == list(theirs), method
        for extra in list(own)[len(theirs) :]:
            assert own[extra].default is not inspect.Parameter.empty, method


@pytest.mark.parametrize("name", ["DenseImpl", "SparseImpl"])
def test_constructor_takes_what_layers_give(engine: Engine, name: str) -> None:
    theirs = inspect.signature(CLASSES[name].__init__).parameters
    own = inspect.signature(getattr(engine.adapter, name).__init__)
    own.bind(**dict.fromkeys(theirs))


def test_graphs_and_drafts(engine: Engine) -> None:
    for made in (engine.adapter.DenseBuilder, engine.adapter.SparseBuilder):
        assert made.get_cudagraph_support(engine.config, None) is AttentionCGSupport.UNIFORM_BATCH
        assert made.get_varlen_cudagraph_max_query_len(engine.configure(drafts=3), None) == 4
    config = engine.configure(drafts=3)
    builder = engine.builder(config, engine.layer(config))
    assert builder.reorder_batch_threshold == 4
    assert builder.supports_draft_decode_metadata_update


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": torch.float16},
        *({"kv_cache_dtype": name} for name in (None, "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_ds_mla")),
        *({"block_size": size} for size in (1, 16, 48, 256, None)),
        {"head_size": 512},
        {"head_size": 320},
        {"use_batch_invariant": True, "use_dcp": True, "use_non_causal": True, "use_kv_connector": True},
        {"use_sparse": True, "kv_cache_dtype": "fp8_ds_mla", "use_batch_invariant": True, "use_dcp": True},
        {"use_adaptive_verification": True},
    ],
)
def test_what_is_supported(engine: Engine, change: dict[str, Any]) -> None:
    assert engine.adapter.CustomBackend.validate_configuration(**{**CONFIGURATION, **change}) == []


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"use_mla": False}, ["no multi-head latent attention"]),
        ({"kv_cache_dtype": "nvfp4"}, ["--kv-cache-dtype is one of auto, float16, bfloat16, fp8"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["--kv-cache-dtype is one of"]),
        ({"dtype": torch.float32}, ["--dtype is bfloat16 or float16"]),
        ({"has_sink": True}, ["sinks"]),
        ({"has_sliding_window": True}, ["sliding window"]),
        ({"attn_type": "encoder"}, ["encoder"]),
        ({"kv_cache_dtype": "fp8_ds_mla", "head_size": 320}, ["576 channels, not 320"]),
        ({"device_capability": DeviceCapability(7, 5)}, ["needs sm80 or newer, not sm75"]),
        ({"use_sparse": True, "use_non_causal": True}, ["non-causal"]),
        ({"use_sparse": True, "use_pcp": True}, ["PCP"]),
        ({"use_mla": False, "dtype": torch.float32}, ["no multi-head latent", "--dtype"]),
    ],
)
def test_refusals_name_what_to_change(engine: Engine, change: dict[str, Any], reasons: list[str]) -> None:
    found = engine.adapter.CustomBackend.validate_configuration(**{**CONFIGURATION, **change})
    assert len(found) == len(reasons)
    for reason in reasons:
        assert any(reason in one for one in found), found


def test_a_gpu_without_code(engine: Engine) -> None:
    """The reasons are the library's own, whatever it was built for."""
    archs = libmla.info().gpu_archs
    for capability in ((7, 5), *(known for known in ((8, 0), (12, 0)) if 10 * known[0] + known[1] not in archs)):
        change = {"device_capability": DeviceCapability(*capability)}
        found = engine.adapter.DenseBackend.validate_configuration(**{**CONFIGURATION, **change})
        assert len(found) == 1 and "sm{}{}".format(*capability) in found[0], found
        assert "no code for" in found[0] or "no GPU code" in found[0] or "needs sm80" in found[0], found


def test_a_missing_gpu(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cuda=lambda: True)
    monkeypatch.setattr(sys.modules[engine.adapter.DenseImpl.__module__], "current_platform", platform)
    monkeypatch.setattr(libmla, "info", lambda: SimpleNamespace(cuda="no driver was found"))
    with pytest.raises(libmla.UnsupportedError, match=r"no driver was found .*choose another --attention-backend"):
        engine.layer(engine.configure())


def test_unsupported_options_of_a_layer(engine: Engine) -> None:
    with pytest.raises(NotImplementedError, match="expected no sliding_window, got 128"):
        engine.layer(engine.configure(), sliding_window=128)
    with pytest.raises(ValueError, match=r"kv_cache_dtype: expected one of auto, .*got fp8_e5m2"):
        engine.layer(engine.configure(kv_cache_dtype="fp8_e5m2"))


def test_caches_in_host_memory(engine: Engine) -> None:
    config = engine.configure(sparse=True)
    layer = engine.layer(config, sparse=True)
    config.attention_config.hisparse_config = "any"
    with pytest.raises(NotImplementedError, match="expected no hisparse_config, got 'any'"):
        engine.builder(config, layer)


def test_prefill_answers(engine: Engine) -> None:
    v3 = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    made = engine.adapter.PrefillBackend
    assert made.validate_configuration(None, MLAPrefillSelectorConfig(torch.bfloat16, v3)) == []
    (reason,) = made.validate_configuration(DeviceCapability(7, 5), MLAPrefillSelectorConfig(torch.bfloat16, v3))
    assert "prefill" in reason and "needs sm80 or newer" in reason


def test_custom_is_sparse_where_the_model_is(engine: Engine) -> None:
    for sparse, name in ((False, "DenseBackend"), (True, "SparseBackend")):
        with set_current_vllm_config(engine.configure(sparse=sparse)):
            assert engine.adapter.CustomBackend.full_cls_name()[1] == name


def test_device_names() -> None:
    assert [checks.device_of(c) for c in (None, DeviceCapability(8, 9), DeviceCapability(12, 0))] == [
        "cpu",
        "sm89",
        "sm120",
    ]
