# SPDX-License-Identifier: Apache-2.0
"""Tests `libmla generate`: the text, where it goes, and what bad input gets."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM

from fake_hub import fake_hub
from libmla import cli
from libmla._text import options as text_options
from libmla._text.generate import Stream
from processes import python
from text_models import BOS, CONTEXT, write_model, write_model_without_latents

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def generate(*arguments: object) -> int:
    given = [str(one) for one in arguments]
    return cli.main(["generate", *([] if "--device" in given else ["--device", DEVICE]), "--threads", "1", *given])


def test_models_that_came_with_the_package(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the names that they have in the sources, which are like names on the hub; what is here goes first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text_options, "_SHIPPED", folder.parents[1])
    name = f"{folder.parent.name}/{folder.name}"
    assert text_options.folder_of(name) == folder
    (tmp_path / name).mkdir(parents=True)
    assert text_options.folder_of(name) == Path(name)


def test_greedy_text_is_that_of_the_unpatched_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The arithmetic is the model's own in f32, and so are its likeliest tokens."""
    options = (
        "--model",
        folder,
        "--max-new-tokens",
        12,
        "--temperature",
        0,
        "--dtype",
        "f32",
        "--cache",
        "bf16",
        "def ",
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()
    prompt = torch.tensor([[BOS, *b"def "]], device=DEVICE)
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)[0, 1:]
    expected = bytes(token for token in tokens.tolist() if token < 256).decode(errors="replace")
    capsys.readouterr()
    for more in ((), ("--no-patch",)):
        assert generate(*options, *more) == 0
        captured = capsys.readouterr()
        assert captured.out == expected + "\n"
        assert captured.err.startswith("prompt: 5 tokens, ") and "; decode: " in captured.err


def test_a_seed_draws_the_same_text_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in (1, 1, 2):
        assert generate("--model", folder, "--max-new-tokens", 16, "--seed", seed, "--temperature", 2, "x") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_json_holds_what_was_made(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", folder, "--max-new-tokens", 8, "--temperature", 0, "--cache", "fp8_ds_mla", "--json")
    assert generate(*arguments, "ab") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err.startswith("ab" + document["text"])
    expected = {
        "prompt": "ab",
        "prompt_tokens": 3,
        "cache": "fp8_ds_mla",
        "patched": True,
        "dtype": "bfloat16",
        "seed": 0,
    }
    assert expected.items() <= document.items()
    assert 2 <= document["new_tokens"] <= 8 and document["prompt_seconds"] > 0
    speed = (document["new_tokens"] - 1) / document["decode_seconds"]
    assert document["decode_tokens_per_second"] == pytest.approx(speed)

    file = tmp_path / "out.json"
    assert generate(*arguments[:-1], f"--json={file}", "ab") == 0
    assert capsys.readouterr().out == "ab" + document["text"] + "\n"
    assert json.loads(file.read_text(encoding="utf-8"))["text"] == document["text"]


def test_a_model_of_the_hub_is_downloaded_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--max-new-tokens", 2, "--temperature", 0, "ab")
    assert generate("--model", folder, *options) == 0
    expected = capsys.readouterr().out
    cache = tmp_path / "cache"
    with fake_hub("some-lab/Tiny.MLA", folder, cache, monkeypatch):
        # What is wrong without weights is known without them.
        refused(capsys, "--model", "some-lab/Tiny.MLA", "--max-new-tokens", CONTEXT + 1, "x")
        assert [*cache.rglob("config.json")] and not [*cache.rglob("*.safetensors")]
        assert "on the Hugging Face hub no model of that name" in refused(capsys, "--model", "some-lab/Huge", "x")
        assert generate("--model", "some-lab/Tiny.MLA", *options) == 0
        assert capsys.readouterr().out == expected
    # From here on there is no hub.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert generate("--model", "some-lab/Tiny.MLA", *options) == 0
    assert capsys.readouterr().out == expected
    message = refused(capsys, "--model", "some-lab/Other", "x")
    assert "there is no folder 'some-lab/Other', and the Hugging Face hub cannot be reached from here" in message
    assert "run `hf download some-lab/Other --local-dir Other`" in message


def test_prompts_come_from_files_and_standard_input(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt").write_text("é\n", encoding="utf-8")
    options = ("--model", folder, "--max-new-tokens", 2, "--temperature", 0)
    assert generate(*options, "é\n") == 0
    expected = capsys.readouterr().out
    assert generate(*options, "--prompt-file", tmp_path / "prompt") == 0
    assert capsys.readouterr().out == expected
    for more in ((), ("--prompt-file", "-")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("é\n"))
        assert generate(*options, *more) == 0
        assert capsys.readouterr().out == expected


class _Bytes:
    """Has the part of a tokenizer that streams need: tokens are bytes, 256 and more are special."""

    @staticmethod
    def decode(tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


@pytest.mark.parametrize("text", ["plain", "é€𝄞 mixed ñ", "𝄞" * 9])
def test_a_stream_writes_whole_characters_once(text: str) -> None:
    pieces: list[str] = []
    out = io.StringIO()
    out.write = lambda piece: pieces.append(piece) or len(piece)  # type: ignore[method-assign]
    times = iter(range(1000))
    stream = Stream(_Bytes, out, clock=lambda: float(next(times)))
    stream.put(torch.tensor([[BOS, *"é".encode()]]))
    for byte in text.encode():
        stream.put(torch.tensor([byte]))
    stream.end()
    assert "".join(pieces) == text == stream.text
    assert all("\ufffd" not in piece for piece in pieces)
    assert stream.times == [float(i + 1) for i in range(len(text.encode()))]


def test_a_stream_shows_what_is_no_text_at_the_end() -> None:
    out = io.StringIO()
    stream = Stream(_Bytes, out)
    for tokens in ([[BOS]], [0x61], [0xC3]):
        stream.put(torch.tensor(tokens))
    assert out.getvalue() == "a"
    stream.end()
    assert out.getvalue() == "a\ufffd"


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Returns the message of a refusal, which is one line and nothing else."""
    try:
        status = generate(*arguments)
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.removesuffix("\n")
    assert line.startswith("libmla generate: ") and "\n" not in line
    return line


def test_what_cannot_be_run_is_refused_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is none" in refused(capsys, "--model", tmp_path / "missing", "x")
    assert "there is none" in refused(capsys, "--model", "three/part/name", "x")
    assert "config.json" in refused(capsys, "--model", tmp_path, "x")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert "cannot read a config" in refused(capsys, "--model", tmp_path, "x")
    assert "cache_format" in refused(capsys, "--model", folder, "--cache", "fp4", "x")
    assert "fp8_dsv4" in refused(capsys, "--model", folder, "--cache", "fp8_dsv4", "x")
    assert "backend" in refused(capsys, "--model", folder, "--backend", "cpu_mmx", "x")
    assert "--prompt-file: cannot read" in refused(capsys, "--model", folder, "--prompt-file", tmp_path / "none")
    assert "leave out one" in refused(capsys, "--model", folder, "--prompt-file", "-", "x")
    too_long = refused(capsys, "--model", folder, "--max-new-tokens", CONTEXT, "x")
    assert f"expected {CONTEXT - 2} or fewer after a prompt of 2 tokens" in too_long
    assert "expected cpu, cuda" in refused(capsys, "--model", folder, "--device", "tpu", "x")
    assert "cuda:99" in refused(capsys, "--model", folder, "--device", "cuda:99", "x")
    assert "cannot write" in refused(capsys, "--model", folder, f"--json={tmp_path / 'none' / 'file'}", "x")


def test_without_a_gpu_cuda_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "use --device cpu" in refused(capsys, "--model", folder, "--device", "cuda", "x")


def test_a_model_without_latents_runs_unpatched_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model_without_latents(tmp_path)
    message = refused(capsys, "--model", folder, "x")
    assert "multi-head latent attention" in message and "got llama" in message
    assert generate("--model", folder, "--no-patch", "--max-new-tokens", 2, "x") == 0


@pytest.mark.parametrize(
    "option",
    [
        ("--max-new-tokens", "0"),
        ("--temperature", "-1"),
        ("--top-p", "0"),
        ("--num-threads", "x"),
        ("--page-size", "0"),
    ],
)
def test_numbers_out_of_range_are_refused(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["generate", "--model", ".", *option, "x"])
    error = capsys.readouterr().err
    assert raised.value.code == 2 and f"argument {option[0]}" in error and ": expected" in error


def test_without_torch_the_message_says_what_to_install(tmp_path: Path) -> None:
    done = python("-m", "libmla", "generate", "--model", os.fspath(tmp_path), "x")
    assert done.returncode == 2 and done.stdout == ""
    assert "pip install 'libmla[transformers]'" in done.stderr and done.stderr.count("\n") == 1


def test_help_lists_the_commands_that_run_models(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capfd.readouterr().out
    assert "\n  generate " in text and "\n  eval " in text


def test_help_has_examples() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "libmla", "generate", "--help"], capture_output=True, text=True, check=True
    )
    assert 'libmla generate --model examples/tiny-mla "def "' in done.stdout
