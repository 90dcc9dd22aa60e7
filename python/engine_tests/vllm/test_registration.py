# SPDX-License-Identifier: Apache-2.0
"""How vLLM finds the plug-in, what it registers, and whom vLLM then selects."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
import vllm.platforms
import vllm.plugins
from vllm.config import AttentionConfig, set_current_vllm_config
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.mla.prefill import registry as prefill_registry
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm_engine import Engine

from libmla.integrations import vllm as plugin
from libmla.integrations.vllm import checks


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """As they are before any plug-in; and libmla's warnings where a test sees them."""
    from vllm.v1.attention.backends import registry

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr(prefill_registry, "_MLA_PREFILL_OVERRIDES", {})
    monkeypatch.setattr(plugin, "_warned", set())
    monkeypatch.delenv("LIBMLA_VLLM", raising=False)
    logger = logging.getLogger("vllm.libmla")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)


def gpu(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> Any:
    """vLLM's platform on such a GPU, with a libmla that has code for it."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", types.ModuleType("vllm._C_stable_libtorch"))
    from vllm.platforms.cuda import CudaPlatformBase

    class Gpu(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(major, minor)

    monkeypatch.setattr(vllm.platforms, "_current_platform", Gpu())
    monkeypatch.setattr(checks, "why_not", lambda *_, **__: None)
    return Gpu


def selected(platform: Any, backend: AttentionBackendEnum | None, engine: Engine, **change: Any) -> str:
    config = AttentionSelectorConfig(576, torch.bfloat16, change.pop("kv_cache_dtype", "auto"), None, True, **change)
    with set_current_vllm_config(engine.configure(sparse=config.use_sparse)):
        return platform.get_attn_backend_cls(backend, config, num_heads=16).rsplit(".", 1)[1]


def test_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed libmla tells vLLM of its plug-in."""
    info = tmp_path / "libmla-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: libmla\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nlibmla = libmla.integrations.vllm:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VLLM_PLUGINS", "libmla")
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    vllm.plugins.load_general_plugins()
    assert AttentionBackendEnum.CUSTOM.get_class().__name__ == "CustomBackend"


def test_register_twice(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is engine.adapter.CustomBackend
    assert MLAPrefillBackendEnum.CUSTOM.get_class() is engine.adapter.PrefillBackend
    assert not AttentionBackendEnum.TRITON_MLA.is_overridden()
    assert not caplog.messages
    config = AttentionConfig(backend="custom", mla_prefill_backend="custom")
    assert (config.backend, config.mla_prefill_backend) == (AttentionBackendEnum.CUSTOM, MLAPrefillBackendEnum.CUSTOM)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0rc1", "1.0.0", "dev"])
def test_other_versions_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setenv("LIBMLA_VLLM", "auto")
    for _ in range(2):
        plugin.register()
    (message,) = caplog.messages
    assert version in message and "0.32 and 0.33" in message
    assert not AttentionBackendEnum.TRITON_MLA.is_overridden()
    for name in (AttentionBackendEnum.CUSTOM, MLAPrefillBackendEnum.CUSTOM):
        with pytest.raises(ImportError, match=r"vLLM 0\.32 and 0\.33, not for .*: install one of these versions"):
            name.get_class()


def test_selecting_it_in_another_version(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own error carries the reason."""
    platform = gpu(monkeypatch, 9, 0)
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    plugin.register()
    with pytest.raises(ValueError, match=r"not valid for this configuration.*vLLM 0\.32 and 0\.33, not for 0\.40\.0"):
        selected(platform, AttentionBackendEnum.CUSTOM, engine)


def test_an_engine_without_these_registries(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    plugin.register()
    (message,) = caplog.messages
    assert "could not be registered" in message


def test_off_and_unknown_options(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("LIBMLA_VLLM", "off")
    plugin.register()
    assert not AttentionBackendEnum.CUSTOM.is_overridden()
    monkeypatch.setenv("LIBMLA_VLLM", "always")
    plugin.register()
    assert AttentionBackendEnum.CUSTOM.is_overridden()
    assert "expected one of custom, auto, flashmla, off, got 'always'" in caplog.text


def test_the_name_of_another_plug_in(caplog: pytest.LogCaptureFixture) -> None:
    register_backend(AttentionBackendEnum.CUSTOM, "other.plugin.Backend")
    plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "other.plugin.Backend"
    assert "other.plugin.Backend" in caplog.text and "VLLM_PLUGINS" in caplog.text


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_custom_on_gpus(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], sparse: bool
) -> None:
    plugin.register()
    platform = gpu(monkeypatch, *capability)
    name = selected(platform, AttentionBackendEnum.CUSTOM, engine, use_sparse=sparse)
    assert name == ("SparseBackend" if sparse else "DenseBackend")
    with pytest.raises(ValueError, match="kv-cache-dtype is one of"):
        selected(platform, AttentionBackendEnum.CUSTOM, engine, use_sparse=sparse, kv_cache_dtype="nvfp4")


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (12, 0)])
def test_chosen_by_itself(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], sparse: bool
) -> None:
    platform = gpu(monkeypatch, *capability)
    monkeypatch.setenv("LIBMLA_VLLM", "auto")
    plugin.register()
    expected = "SparseBackend" if sparse else "DenseBackend"
    assert selected(platform, None, engine, use_sparse=sparse, use_batch_invariant=True) == expected
    assert not MLAPrefillBackendEnum.FLASH_ATTN.is_overridden()


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_other_gpus_keep_what_is_theirs(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    gpu(monkeypatch, *capability)
    monkeypatch.setenv("LIBMLA_VLLM", "auto")
    plugin.register()
    assert AttentionBackendEnum.TRITON_MLA.is_overridden()
    assert not AttentionBackendEnum.FLASHMLA_SPARSE.is_overridden()


def test_no_place_is_taken_that_libmla_cannot_fill(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu(monkeypatch, 8, 6)
    monkeypatch.setattr(checks, "why_not", lambda *_, **__: "no code for sm86")
    monkeypatch.setenv("LIBMLA_VLLM", "auto")
    plugin.register()
    assert not AttentionBackendEnum.TRITON_MLA.is_overridden()
    assert "vLLM keeps its own backends: no code for sm86" in caplog.text


def test_on_a_cpu(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.platforms, "_current_platform", CpuPlatform())
    monkeypatch.setenv("LIBMLA_VLLM", "auto")
    plugin.register()
    for backend in (None, AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.CUSTOM):
        assert selected(CpuPlatform, backend, engine) == "DenseBackend"
    config = MLAPrefillSelectorConfig(torch.bfloat16)
    assert CpuPlatform.get_mla_prefill_backend_cls(config).__name__ in ("PrefillBackend", "ZenCPUSDPAMLAPrefillBackend")


def test_importing_the_plug_in_is_cheap() -> None:
    """vLLM imports it in every process, also in those that serve models without MLA."""
    import subprocess

    program = (
        "import sys, libmla.integrations.vllm; print([m for m in ('torch', 'vllm', 'tvm_ffi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
