# SPDX-License-Identifier: Apache-2.0
"""Tests the examples' language models: the rule that holds files out, its tokenizer, training, and what it learned."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import text_models
from libmla import Context
from libmla._text import corpus, measure
from libmla.integrations.transformers import patch
from text_models import EXAMPLE, EXAMPLE_V4

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module")
def example() -> Iterator[None]:
    with text_models.example():
        yield


@pytest.fixture(scope="module")
def train(example: None) -> ModuleType:
    """Returns the training script, as a module."""
    import train

    return train


def write(root: Path, texts: dict[str, bytes]) -> Path:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    return root


def test_a_path_alone_decides_which_part_a_file_is_in(tmp_path: Path) -> None:
    # By sha256 of the path: a change of this rule would let the model be measured on what it was trained on.
    assert all(map(corpus.is_held_out, ["asyncio/locks.py", "collections/abc.py", "distutils/core.py"]))
    assert not any(map(corpus.is_held_out, ["asyncio/exceptions.py", "json/encoder.py", "token.py"]))
    names = [f"part{i % 7}/file{i}.py" for i in range(400)]
    root = write(tmp_path, {name: name.encode() for name in names})
    parts = {split: list(corpus.documents(root, split)) for split in ("train", "held-out")}
    assert sorted(name for part in parts.values() for name, _ in part) == sorted(names)
    assert all(corpus.is_held_out(name) and text == name for name, text in parts["held-out"])
    assert 5 <= len(parts["held-out"]) <= 40
    # The order is by hash too: folders are mixed, and another file changes nothing about the others.
    order = [name for name, _ in parts["train"]]
    assert order != sorted(order)
    write(tmp_path, {"new.py": b"x"})
    assert [name for name, _ in corpus.documents(root, "train") if name != "new.py"] == order


def test_only_sources_of_the_folder_itself_are_read(tmp_path: Path) -> None:
    names = [name for name in (f"{i}.py" for i in range(60)) if not corpus.is_held_out(name)][:2]
    root = write(
        tmp_path,
        {names[0]: "é".encode(), names[1]: b"\xe9", "empty.py": b"", "notes.txt": b"x", "site-packages/a/b.py": b"x"},
    )
    assert list(corpus.documents(root, "train")) == [(names[0], "é")]
    assert list(corpus.documents(root / "notes.txt", "held-out")) == [("notes.txt", "x")]
    with pytest.raises(corpus.NoText, match="got none"):
        list(corpus.documents(root, "train", "*.c"))
    with pytest.raises(corpus.NoText, match="neither"):
        list(corpus.documents(root / "missing", "train"))


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn  'é€𝄞'\r\n", "".join(map(chr, range(1, 0x250))), " lead, trail "]
)
def test_the_tokenizer_reads_bytes(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    tokens = tokenizer(text)["input_ids"]
    assert tokens == [tokenizer.bos_token_id, *text.encode()]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)


# What each kind of attention needs at least: V4 attends in blocks of its window, and to rows of 64 rotary channels.
LEAST = {
    "deepseek-v3": {"context": 32, "latent": 64, "layers": 1},
    "deepseek-v4": {"context": 128, "latent": 128, "layers": 2},
}


def settings(train: ModuleType, shape: str, **changes: object) -> object:
    small = train.Settings(
        shape=shape,
        seed=3,
        batch=2,
        hidden=32,
        intermediate=32,
        heads=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        dropout=0.2,
        **LEAST[shape],
    )
    return dataclasses.replace(small, **changes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", LEAST)
def test_a_training_goes_on_where_its_checkpoint_stands(
    train: ModuleType, tmp_path: Path, shape: str, device: str
) -> None:
    tokens = torch.randint(97, 123, (500,), dtype=torch.int16).to(device)

    def steps(trainer: object, number: int) -> list[float]:
        with torch.enable_grad():
            return [float(trainer.train(tokens, trainer.step / 6)) for _ in range(number)]

    whole = train.Trainer(settings(train, shape), torch.device(device), False)
    expected = steps(whole, 6)
    first = train.Trainer(settings(train, shape), torch.device(device), False)
    losses = steps(first, 3)
    first.keep_if_best(first.measure(tokens))
    first.save(tmp_path / "checkpoint.pt")
    second = train.Trainer(settings(train, shape), torch.device(device), False)
    second.resume(tmp_path / "checkpoint.pt")
    assert second.step == 3 and second.best == first.best
    losses += steps(second, 3)
    assert losses == pytest.approx(expected, rel=1e-6 if device == "cpu" else 1e-3)
    assert expected[-1] < expected[0]
    for name, weight in whole.model.state_dict().items():
        near = {"atol": 1e-5, "rtol": 1e-4} if device == "cpu" else {"atol": 2e-3, "rtol": 2e-2}
        torch.testing.assert_close(second.model.state_dict()[name], weight, **near)
    other = train.Trainer(settings(train, shape, heads=1), torch.device(device), False)
    with pytest.raises(ValueError, match="heads: expected 2, got 1"):
        other.resume(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("shape", LEAST)
def test_a_training_ends_in_a_folder_that_transformers_reads(
    train: ModuleType, tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"{i}.py" for i in range(80)]
    write(tmp_path / "text", {name: b"for i in range(9):\n    print(i)\n" * 8 for name in names})
    least = " ".join(f"--{name} {value}" for name, value in LEAST[shape].items())
    options = f"--shape {shape} --steps 4 --report 2 --batch 2 --hidden 32 --intermediate 32 --heads 2 {least}"
    given = [
        "--out",
        tmp_path / "model",
        "--text",
        tmp_path / "text",
        "--device",
        "cpu",
        "--no-compile",
        *options.split(),
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, given)])
    monkeypatch.setattr(train, "PROMPTS", train.PROMPTS[:1])
    with torch.enable_grad():
        train.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("step ") and "held-out" in line for line in lines) == 2
    assert sum(line.startswith("-" * 20) for line in lines) == 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    channels = model.config.kv_lora_rank if shape == "deepseek-v3" else model.config.head_dim
    made_of = (model.dtype, model.config.model_type, channels)
    assert made_of == (torch.bfloat16, shape.replace("-", "_"), LEAST[shape]["latent"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    made = model.generate(**tokenizer("for", return_tensors="pt"), max_new_tokens=3, min_new_tokens=3)
    assert made.shape == (1, 7)


def test_values_narrower_than_keys_are_attended_causally(example: None) -> None:
    import shapes

    q, k, v = torch.randn(2, 3, 5, 12), torch.randn(2, 3, 5, 12), torch.randn(2, 3, 5, 8)
    scores = (0.3 * q.double() @ k.double().transpose(2, 3)).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    expected = (scores.softmax(-1) @ v.double()).transpose(1, 2).float()
    out, _ = shapes.padded(None, q, k, v, None, scaling=0.3)
    torch.testing.assert_close(out, expected)


def test_windows_and_pools_are_attended_to_as_their_cache_stores_them(example: None) -> None:
    import shapes

    window, tokens, pooled = 4, 12, 3
    q, k, sinks = torch.randn(2, 3, tokens, 128), torch.randn(2, 1, tokens + pooled, 128), torch.randn(3)
    place = torch.arange(tokens)
    near = (place <= place[:, None]) & (place > place[:, None] - window)
    far = torch.arange(pooled) < (place[:, None] + 1) // 4
    stored = shapes.as_stored(k)
    scores = (0.2 * q @ stored.transpose(2, 3)).masked_fill(~torch.cat([near, far], dim=1), -torch.inf)
    weights = torch.cat([scores, sinks.view(1, 3, 1, 1).expand(2, 3, tokens, 1)], dim=-1).softmax(-1)[..., :-1]
    hidden = torch.zeros(2, 1, tokens, pooled).masked_fill(~far, -torch.inf)
    out, _ = shapes.windowed(None, q, k, k, hidden, scaling=0.2, sliding_window=window, s_aux=sinks)
    torch.testing.assert_close(out, (weights @ stored).transpose(1, 2))
    assert 1e-3 < (stored - k).norm() / k.norm() < 0.05


def test_the_model_has_the_shape_of_the_large_ones_and_is_small() -> None:
    config = AutoConfig.from_pretrained(EXAMPLE)
    widths = (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim)
    assert (config.model_type, widths) == ("deepseek_v3", (512, 64, 128, 128))
    assert (EXAMPLE / "model.safetensors").stat().st_size <= 20_000_000


def test_the_model_with_a_pool_is_v4s_and_as_small() -> None:
    config = AutoConfig.from_pretrained(EXAMPLE_V4)
    widths = (config.head_dim, config.qk_rope_head_dim, config.sliding_window, config.index_topk)
    assert (config.model_type, widths) == ("deepseek_v4", (512, 64, 128, 512))
    assert {"compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"} == set(
        config.layer_types
    )
    assert (EXAMPLE_V4 / "model.safetensors").stat().st_size <= 14_000_000


@pytest.fixture(scope="module")
def held_out() -> measure.Sample:
    """Returns text of this Python's own library that the model has not seen."""
    texts = (text for _, text in corpus.documents(corpus.standard_library(), "held-out"))
    return measure.sample(texts, AutoTokenizer.from_pretrained(EXAMPLE), 768, 5000)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_caches_cost_less_than_half_a_percent(held_out: measure.Sample, device: str) -> None:
    """For fp8 with one scale see docs/accuracy.md: its rotary keys are e4m3 too, which this small model minds."""
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE).to(device).eval()

    def bits(cache: str) -> float:
        patch(model, cache_format=cache, context=Context(1), absorb="always")
        return measure.score(model, held_out).bits_per_byte(held_out)

    bf16 = bits("bf16")
    assert bf16 < 1.5  # it knows the language: a model of single bytes needs more than 4
    assert bits("fp8_ds_mla") == pytest.approx(bf16, rel=5e-3)
    assert bits("f16") == pytest.approx(bf16, rel=2e-3)
    assert bits("fp8") == pytest.approx(bf16, rel=4e-2)


def test_what_the_formats_of_v4_cost(held_out: measure.Sample) -> None:
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE_V4).eval()

    def bits(window: str, pool: str) -> float:
        patch(model, cache_format=window, pool_format=pool, context=Context(1))
        return measure.score(model, held_out).bits_per_byte(held_out)

    bf16 = bits("bf16", "bf16")
    assert bf16 < 1.5
    assert bits("fp8_dsv4", "fp8_dsv4") == pytest.approx(bf16, rel=3e-3)
    assert bits("fp8_dsv41", "fp4_dsv41") == pytest.approx(bf16, rel=1e-2)
    assert bits("fp4_dsv41", "fp4_dsv41") > 1.005 * bf16


def test_what_fp8_costs_is_the_rounding_of_rotary_keys(example: None, held_out: measure.Sample) -> None:
    """The float32 model without libmla shows what docs/accuracy.md explains fp8's loss with."""
    import sensitivity

    model = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32).eval()

    def bits(latent: bool, rotary: bool) -> float:
        with sensitivity.rounding(model, latent, rotary):
            return measure.score(model, held_out).bits_per_byte(held_out)

    exact = bits(False, False)
    assert bits(True, False) == pytest.approx(exact, rel=3e-3)
    assert bits(False, True) > 1.005 * exact
    assert bits(False, False) == exact


def test_what_it_writes_is_python() -> None:
    """The likeliest text after the beginning of a test, without its last line, is a program."""
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32).eval()
    patch(model, context=Context(1))
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    prompt = tokenizer("import unittest\n\nclass Test", return_tensors="pt")
    made = tokenizer.decode(model.generate(**prompt, max_new_tokens=100, do_sample=False)[0], skip_special_tokens=True)
    whole = made.rpartition("\n\n")[0]
    names = [part.name for part in ast.parse(whole).body if isinstance(part, ast.ClassDef)]
    assert names and names[0].isidentifier() and len(whole) > 60
