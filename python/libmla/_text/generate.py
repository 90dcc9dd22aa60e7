# SPDX-License-Identifier: Apache-2.0
"""Lets a checkpoint write on after a prompt, its attention on libmla's kernels: the command `libmla generate`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .._arguments import Parser
from .options import (
    UNUSABLE_INPUT,
    UsageError,
    add_model_options,
    config_of,
    folder_of,
    load,
    parse,
    place,
    positive,
    require_transformers,
    tokenizer_of,
    write_json,
)

if TYPE_CHECKING:
    import torch

_EXAMPLES = """examples:
  libmla generate --model examples/tiny-mla "def "
  libmla generate --model deepseek-ai/DeepSeek-V2-Lite --device cuda --cache fp8_ds_mla --max-new-tokens 500 "Once upon a time"
  libmla generate --model examples/tiny-mla --temperature 0 --prompt-file program.py
  git show HEAD:setup.py | libmla generate --model examples/tiny-mla --json=out.json
  libmla generate --model examples/tiny-mla --no-patch "def "     # the same model without libmla, to compare"""

_GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


class Stream:
    """Takes the new tokens that `generate` of transformers hands over: writes their text at once, and notes when they
    came.

    Text waits until its last character is whole.
    """

    def __init__(self, tokenizer: Any, out: TextIO, clock: Callable[[], float] = time.perf_counter) -> None:
        self._decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)
        self._out, self._clock = out, clock
        self._prompt = True
        self._shown: list[int] = []  #: tokens of the text before, which may change how the next is written
        self._waiting: list[int] = []
        self.tokens: list[int] = []
        self.text = ""
        self.started = clock()
        self.times: list[float] = []  #: seconds since the start, of each new token

    def put(self, value: torch.Tensor) -> None:
        new = value.flatten().tolist()
        if self._prompt:
            self._prompt = False
            self._shown = new[-8:]
            return
        self.times.append(self._clock() - self.started)
        self.tokens += new
        self._waiting += new
        if not self._decode(self._shown + self._waiting).endswith("\ufffd"):
            self._flush()

    def _flush(self) -> None:
        before = self._decode(self._shown)
        text = self._decode(self._shown + self._waiting)[len(before) :]
        self._shown, self._waiting = (self._shown + self._waiting)[-8:], []
        # A character that the tail begins within would be decoded as another one.
        while len(self._shown) > 1 and self._decode(self._shown).startswith("\ufffd"):
            del self._shown[0]
        self.text += text
        self._out.write(text)
        self._out.flush()

    def end(self) -> None:
        self._flush()


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = Parser(
        prog="libmla generate",
        description="Let a language model with latent attention write on after a prompt. Text goes to standard output "
        "as it comes, speeds to standard error.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("prompt", nargs="?", help="text to go on from; without it, --prompt-file or standard input")
    add("--prompt-file", metavar="FILE", help="file with the prompt; - is standard input")
    add_model_options(parser)
    add("--max-new-tokens", type=positive, default=200, help="default: 200")
    add("--temperature", type=_from_zero, default=0.7, help="0: always the likeliest token (default: 0.7)")
    add(
        "--top-p",
        type=_share,
        default=0.95,
        help="of the likeliest tokens that make up this probability (default: 0.95)",
    )
    add("--seed", type=int, default=0, help="the same seed draws the same text (default: 0)")
    add("--cache", default="bf16", metavar="FORMAT", help="bf16 (default), f16, fp8, fp8_ds_mla; of V4 fp8_dsv4, ...")
    add("--pool-cache", metavar="FORMAT", help="of DeepSeek V4's compressed rows (default: as --cache)")
    add("--page-size", type=positive, default=64, help="tokens of a cache page (default: 64)")
    add(
        "--backend", default="", help="force a backend, such as cpu_avx2 (default: the best, or what MLA_BACKEND names)"
    )
    add("--no-patch", action="store_true", help="leave the model as transformers runs it, to compare")
    options = parse(parser, arguments)
    try:
        _generate(options)
    except UsageError as error:
        print(f"libmla generate: {error}", file=sys.stderr)
        return UNUSABLE_INPUT
    return 0


def _from_zero(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number, 0 or more, got '{text}'")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, up to 1, got '{text}'")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _prompt(options: argparse.Namespace) -> str:
    """Returns the prompt, from where the options say. Raises UsageError."""
    if options.prompt is not None and options.prompt_file is not None:
        raise UsageError("--prompt-file: expected no file beside a prompt on the command line; leave out one of them")
    if options.prompt is not None:
        return str(options.prompt)
    source = options.prompt_file
    if source is None and sys.stdin.isatty():
        raise UsageError(
            'expected a prompt: libmla generate --model FOLDER "text", --prompt-file FILE, or standard input'
        )
    try:
        return sys.stdin.read() if source in (None, "-") else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file: cannot read text from '{source or '-'}': {error}") from error


def _generate(options: argparse.Namespace) -> None:
    require_transformers()
    import torch

    from .. import UnsupportedError

    where = place(options)
    folder = folder_of(options.model)
    config = config_of(folder, need_latent=not options.no_patch)
    prompt = _prompt(options)
    tokenizer = tokenizer_of(folder)
    inputs = tokenizer(prompt, return_tensors="pt").to(where.device)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise UsageError("expected a prompt with at least one token, as this tokenizer puts none before it")
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most and length + options.max_new_tokens > most:
        raise UsageError(
            f"--max-new-tokens: expected {max(most - length, 0)} or fewer after a prompt of {length} tokens (the model "
            f"takes {most} in all), got {options.max_new_tokens}"
        )
    known = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    common = {**known, "pad_token_id": padding, "eos_token_id": tokenizer.eos_token_id}
    model = load(folder_of(options.model, weights=True), where, options.dtype)
    try:
        if not options.no_patch:
            from ..integrations.transformers import patch

            context = where.context(options.backend)
            formats = {"cache_format": options.cache, "pool_format": options.pool_cache}
            patch(model, **formats, page_size=options.page_size, context=context)
        # What is loaded and compiled on first use is no part of the speed.
        model.generate(**common, max_new_tokens=2, **_GREEDY)
    except (ValueError, UnsupportedError) as error:
        raise UsageError(str(error)) from error
    drawing = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    torch.manual_seed(options.seed)
    to_stdout = options.json != "-"
    out = sys.stdout if to_stdout else sys.stderr
    out.write(prompt)
    stream = Stream(tokenizer, out)
    model.generate(
        **common,
        max_new_tokens=options.max_new_tokens,
        streamer=stream,
        **(drawing if options.temperature else _GREEDY),
    )
    out.write("\n")
    out.flush()

    first, last = stream.times[0], stream.times[-1]
    made = len(stream.tokens)
    prompt_speed = length / first
    decode_speed = (made - 1) / (last - first) if made > 1 else None
    shown = "-" if decode_speed is None else f"{decode_speed:,.1f}"
    print(
        f"prompt: {length} tokens, {first:.3f} s, {prompt_speed:,.1f} tokens/s; "
        f"decode: {made} tokens, {last - first:.3f} s, {shown} tokens/s",
        file=sys.stderr,
    )
    if options.json:
        document = {
            "model": options.model,
            "device": where.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "patched": not options.no_patch,
            "cache": None if options.no_patch else options.cache,
            "pool_cache": None if options.no_patch else options.pool_cache,
            "backend": None if options.no_patch else options.backend or None,
            "seed": options.seed,
            "prompt": prompt,
            "text": stream.text,
            "prompt_tokens": length,
            "new_tokens": made,
            "prompt_seconds": first,
            "decode_seconds": last - first,
            "prompt_tokens_per_second": prompt_speed,
            "decode_tokens_per_second": decode_speed,
        }
        write_json(document, options.json)
