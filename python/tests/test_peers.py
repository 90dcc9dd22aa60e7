# SPDX-License-Identifier: Apache-2.0
"""Tests bench/peers on a CPU: libmla's drop-ins stand for FlashMLA and FlashInfer, plain torch for the other peers."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import libmla
from libmla._bench import peers as readings

FOLDER = Path(__file__).parents[2] / "bench" / "peers"
MODULES = ("cases", "problems", "peers", "turns", "__main__")
SMALL = [
    ("decode", "decode", {"batch": 2, "q_len": 1, "heads": 3, "kv_len": 70}),
    ("decode", "decode, two queries", {"batch": 2, "q_len": 2, "heads": 4, "kv_len": 65}),
    ("decode", "ragged decode", {"batch": 5, "q_len": 1, "heads": 3, "kv_len": 70, "ragged": True}),
    ("decode", "decode fp8", {"batch": 1, "q_len": 1, "heads": 2, "kv_len": 100, "cache": "fp8"}),
    (
        "decode_sparse",
        "rows of 656 bytes",
        {"batch": 2, "heads": 2, "cache": "fp8_ds_mla", "topk": 64, "extra_topk": 0},
    ),
    ("decode_sparse", "two pools", {"batch": 2, "heads": 2, "cache": "fp8_dsv4", "topk": 64, "extra_topk": 32}),
    ("prefill_sparse", "sparse prefill", {"queries": 70, "keys": 90, "heads": 2, "topk": 32, "d_qk": 576}),
    ("prefill", "prefill", {"batch": 2, "length": 33, "heads": 2}),
    ("indexer_logits", "indexer", {"batch": 2, "q_len": 2, "kv_len": 80, "heads": 4}),
    ("indexer_logits", "exact indexer", {"batch": 1, "q_len": 1, "kv_len": 70, "heads": 4, "compute": "exact"}),
]
# Which peers compute which of these cases.
EXPECTED = {
    "decode": {"FlashMLA", "FlashInfer fa3", "FlashInfer fa2", "vLLM's Triton kernel"},
    "decode, two queries": {"FlashMLA", "FlashInfer fa3", "FlashInfer fa2"},
    "ragged decode": {"FlashMLA", "FlashInfer fa3", "FlashInfer fa2", "vLLM's Triton kernel"},
    "decode fp8": {"FlashInfer fa3"},
    "rows of 656 bytes": {"FlashMLA"},
    "two pools": {"FlashMLA"},
    "sparse prefill": {"FlashMLA"},
    "prefill": {"FlashAttention-3", "cuDNN"},
    "indexer": {"DeepGEMM"},
    "exact indexer": {"DeepGEMM"},
}


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [H, D], k [H or 1, N, D], v [H or 1, N, D_v] -> [H, D_v] in float64."""
    logits = (k.double() @ q.double().unsqueeze(2)).squeeze(2) * scale
    return (logits.softmax(1).unsqueeze(1) @ v.double()).squeeze(1)


def decode_attention_fwd(
    q: Any, k_buffer: Any, v_buffer: Any, o: Any, lse: Any, req_to_token: Any, b_seq_len: Any, attn_logits: Any,
    num_kv_splits: int, sm_scale: float, page_size: int = 1, logit_cap: float = 0.0, k_scale: Any = None,
    v_scale: Any = None, is_mla: bool = False,
) -> None:  # fmt: skip
    assert is_mla and attn_logits.shape[2] == num_kv_splits and k_buffer.shape[1] == page_size
    for b, (pages, length) in enumerate(zip(req_to_token, b_seq_len, strict=True)):
        rows = (buffer[pages.long(), :, 0].flatten(0, 1)[:length][None] for buffer in (k_buffer, v_buffer))
        o[b] = softmax_attention(q[b], *rows, sm_scale)


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert causal and softmax_scale is not None and max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    out = torch.empty_like(v)
    for begin, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        for i in range(begin, end):
            keys, values = (one[begin : i + 1].transpose(0, 1) for one in (k, v))
            out[i] = softmax_attention(q[i], keys, values, softmax_scale)
    return out


def fp8_paged_mqa_logits(
    q: Any, kv_cache: Any, weights: Any, context_lens: Any, block_table: Any, schedule_meta: Any, max_context_len: int,
    clean_logits: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert schedule_meta == ("metadata", 64, 132) and kv_cache.shape[1:] == (64, 1, 132) and not clean_logits
    batch, q_len, _, d = q.shape
    logits = torch.full((batch * q_len, max_context_len), math.nan)
    for b in range(batch):
        pages = kv_cache[block_table[b].long()].reshape(block_table.shape[1], -1)
        keys = pages[:, : 64 * d].contiguous().view(torch.float8_e4m3fn).double().view(-1, d)
        scales = pages[:, 64 * d :].contiguous().view(torch.float32).double().flatten()
        for t in range(q_len):
            end = int(context_lens[b, t])
            products = (q[b, t].double() @ keys[:end].T).relu()
            logits[b * q_len + t, :end] = (weights[b * q_len + t].double() @ products * scales[:end]).float()
    return logits


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(contents)
    return made


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The command with small cases, where every peer is installed."""
    importlib.import_module("libmla.flash_mla")
    importlib.import_module("libmla.flashinfer.mla")
    triton = "vllm.v1.attention.ops.triton_decode_attention"
    stand_ins = {
        "flash_mla": sys.modules["libmla.flash_mla"],
        "flashinfer": sys.modules["libmla.flashinfer"],
        "flashinfer.mla": sys.modules["libmla.flashinfer.mla"],
        triton: module(triton, decode_attention_fwd=decode_attention_fwd),
        "flash_attn_interface": module("flash_attn_interface", flash_attn_varlen_func=flash_attn_varlen_func),
        "deep_gemm": module(
            "deep_gemm", get_num_sms=lambda: 132, fp8_paged_mqa_logits=fp8_paged_mqa_logits,
            get_paged_mqa_logits_metadata=lambda _, page_size, num_sms: ("metadata", page_size, num_sms),
            __version__="1.2.3",
        ),
    }  # fmt: skip
    for end in range(1, triton.count(".") + 1):
        package = ".".join(triton.split(".")[:end])
        stand_ins[package] = module(package, __path__=[])
    for name, one in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, one)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda _: contextlib.nullcontext())
    monkeypatch.syspath_prepend(FOLDER)
    before = {name: sys.modules.pop(name, None) for name in MODULES[:-1]}
    spec = importlib.util.spec_from_file_location("bench_peers", FOLDER / "__main__.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    monkeypatch.setattr(sys.modules["problems"].DecodeSparse, "POOL_TOKENS", 256)
    found.ALL_CASES = found.CASES
    found.CASES = [found.Case(f"group of {operation}", name, operation, shape) for operation, name, shape in SMALL]
    yield found
    for name, one in before.items():
        sys.modules.pop(name, None)
        if one is not None:
            sys.modules[name] = one


def test_every_peer_is_called_as_it_wants_to_be(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "readings.json"
    arguments = ["--device", "cpu", "--rounds", "2", "--out", str(out), "--chart", str(tmp_path)]
    assert script.main(arguments) == 0, capsys.readouterr().out
    document = json.loads(out.read_text(encoding="utf-8"))
    parsed = readings.parse_peers(document, "readings", "readings.json")
    found: dict[str, set[str]] = {}
    for group in parsed.groups:
        for case in group.cases:
            found.setdefault(case.case, set()).add(group.peer)
    assert found == EXPECTED
    assert set(parsed.peers) == set.union(*EXPECTED.values()) and parsed.peers["DeepGEMM"] == "1.2.3"
    assert {path.name for path in tmp_path.iterdir()} >= {"readings-peers.svg", "readings-peers-dark.svg"}
    text = capsys.readouterr().out
    assert "FAILED" not in text and "does not run it" not in text
    (row,) = [row for row in text.splitlines() if row.startswith("group of indexer_logits  ")]
    assert row.split()[3:5] == ["DeepGEMM", "2"]


def test_outputs_that_differ_are_no_reading(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*values: Any, **named: Any) -> torch.Tensor:
        return flash_attn_varlen_func(*values, **named) * 1.1

    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_varlen_func", wrong)
    out = tmp_path / "readings.json"
    assert script.main(["--device", "cpu", "--rounds", "1", "--case", "prefill, prefill", "--out", str(out)]) == 1
    assert (
        "FlashAttention-3 FAILED: ArithmeticError: the outputs differ by 0.1 of their norm" in capsys.readouterr().out
    )
    assert [group["peer"] for group in json.loads(out.read_text(encoding="utf-8"))["groups"]] == ["cuDNN"]


@pytest.mark.parametrize(("operation", "name", "shape"), SMALL)
def test_outputs_of_zeros_are_zero(script: ModuleType, operation: str, name: str, shape: dict[str, Any]) -> None:
    problem = script.PROBLEMS[operation](torch.device("cpu"), **shape)
    side = problem.libmla()
    assert side.output().count_nonzero() > 0
    for tensor in problem.key_tensors():
        tensor.view(torch.uint8).zero_()
    assert side.output().count_nonzero() == 0, name


def test_keys_become_zeros_once_outputs_have_been_compared(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[Any] = []
    kind = script.PROBLEMS["prefill_sparse"]
    make = kind.__init__

    def remember(self: Any, *values: Any, **named: Any) -> None:
        make(self, *values, **named)
        problems.append(self)

    at_comparison: list[int] = []
    difference = script.difference

    def compare(*outputs: torch.Tensor) -> float:
        at_comparison.append(int(problems[-1].kv.count_nonzero()))
        return difference(*outputs)

    monkeypatch.setattr(kind, "__init__", remember)
    monkeypatch.setattr(script, "difference", compare)
    out = tmp_path / "readings.json"
    arguments = ["--device", "cpu", "--rounds", "1", "--case", "sparse prefill", "--zeros", "--out", str(out)]
    assert script.main(arguments) == 0
    assert len(at_comparison) == 1 and at_comparison[0] > 0
    (compared,) = (one for one in problems if one.kv.count_nonzero() == 0)
    assert compared.kv.numel() == at_comparison[0]
    assert "keys and values are 0" in json.loads(out.read_text(encoding="utf-8"))["method"]


def test_a_peer_that_refuses_does_not_stop_the_others(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("only for another GPU")

    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_varlen_func", refuses)
    assert script.main(["--device", "cpu", "--rounds", "1", "--case", "prefill, prefill"]) == 0
    text = capsys.readouterr().out
    assert "FlashAttention-3 does not run it: RuntimeError: only for another GPU" in text and "cuDNN 0." not in text
    assert "cuDNN" in text


def test_a_peer_that_is_missing_is_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert script.main(["--peer", "DeepGEMM", "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert "DeepGEMM is not installed: ModuleNotFoundError: " in said.out and "DeepGEMM)" in said.out
    assert said.err == "bench/peers: there is no peer to measure\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "FlashMLa"], "--peer: expected one of FlashMLA, FlashInfer fa3, "),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--device", "cpu", "--sustained", "2"], "--sustained: needs a GPU"),
        (["--device", "gpu"], "--device: expected cuda, cuda:N or cpu, got gpu"),
        (["--device", "cpu", "--out", "nowhere/a.json"], "--out: there is no folder /"),
        (["--device", "cpu", "--chart", "x"], "--chart: draws the file of --out, which is missing"),
    ],
)
def test_mistakes_are_told(
    script: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_what_the_scripts_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    spec = importlib.util.spec_from_file_location("bench_peers", FOLDER / "__main__.py")
    with pytest.raises(SystemExit, match="bench/peers: .*torch.* It needs torch, and libmla"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_cases_are_those_of_the_chart(script: ModuleType) -> None:
    names = [(case.group, case.name) for case in script.ALL_CASES]
    assert len(names) == len({*names})
    assert {case.operation for case in script.ALL_CASES} == {operation for operation, _, _ in SMALL}
    assert libmla.page_bytes("fp8_dsv4", 512, 64) == 64 * 584  # FlashMLA's pages are libmla's
