# SPDX-License-Identifier: Apache-2.0
"""Tests `libmla eval`: the arithmetic of its figures, what sparse attention reads, and that all combinations appear."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import libmla
from libmla import cli
from libmla._text import measure, report
from libmla._text.cases import Case, Figures, baseline
from libmla._text.select import all_keys, top_keys
from libmla.integrations.transformers import LatentQuery
from libmla.types import CacheFormat
from processes import python
from text_models import BOS, CONTEXT, write_model, write_v4_model

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TEXTS = {"first.py": "def f(x):\n    return 'é€'\n" * 9, "second.py": "import os\n" * 40, "third.py": "# 1\n"}
ATTENTIONS = ["dense", "sparse, all keys", "sparse, top 8"]
OF_512_CHANNELS = ("fp8_dsv4", "fp8_dsv41", "fp4_dsv41", "fp8_nope", "nvfp4_dsv4", "mxfp4_dsv4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "book.txt"
    file.write_bytes("".join(TEXTS.values()).encode())
    return file


def evaluate(folder: Path, text: Path, *arguments: object) -> int:
    common = ["eval", "--model", folder, "--text", text, "--threads", 1, "--top-k", 8, *arguments]
    return cli.main([str(one) for one in common])


def evaluated(folder: Path, text: Path, out: Path, *arguments: object) -> dict[str, Any]:
    """Returns the JSON document of an evaluation that exits with 0."""
    file = out / "eval.json"
    assert evaluate(folder, text, f"--json={file}", *arguments) == 0
    return json.loads(file.read_text(encoding="utf-8"))


def test_bits_per_byte_are_the_entropy_of_the_text_under_the_model(folder: Path, book: Path, tmp_path: Path) -> None:
    """The test takes the unpatched model's logits and does all else in numpy: bytes, windows, log-softmax, sums."""
    context, size = 100, 250
    data = book.read_bytes()[:size]
    windows = [data[at : at + context - 1] for at in range(0, size, context - 1)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    bits, likeliest = [], []
    for window in windows:
        logits = model(torch.tensor([[BOS, *window[:-1]]])).logits[0].numpy().astype(np.float64)
        nats = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
        bits += list((nats - logits[range(len(window)), list(window)]) / np.log(2))
        likeliest += list(logits.argmax(1))
    document = evaluated(
        folder, book, tmp_path, "--context", context, "--bytes", size, "--formats", "fp8", "--backends", "cpu"
    )
    assert (document["bytes"], document["tokens"], document["windows"]) == (size, size, 3)
    float32, own_type = document["results"][:2]
    assert (float32["backend"], own_type["backend"]) == ("transformers, float32", "transformers, bfloat16")
    assert float32["figures"]["bits_per_byte"] == pytest.approx(sum(bits) / size, rel=1e-6)
    assert float32["figures"]["agreement"] == 1 and float32["figures"]["versus_float32"] == 0

    def of(attention: str, cache: str) -> dict[str, float]:
        (found,) = (one for one in document["results"] if (one["attention"], one["cache"]) == (attention, cache))
        return found["figures"]

    bf16, fp8 = of("dense", "bf16"), of("dense", "fp8")
    of_float32 = float32["figures"]["bits_per_byte"]  # the sum above is known to the sixth digit only
    assert bf16["versus_float32"] == pytest.approx(bf16["bits_per_byte"] / of_float32 - 1, abs=1e-9)
    assert fp8["versus_bf16"] == pytest.approx(fp8["bits_per_byte"] / bf16["bits_per_byte"] - 1, abs=1e-12)
    assert bf16["versus_bf16"] == 0 and fp8["bits_per_byte"] != bf16["bits_per_byte"]
    assert 0.5 < fp8["agreement"] <= bf16["agreement"] <= 1
    assert bf16["versus_float32"] == pytest.approx(own_type["figures"]["versus_float32"], abs=3e-3)


def test_every_combination_is_measured_or_has_its_reason(folder: Path, book: Path, tmp_path: Path) -> None:
    document = evaluated(folder, book, tmp_path, "--bytes", 150, "--slow-bytes", 30)
    rows = {(one["attention"], one["cache"], one["backend"]): one for one in document["results"][2:]}
    names = libmla.backends("decode")
    assert len(document["results"]) == len(rows) + 2
    assert set(rows) == {(a, c, b) for a in ATTENTIONS for c in get_args(CacheFormat) for b in names}
    for (_, cache, backend), row in rows.items():
        assert (row["figures"] is None) == (row["reason"] is not None)
        if cache in OF_512_CHANNELS:
            assert f"rows of {cache} have 512 channels, not 576" in row["reason"] or "not on a GPU" in row["reason"]
        elif backend.startswith("cuda"):
            assert "not on a GPU" in row["reason"]
        elif backend in ("cpu_portable", "cpu_avx2", "reference"):
            assert row["figures"]["num_bytes"] == (150 if backend == "cpu_avx2" else 30)
    for (attention, cache, backend), row in rows.items():
        if row["figures"] and attention == "sparse, all keys":
            dense = rows["dense", cache, backend]["figures"]
            assert row["figures"]["bits_per_byte"] == pytest.approx(dense["bits_per_byte"], rel=1e-4)
            if row["figures"]["num_bytes"] == 150:
                top = rows["sparse, top 8", cache, backend]["figures"]
                assert top["bits_per_byte"] != pytest.approx(dense["bits_per_byte"], rel=1e-3)
        if row["figures"] and backend == "cpu_portable":
            same = rows[attention, cache, "reference"]["figures"]
            assert row["figures"]["bits_per_byte"] == pytest.approx(same["bits_per_byte"], rel=2e-3)


def test_a_model_with_a_window_and_a_pool(tmp_path: Path, book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek V4 attends in one way, with one format for both pools or with one for each."""
    folder = write_v4_model(tmp_path / "v4")
    options = ("--bytes", 150, "--slow-bytes", 30, "--limit", 50)
    document = evaluated(folder, book, tmp_path, *options)
    rows = {(one["cache"], one["backend"]): one for one in document["results"][2:]}
    formats = [*get_args(CacheFormat), "fp8_dsv41+fp4_dsv41"]
    assert set(rows) == set(product(formats, libmla.backends("decode_sparse")))
    assert len(document["results"]) == len(rows) + 2
    assert {one["attention"] for one in document["results"][2:]} == {"window and pool"}
    absent = {f"cpu_{one.name}" for one in libmla.info().isa if not (one.cpu_has and one.os_allows and one.built)}
    for (cache, backend), row in rows.items():
        if backend.startswith("cuda"):
            assert "not on a GPU" in row["reason"]
        elif "ds_mla" in cache:
            assert f"rows of {cache} have 576 channels, not 512" in row["reason"]
        elif backend in absent:
            assert row["figures"] is None and row["reason"]
        else:
            assert abs(row["figures"]["versus_bf16"]) < 0.2
    fp8, fp4, both = (
        rows[cache, "cpu_avx2"]["figures"]["bits_per_byte"]
        for cache in ("fp8_dsv41", "fp4_dsv41", "fp8_dsv41+fp4_dsv41")
    )
    assert len({fp8, fp4, both}) == 3
    # The limit is for fp8 alone.
    limited = ("--bytes", 90, "--backends", "cpu_avx2", "--limit", -50)
    assert evaluate(folder, book, *limited, "--formats", "fp8_dsv41+fp4_dsv41") == 0
    assert evaluate(folder, book, *limited, "--formats", "fp8_dsv41+fp8_nope") == 1
    capsys.readouterr()
    for names, message in (
        ("fp8+fp8+fp8", "--formats: expected two formats, of the window and the pool, got 'fp8+fp8+fp8'"),
        ("fp8_dsv41+fp5", "--formats: expected names out of bf16, "),
    ):
        assert evaluate(folder, book, "--formats", names) == 2
        assert f"libmla eval: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_the_same_each_time(folder: Path, book: Path, tmp_path: Path, device: str) -> None:
    options = ("--bytes", 120, "--device", device, "--backends", "cpu" if device == "cpu" else "cuda")
    first, second = (evaluated(folder, book, tmp_path, *options) for _ in range(2))
    assert first == second
    assert any(one["figures"] for one in first["results"][2:])


def test_the_kernels_of_a_gpu_can_be_measured_in_the_emulator(folder: Path, book: Path, tmp_path: Path) -> None:
    if 90 not in libmla.info().emulated_archs:
        pytest.skip("this build emulates no sm90")
    options = ("--bytes", 60, "--slow-bytes", 12, "--device", "emulated:sm90", "--backends", "cuda", "--formats", "fp8")
    document = evaluated(folder, book, tmp_path, *options)
    measured = [one for one in document["results"][2:] if one["figures"]]
    assert len(measured) == 2 * len(ATTENTIONS)
    assert all(abs(one["figures"]["versus_float32"]) < 0.05 for one in measured)


def test_e4m3_products_are_measured_over_quantized_caches(folder: Path, book: Path, tmp_path: Path) -> None:
    options = ("--bytes", 60, "--backends", "cpu_avx2,reference")
    rounded = evaluated(folder, book, tmp_path, *options, "--compute", "fp8")
    quantized = [name for name in get_args(CacheFormat) if name not in ("bf16", "f16")]
    usual = evaluated(folder, book, tmp_path, *options, "--formats", ",".join(quantized))
    assert (rounded["compute"], usual["compute"]) == ("fp8", "default")
    assert len(rounded["results"]) == len(usual["results"])
    for one, other in zip(rounded["results"], usual["results"], strict=True):
        assert [one[key] for key in ("attention", "cache", "backend")] == [
            other[key] for key in ("attention", "cache", "backend")
        ]
        assert other["compute"] == "default"
        if one["cache"] not in quantized:
            assert one == other
        elif one["backend"] == "cpu_avx2":
            assert one["compute"] == "fp8" and one["figures"] is None
            assert "not those of compute fp8" in one["reason"]
        elif one["cache"] in OF_512_CHANNELS:
            assert one["compute"] == "fp8" and one["reason"] == other["reason"]
        else:
            largest = 0.5 if "fp4" in one["cache"] else 0.1
            assert one["compute"] == "fp8" and abs(one["figures"]["versus_bf16"]) < largest
            assert one["figures"]["bits_per_byte"] != other["figures"]["bits_per_byte"]


@pytest.mark.parametrize("limit", [50.0, -50.0])
def test_the_exit_status_tells_whether_fp8_costs_too_much(
    folder: Path, book: Path, limit: float, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--bytes", 90, "--formats", "fp8", "--backends", "cpu", "--limit", limit, "--json")
    assert evaluate(folder, book, *options) == (1 if limit < 0 else 0)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["within_limit"] is (limit > 0)
    assert captured.err.count("over the limit of -50 %: dense; fp8; cpu\n") == (limit < 0)


class _Pairs:
    """Stands for a tokenizer without a first token, whose tokens are two characters."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(text[at]) for at in range(0, len(text), 2)]}


def test_windows_take_turns_between_texts_and_overlap_by_the_token_that_is_given() -> None:
    texts = ["abcdefghijkl", "ABCD", "€€€€"]
    found = measure.sample(texts, _Pairs(), context=3, num_bytes=1000)
    letters = ["".join(map(chr, window.tolist())) for window in found.windows]
    assert letters == ["ac", "AC", "€€", "ceg", "gik"]
    assert found.predicted == 7
    assert found.bytes_per_token == 28 / 10 and found.num_bytes == round(7 * 2.8)
    head = found.head(round(4 * 2.8) + 1)
    assert ["".join(map(chr, window.tolist())) for window in head.windows] == ["ac", "AC", "€€", "ce"]
    # Enough text for one window of each is enough.
    assert len(measure.sample(iter(texts), _Pairs(), context=3, num_bytes=2).windows) == 1


def test_scores_of_a_head_are_the_first_scores() -> None:
    sample = measure.Sample((torch.tensor([1, 2, 3, 4]), torch.tensor([1, 5, 6])), 2.0)
    bits = (torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([10.0, 20.0]).double())
    greedy = (torch.tensor([2, 3, 9]), torch.tensor([5, 9]))
    scores = measure.Scores(bits, greedy)
    assert scores.bits_per_byte(sample) == 36 / 5 / 2
    head = sample.head(8)
    assert scores.head_of(head).bits_per_byte(head) == 16 / 4 / 2
    other = measure.Scores(bits, (torch.tensor([2, 3, 4]), torch.tensor([5, 6])))
    assert scores.agreement(other) == 3 / 5


def test_backends_without_a_bf16_cache_are_compared_with_the_first_that_read_as_much() -> None:
    def read(count: int) -> measure.Scores:
        return measure.Scores((torch.ones(count).double(),), (torch.ones(count).long(),))

    sample = measure.Sample((torch.arange(5),), 1.0)
    found = {"short": read(3), "long": read(9), "own": read(4)}
    assert baseline(found, "own", sample) is found["own"]
    assert [len(bits) for bits in baseline(found, "other", sample).bits] == [4]
    assert baseline({"short": read(3)}, "other", sample) is None


def query(heads: int = 3) -> tuple[LatentQuery, np.ndarray, list[np.ndarray]]:
    """Returns queries and the rows of their requests: 5 of 7 and 2 of 2 tokens of two requests are queries.

    Pages have 2 tokens, and NaN stands wherever no token is.
    """
    tables, kv_len, q_len = [[4, 0, 3, 6], [5]], [7, 2], [5, 2]
    rows = [torch.randn(length, 576).bfloat16() for length in kv_len]
    cache = torch.full((8, 2, 576), torch.nan).bfloat16()
    for table, own in zip(tables, rows, strict=True):
        for token, row in enumerate(own):
            cache[table[token // 2], token % 2] = row
    q = torch.randn(sum(q_len), heads, 576).bfloat16()
    made = LatentQuery(
        layer=0,
        q_nope=q[..., :512],
        q_pe=q[..., 512:],
        sm_scale=0.05,
        positions=torch.tensor([2, 3, 4, 5, 6, 0, 1]),
        qo_indptr=torch.tensor([0, 5, 7], dtype=torch.int32),
        kv_len=torch.tensor(kv_len, dtype=torch.int32),
        block_table=torch.tensor([[4, 0, 3, 6], [5, 2**31 - 1, 2**31 - 1, -1]], dtype=torch.int32),
        cache=cache,
        page_size=2,
    )
    return made, q.double().numpy(), [row.double().numpy() for row in rows]


def test_all_keys_are_those_up_to_the_query() -> None:
    made, _, _ = query()
    chosen = all_keys(made)
    assert chosen.dtype == torch.int32 and chosen.shape == (7, 7)
    for position, row in zip(made.positions.tolist(), chosen.tolist(), strict=True):
        assert row == [*range(position + 1), *[-1] * (6 - position)]


@pytest.mark.parametrize("count", [1, 3, 6])
def test_top_keys_are_those_of_the_largest_weight(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libmla._text.select._SCORES_AT_ONCE", 40)  # one or a few queries at a time
    made, q, rows = query()
    chosen = top_keys(count)(made)
    assert chosen.dtype == torch.int32 and chosen.shape == (7, count)
    for at, row in enumerate(chosen.tolist()):
        request, position = int(at >= 5), int(made.positions[at])
        scores = np.exp(0.05 * q[at] @ rows[request][: position + 1].T)
        weights = (scores / scores.sum(1, keepdims=True)).sum(0)
        expected = sorted(np.argsort(-weights)[:count].tolist())
        assert row == expected + [-1] * (count - len(expected))


def test_tables_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        Case("dense", "-", "transformers, float32", Figures(100, 1.25, 0.0, None, 1.0)),
        Case("dense", "fp8", "cpu_avx2", Figures(100, 1.25126, 0.001, -0.00001, 0.995)),
        Case("dense", "fp8", "reference", Figures(50, 1.5, 0.2, 0.2, 0.9), compute="fp8"),
        Case("dense", "fp8", "cuda_x", reason="no GPU"),
        Case("dense", "bf16", "cuda_x", reason="no GPU"),
    ]
    report.print_table(cases, markdown=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| attention | cache | backend |") and lines[1].count("---:") == 5
    assert lines[3] == "| dense | fp8 | cpu_avx2 | 100 | 1.2513 | +0.10 % | +0.00 % | 99.50 % |"
    assert lines[4].startswith("| dense | fp8, compute fp8 | reference | 50 | 1.5000 |")
    assert lines[5:] == ["", "Not measured:", "", "- dense; fp8 / bf16; cuda_x: no GPU"]
    report.print_table(cases, markdown=False)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[3].split()) == "dense fp8 cpu_avx2 100 1.2513 +0.10 % +0.00 % 99.50 %"
    assert len({len(line) for line in lines[:5]}) == 1
    assert lines[5] == "not measured: dense; fp8 / bf16; cuda_x: no GPU"
    assert "1.2513" in str(report.rich_table(cases).columns[4]._cells)


def test_what_cannot_be_measured_is_refused_in_one_line(
    folder: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object, text: Path = book, model: Path = folder) -> str:
        assert evaluate(model, text, *arguments) == 2
        captured = capsys.readouterr()
        line = captured.err.removesuffix("\n")
        assert captured.out == "" and line.startswith("libmla eval: ") and "\n" not in line
        return line

    assert "--formats: expected names out of bf16" in refused("--formats", "fp4")
    refusal = "--formats: expected one format, as there is one cache, got 'fp8+fp8'"
    assert refusal in refused("--formats", "fp8+fp8")
    refusal = "--compute: expected default, since f16 caches are not quantized, got fp8"
    assert refusal in refused("--compute", "fp8", "--formats", "fp8,f16")
    assert "--backends: expected names out of" in refused("--backends", "cpu_mmx")
    assert f"--context: expected 2 to {CONTEXT}, got 257" in refused("--context", CONTEXT + 1)
    assert "--context: expected 2" in refused("--context", 1)
    assert "neither" in refused(text=tmp_path / "missing")
    assert "got none" in refused(text=tmp_path)
    (tmp_path / "latin").write_bytes(b"\xe9")
    assert "UTF-8" in refused(text=tmp_path / "latin")
    assert "there is none" in refused(model=tmp_path / "missing")


def test_without_torch_the_message_says_what_to_install(tmp_path: Path) -> None:
    done = python("-m", "libmla", "eval", "--model", os.fspath(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert "pip install 'libmla[transformers]'" in done.stderr and done.stderr.count("\n") == 1
