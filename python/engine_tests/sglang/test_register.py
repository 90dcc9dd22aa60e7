# SPDX-License-Identifier: Apache-2.0
"""How SGLang comes to know libmla, chooses it, and is refused."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine
import pytest
import test_v4
import tomllib
import torch

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """libmla.integrations.sglang as in a process that has just started, and SGLang too, as far as it knows libmla."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry

    import libmla.integrations.sglang as plugin

    monkeypatch.setattr(plugin, "_registered", False)
    lists = [
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DRAFT_ATTENTION_BACKEND_CHOICES,
        choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS,
    ]
    saved = [list(names) for names in lists]
    backends = dict(attention_registry.ATTENTION_BACKENDS)
    for names in lists:
        names[:] = [name for name in names if name != "libmla"]
    attention_registry.ATTENTION_BACKENDS.pop("libmla", None)
    yield plugin
    for names, before in zip(lists, saved, strict=True):
        names[:] = before
    attention_registry.ATTENTION_BACKENDS.clear()
    attention_registry.ATTENTION_BACKENDS.update(backends)


def test_loaded_by_sglang(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own loader, from the entry point that our package declares; twice, as in some processes."""
    from sglang.srt import plugins
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry

    group = "sglang.srt.plugins"
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][group]
    entries = [importlib.metadata.EntryPoint(name, value, group) for name, value in declared.items()]
    found = {group: importlib.metadata.EntryPoints(entries)}
    monkeypatch.setattr(plugins, "entry_points", lambda group: found.get(group, importlib.metadata.EntryPoints()))
    for _ in range(2):
        monkeypatch.setattr(plugins, "_plugins_loaded", False)
        plugins.load_plugins()
    assert choices.ATTENTION_BACKEND_CHOICES.count("libmla") == 1
    assert choices.DRAFT_ATTENTION_BACKEND_CHOICES.count("libmla") == 1
    assert choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count("libmla") == 1
    assert attention_registry.ATTENTION_BACKENDS["libmla"].__module__ == "libmla.integrations.sglang.v0_5_23"


def test_other_version(fresh: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import sglang
    from sglang.srt.layers.attention import attention_registry

    monkeypatch.setattr(sglang, "__version__", "0.6.1")
    with caplog.at_level(logging.WARNING):
        fresh.register()
        fresh.register()
    message = "expected SGLang 0.5.22 and 0.5.23, got 0.6.1: install one of these versions"
    assert sum(message in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(RuntimeError, match=message):
        attention_registry.ATTENTION_BACKENDS["libmla"](SimpleNamespace())


def test_this_version_has_an_adapter() -> None:
    import sglang

    import libmla.integrations.sglang as plugin

    assert sglang.__version__ in plugin.supported_versions().split(" and ")


@pytest.mark.parametrize(
    ("model", "resolved", "page_size"), [("v2", ("libmla", "libmla"), 1), ("v4", ("dsv4", "dsv4"), 256)]
)
def test_command_line(model: str, resolved: tuple[str, str], page_size: int) -> None:
    """What SGLang makes of ``--attention-backend libmla``. That of a V4 model is always dsv4, which is then ours."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    args = engine.server_args(model)
    assert args.attention_backend == "libmla"
    assert attention_backends_of(resolved_view(args)) == resolved
    assert resolved_view(args).page_size == page_size


def test_chosen_for_dense_models(device: str, caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from libmla.integrations.sglang.dense import MlaBackend

    with caplog.at_level(logging.INFO):
        assert type(ATTENTION_BACKENDS["libmla"](engine.make_runner(device, page_size=16))) is MlaBackend
    assert "libmla: dense MLA, torch.bfloat16 cache, pages of 16, c" in caplog.text  # cpu... or cuda...


@pytest.mark.parametrize(("asked", "name"), [("libmla", "V4Backend"), (None, "DeepseekV4AttnBackend")])
def test_chosen_for_v4(asked: str | None, name: str) -> None:
    """By its registry, and by drafts, which do not ask the registry; only where it was asked for."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    runner = test_v4.make_runner("cpu")
    runner.server_args = SimpleNamespace(attention_backend=asked)
    assert type(ATTENTION_BACKENDS["dsv4"](runner)).__name__ == name
    factory = DraftBackendFactory(runner_of_draft(runner), 1, 3)
    assert type(factory._create_dsv4_prefill_backend()[1]).__name__ == name
    assert {type(step).__name__ for step in factory._create_dsv4_decode_backend()[1].attn_backends} == {name}


def runner_of_draft(runner: Any) -> Any:
    runner.is_draft_worker = True
    runner.draft_attention_backend = None
    return runner


def test_drafts() -> None:
    """SGLang's factory makes the backends of a draft's steps and of its extension."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from libmla.integrations.sglang.dense import MlaBackend, MlaMultiStepDraftBackend

    runner = runner_of_draft(engine.make_runner("cpu"))
    ATTENTION_BACKENDS["libmla"](runner)  # a target's, before that of its draft
    with get_spec().override(speculative_num_draft_tokens=4):
        factory = DraftBackendFactory(runner, 1, 3)
        decode, extend = factory.create_decode_backend(), factory.create_draft_extend_backend()
    assert type(decode) is MlaMultiStepDraftBackend and len(decode.attn_backends) == 2
    assert type(extend) is MlaBackend and extend.verify_mask is None
    assert decode.decode_attention_backend_str == extend.prefill_attention_backend_str == "libmla"


@pytest.mark.parametrize(
    ("mode", "prefix", "method"),
    [
        ("DECODE", 0, "MLA"),
        ("TARGET_VERIFY", 0, "MLA"),
        ("EXTEND", 0, "MHA_ONE_SHOT"),
        ("EXTEND", 100, "MLA"),
        ("EXTEND", 9000, "MHA_ONE_SHOT"),
        ("EXTEND", 200_000, "MHA_CHUNKED_KV"),
    ],
)
def test_absorbed_or_not(mode: str, prefix: int, method: str) -> None:
    """Models absorb for decode and short prefixes; else they up-project, long prefixes in chunks."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    runner = engine.make_runner("cpu")
    ATTENTION_BACKENDS["libmla"](runner)
    attention = SimpleNamespace(
        flashinfer_mla_disable_ragged=False,
        chunked_prefix_cache_threshold=8192,
        disable_chunked_prefix_cache=False,
        qk_rope_head_dim=64,
    )
    engine.place(runner, [4])
    batch = engine.forward_batch(runner, ForwardMode[mode], [4], [4])
    batch.extend_prefix_lens_cpu, batch.seq_lens_cpu = [prefix], torch.tensor([prefix + 4])
    chosen = AttentionBackendRegistry.get_handler("libmla")(attention, batch)
    assert chosen.name == method


def test_queries_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models hand over both parts of a query, but for one that SGLang would then not scale by position."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.models.deepseek_common import utils

    monkeypatch.setattr(utils, "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS", names := ["fa3"])
    runner = engine.make_runner("cpu")
    runner.model_config.hf_text_config = SimpleNamespace(llama_4_scaling={"beta": 0.1})
    ATTENTION_BACKENDS["libmla"](runner)
    assert names == ["fa3"]
    for _ in range(2):
        ATTENTION_BACKENDS["libmla"](engine.make_runner("cpu"))
    assert names == ["fa3", "libmla"]


def refusal(runner: Any, **spec: Any) -> str:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.runtime_context import get_spec

    with get_spec().override(**spec), pytest.raises(ValueError) as error:
        ATTENTION_BACKENDS["libmla"](runner)
    return str(error.value)


def test_what_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that libmla has no kernels for: each row's reason, from the library itself."""
    from libmla.integrations.sglang import checks

    problem = {"cache": "bf16", "q_dtype": torch.bfloat16, "num_heads": 16, "d_qk": 576, "d_v": 512}
    assert checks.row("decode", device="cpu", **problem).startswith("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(ValueError, match="attention backend libmla: decode: cache bf16.*cuda_portable: "):
        checks.row("decode", device="cuda", **problem)


def test_refusals() -> None:
    """Each says what was expected, what was found, and what to change."""
    message = refusal(engine.make_runner("cpu", use_mla=False))
    assert message == (
        "attention backend libmla: model: expected one with MLA, got DeepseekV2ForCausalLM: choose another "
        "--attention-backend"
    )
    message = refusal(engine.make_runner("cpu", kv_dtype=torch.float8_e5m2))
    assert "kv_cache_dtype: expected bfloat16, float16 or float8_e4m3fn, got torch.float8_e5m2: set " in message
    runner = engine.make_runner("cpu", page_size=64)
    runner.page_size = 60
    assert "page_size: expected a divisor of the pool's 1088 slots, got 60: set another --page-size" in refusal(runner)
    message = refusal(engine.make_runner("cpu"), speculative_algorithm="NGRAM")
    assert "--speculative-algorithm NGRAM is not supported: use EAGLE, or choose flashinfer" in message
    if not torch.cuda.is_available():
        runner = engine.make_runner("cpu")
        runner.device = "cuda"
        assert "device: expected a CUDA GPU that PyTorch sees, got none: check the driver" in refusal(runner)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"dcp_enabled": True}, "--dcp-size above 1 is not supported: leave it at 1, or choose flashinfer"),
        ({"attn_cp_size": 2}, "--attn-cp-size above 1 is not supported: leave it at 1, or choose fa3"),
    ],
)
def test_context_parallelism_is_refused(
    parallel: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from libmla.integrations.sglang import dense

    runner = engine.make_runner("cpu")
    sizes = SimpleNamespace(**{"dcp_enabled": False, "attn_cp_size": 1, "attn_tp_size": 1, **parallel})
    monkeypatch.setattr(dense, "get_parallel", lambda: sizes)
    with pytest.raises(ValueError, match=message):
        dense.MlaBackend(runner)


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "_"]


def test_interfaces() -> None:
    """What libmla overrides is there, and takes what SGLang gives: else an upgrade would go unnoticed."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend

    from libmla.integrations.sglang import dense, dsa, v4

    assert issubclass(dense.MlaBackend, AttentionBackend)
    for name, method in vars(AttentionBackend).items():
        if callable(method) and name in vars(dense.MlaBackend) and not name.startswith(("__", "forward")):
            ours, theirs = parameters(vars(dense.MlaBackend)[name]), parameters(method)
            assert ours[: len(theirs)] == theirs, name
    for name in ("forward_decode", "forward_extend"):
        theirs, ours = (parameters(getattr(cls, name)) for cls in (FlashInferMLAAttnBackend, dense.MlaBackend))
        assert ours[: len(theirs)] == theirs
    for cls, names in (
        (dsa.DsaBackend, ("_forward_flashmla_sparse", "_forward_standard_mha")),
        (v4.V4Backend, ("_use_sparse_prefill", "_forward_attention")),
        (v4.V4MultiStepDraftBackend, ("_make_step_backend",)),
    ):
        for name in names:
            theirs, ours = (parameters(vars(base)[name]) for base in (cls.__mro__[1], cls))
            assert set(ours) <= set(theirs) and (name == "_forward_attention" or ours == theirs), name
    # Graphs: the two hooks of the present interface, and none of the one before it, which SGLang calls no more.
    for gone in ("capture", "replay"):
        assert not hasattr(AttentionBackend, f"init_forward_metadata_{gone}_cuda_graph")
