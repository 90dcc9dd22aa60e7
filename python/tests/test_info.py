# SPDX-License-Identifier: Apache-2.0
"""Tests libmla.info() and libmla.explain(): the same data as the tool's, and how they print."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from rich.console import Console

import libmla
from libmla import cli
from libmla.info import Explanation, Gpu, Verdict
from libmla.integrations.sglang import checks as sglang_checks
from libmla.integrations.vllm import checks as vllm_checks


def tool(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([cli.tool(), *arguments, "--json"], capture_output=True, text=True, check=False)
    return json.loads(done.stdout)


def without_rates(reason: str) -> str:
    """Returns a reason without the rates that each process measures for itself."""
    return re.sub(r"\d+(?= GFLOP/s| of f32)", "some", reason)


def code_of(found: Explanation) -> dict[str, Any] | None:
    """Returns the code of a problem's GPU as the tool's JSON has it."""
    if found.code is None or found.code.arch == 0:
        return None
    code = dataclasses.asdict(found.code)
    del code["text"]
    return {**code, "arch": f"sm{found.code.arch}"}


def verdicts(found: Explanation) -> list[tuple[str, bool, str]]:
    return [(row.backend, row.usable, without_rates(row.reason)) for row in found.rows]


@pytest.fixture
def no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich", "rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)


def test_info_is_what_the_tool_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_BACKEND", raising=False)
    monkeypatch.delenv("MLA_EMULATE", raising=False)
    found, expected = libmla.info(), tool("info")
    assert found.version == libmla.__version__ == expected["version"]
    assert (found.cpu, found.threads) == (expected["cpu"], expected["threads"])
    levels = [dataclasses.asdict(level) for level in found.isa]
    for ours, theirs in zip(levels, expected["isa"], strict=True):  # each process measures its own rates
        assert (ours.pop("gflops") is None) == (theirs.pop("gflops") is None)
    assert levels == expected["isa"]
    assert verdicts(found.decode) == [
        (row["name"], row["usable"], without_rates(row["reason"])) for row in expected["backends"]
    ]
    assert [f"sm{arch}" for arch in found.emulated_archs] == expected["cuda"]["emulated_archs"]
    assert found.cuda == expected["cuda"]["error"]
    assert [gpu.name for gpu in found.gpus] == [one["name"] for one in expected["devices"][1:]]


@pytest.mark.parametrize(("variable", "value"), [("MLA_EMULATE", "sm90"), ("MLA_BACKEND", "cpu_portable")])
def test_info_heeds_the_environment(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = libmla.info().decode
    monkeypatch.setenv(variable, value)
    found, expected = libmla.info().decode, tool("info")
    assert verdicts(found) == [
        (row["name"], row["usable"], without_rates(row["reason"])) for row in expected["backends"]
    ]
    assert found.selected != usual.selected


def test_a_wrong_forced_backend_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_BACKEND", "nope")
    assert libmla.info().decode.error == tool("info")["error"]
    assert "nope" in str(libmla.info())


def test_info_is_plain_unchangeable_data() -> None:
    found = libmla.info()
    assert json.loads(json.dumps(dataclasses.asdict(found)))["decode"]["selected"] == found.decode.selected
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.threads = 3  # type: ignore[misc]
    assert found == libmla.info()


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"op": "decode"}, []),
        ({"op": "decode", "backend": "cpu_portable"}, ["--backend", "cpu_portable"]),
        ({"op": "decode", "backend": "cuda_portable"}, ["--backend", "cuda_portable"]),
        ({"op": "decode", "cache": "fp8_ds_mla", "num_heads": 16}, ["--cache", "fp8_ds_mla", "--heads", "16"]),
        ({"op": "prefill", "model": "deepseek-v3"}, ["--op", "prefill", "--model", "deepseek-v3"]),
        (
            {"op": "compress", "cache": "fp8_dsv4", "d_qk": 512, "d_v": 512},
            ["--op", "compress", "--cache", "fp8_dsv4", "--head-dims", "512/512"],
        ),
        ({"op": "decode", "device": "sm120"}, ["--device", "sm120"]),
        ({"op": "decode", "device": "emulated:sm90"}, ["--device", "emulated:sm90"]),
        ({"op": "decode", "d_qk": 7, "d_v": 5}, ["--head-dims", "7/5"]),
        ({"op": "decode", "cache": "fp8", "compute": "fp8"}, ["--cache", "fp8", "--compute", "fp8"]),
        (
            {"op": "decode", "num_heads": 16, "q_len": 2, "device": "emulated:sm90"},
            ["--heads", "16", "--q-len", "2", "--device", "emulated:sm90"],
        ),
        (
            {"op": "decode_sparse", "cache": "fp8_ds_mla", "listed_keys": 640, "device": "sm90"},
            ["--op", "decode_sparse", "--cache", "fp8_ds_mla", "--listed-keys", "640", "--device", "sm90"],
        ),
        (
            {
                "op": "indexer_logits",
                "q_dtype": "f16",
                "num_heads": 64,
                "d_qk": 128,
                "d_v": 128,
                "indexer_format": "mxfp4",
                "device": "emulated:sm90",
            },
            ["--op", "indexer_logits", "--q-dtype", "f16", "--indexer-format", "mxfp4", "--device", "emulated:sm90"],
        ),
        (
            {
                "op": "indexer_top_k",
                "q_dtype": "bf16",
                "num_heads": 121,
                "logits_dtype": "f16",
                "device": "emulated:sm90",
            },
            [
                "--op",
                "indexer_top_k",
                "--q-dtype",
                "bf16",
                "--heads",
                "121",
                "--logits-dtype",
                "f16",
                "--device",
                "emulated:sm90",
            ],
        ),
    ],
)
def test_explain_is_what_the_tool_says(
    options: dict[str, Any], arguments: list[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if options.get("device") == "emulated:sm90":
        request.getfixturevalue("emulated_sm90")
    monkeypatch.delenv("MLA_BACKEND", raising=False)
    monkeypatch.delenv("MLA_EMULATE", raising=False)
    found, expected = libmla.explain(**options), tool("explain", *arguments)
    assert (found.selected, found.error) == (expected["selected"], expected["error"])
    rows = [row._asdict() for row in found.rows]
    for row in [*rows, *expected["rows"]]:
        row["reason"] = without_rates(row["reason"])
    assert rows == expected["rows"]
    assert (found.selected is None) == (found.error is not None)
    assert (code_of(found), found.note) == (expected["code"], expected["note"])


# Of 7.5 nothing has code, 10.1 and 13.0 run PTX, 10.3 and 12.1 code of their families.
@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 101, 103, 110, 120, 121, 130])
def test_explain_of_a_gpu_says_what_the_tool_says(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_BACKEND", raising=False)
    device = f"sm{arch}"
    found, expected = libmla.explain("decode", device=device), tool("explain", "--device", device)
    assert (found.selected, found.error) == (expected["selected"], expected["error"])
    assert verdicts(found) == [
        (row["backend"], row["usable"], without_rates(row["reason"])) for row in expected["rows"]
    ]
    assert (code_of(found), found.note) == (expected["code"], expected["note"])
    text = subprocess.run([cli.tool(), "explain", "--device", device], capture_output=True, text=True, check=False)
    for words in (f" (code: {found.code})", *([f"note: {found.note}"] if found.note else [])):
        assert f"{words}\n" in f"{found}\n" and f"{words}\n" in text.stdout
    assert ("not in this build" in str(found)) == (
        found.code is not None and found.code.arch != 0 and not found.code.built
    )


def test_programs_ask_about_this_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    here = libmla.explain("decode", device="sm89", full_build=False)
    assert here.code is not None and here.code.built == (here.selected is not None) and here.note is None
    assert "not in this build" not in str(here)
    assert (vllm_checks.why_not("decode", "sm89") is None) == (here.selected is not None)
    problem = {"cache": "bf16", "q_dtype": torch.bfloat16, "num_heads": 128, "d_qk": 576, "d_v": 512}
    if here.selected is not None:
        assert sglang_checks.row("decode", device="cuda", **problem) == here.selected
    else:
        with pytest.raises(ValueError, match="no GPU code|no code for sm89"):
            sglang_checks.row("decode", device="cuda", **problem)


def test_explain_says_which_problem_it_judged() -> None:
    assert libmla.explain("prefill", model="deepseek-v3").problem == (
        "prefill: bf16 q, k and v, 128 heads, head dims 192/128, device cpu"
    )
    assert libmla.explain("decode", num_heads=1).problem == (
        "decode: cache bf16, bf16 queries, 1 head, head dims 576/512, device cpu"
    )
    assert libmla.explain("decode", q_len=2).problem == (
        "decode: cache bf16, bf16 queries, 2 per request, 128 heads, head dims 576/512, device cpu"
    )
    assert ", 1 request, device cpu" in libmla.explain("decode", num_requests=1).problem
    assert libmla.explain("prefill_sparse", listed_keys=1, num_heads=8).problem == (
        "prefill_sparse: cache bf16, bf16 queries, 8 heads, head dims 576/512, 1 listed key, device cpu"
    )
    assert libmla.explain("indexer_logits", q_dtype="e4m3", num_heads=64, indexer_format="mxfp4").problem == (
        "indexer_logits: e4m3 queries, 64 heads, head dims 576/512, keys mxfp4, device cpu"
    )
    assert libmla.explain("indexer_logits", q_dtype="e4m3", num_heads=64, logits_dtype="bf16").problem == (
        "indexer_logits: e4m3 queries, 64 heads, head dims 576/512, logits bf16, device cpu"
    )
    assert libmla.explain("decode", cache="fp8", compute="fp8").problem == (
        "decode: cache fp8, bf16 queries, 128 heads, head dims 576/512, compute fp8, device cpu"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": "encode"}, "encode"),
        ({"op": "decode", "model": "gpt-2"}, "gpt-2"),
        ({"op": "decode", "cache": "int4"}, "int4"),
        ({"op": "decode", "device": "tpu"}, "tpu"),
        ({"op": "decode", "q_len": 0}, "q_len: expected at least 1, got 0"),
        ({"op": "decode", "compute": "int8"}, 'compute: expected "default", "fp8" or "exact", got "int8"'),
    ],
)
def test_explain_refuses_names_that_nothing_has(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        libmla.explain(**options)


def test_query_rows_of_a_request_decide() -> None:
    """cuda_sm90 says of every problem why it is, or is not, its own; q_len counts."""

    def of_sm90(**problem: Any) -> Verdict:
        return libmla.explain("decode", device="emulated:sm90", **problem).rows[0]

    few, many = of_sm90(num_heads=8, q_len=2), of_sm90(num_heads=8, q_len=3)
    assert few.backend == many.backend == "cuda_sm90"
    assert few.reason == "takes requests of more than 16 query rows (tokens x heads), not 16"
    assert many.usable == (90 in libmla.info().emulated_archs)


def test_plain_text_marks_what_was_selected(no_rich: None) -> None:
    found = libmla.explain("decode", backend="cpu_portable")
    lines = str(found).splitlines()
    assert lines[0] == found.problem
    marked = [line for line in lines if line.startswith("> ")]
    assert len(marked) == 1 and marked[0].split()[1:3] == ["cpu_portable", "yes"]
    assert lines[-1] == "selected: cpu_portable"
    columns = [line.index("yes") for line in lines if "  yes  " in line]
    assert len(columns) > 1 and len(set(columns)) == 1, "columns are aligned"


def test_plain_text_says_why_nothing_was_selected(no_rich: None) -> None:
    found = libmla.explain("decode", backend="cuda_portable")
    assert found.selected is None and found.error
    assert str(found).splitlines()[-1] == f"selected: none; {found.error}"


def test_rich_prints_tables_in_a_terminal() -> None:
    console = Console(force_terminal=True, width=140, color_system="truecolor")
    found = libmla.explain("decode", backend="cpu_portable")
    with console.capture() as capture:
        console.print(found)
    text = capture.get()
    assert "\x1b[" in text and "cpu_portable" in text and "─" in text
    with console.capture() as capture:
        console.print(libmla.info())
    for part in ("libmla", "instruction set", "backend", "usable", "reason"):
        assert part in capture.get()


def test_printing_gives_rich_tables_without_colours_where_there_is_no_terminal() -> None:
    found = libmla.explain("decode", backend="cpu_portable")
    text = str(found)
    assert "\x1b[" not in text and "─" in text and found.problem in text
    assert repr(found) == text
    assert all(row.reason in text for row in found.rows), "nothing is cut or broken"


def words(text: str) -> list[str]:
    """Returns the words of a text without the lines of a table."""
    return [word for word in text.split() if set(word) - set("-─")]


def test_both_ways_print_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with_rich = str(libmla.info())
    monkeypatch.setitem(sys.modules, "rich.console", None)
    without = str(libmla.info())
    assert without != with_rich
    assert words(without) == words(with_rich)


def test_a_gpu_prints_what_tells_it_apart() -> None:
    known = Gpu("NVIDIA H200", "0000:19:00.0", "GPU-1", 0, 90, 132, 150323855360, 232448, 52428800)
    assert str(known) == "NVIDIA H200 (cuda:0, sm90, 132 SMs, 140 GiB)"
    hidden = dataclasses.replace(known, index=-1, arch=0)
    assert str(hidden) == "NVIDIA H200 (not usable by this process)"
