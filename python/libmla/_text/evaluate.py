# SPDX-License-Identifier: Apache-2.0
"""Measures what each cache format costs a language model, in bits per byte of text that it has not seen: the command
`libmla eval`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from .._arguments import Parser
from ..types import Compute
from .corpus import NoText, documents, standard_library
from .options import (
    FAILED,
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
    from .cases import Case

_EXAMPLES = """examples:
  libmla eval --model examples/tiny-mla
  libmla eval --model examples/tiny-mla --device cuda --markdown
  libmla eval --model examples/tiny-dsv4 --formats fp8_dsv4,fp8_dsv41+fp4_dsv41
  libmla eval --model deepseek-ai/DeepSeek-V2-Lite --device cuda --text book.txt --formats bf16,fp8_ds_mla --bytes 200000
  libmla eval --model examples/tiny-mla --backends cpu_avx512_bf16,reference --json=eval.json
  libmla eval --model examples/tiny-mla --compute fp8 --backends reference --slow-bytes 4096

Every token is read through the cache. What is not measured is listed with its reason. Exit status 1: a cache of fp8
costs more than --limit percent over bf16. docs/accuracy.md explains the figures."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = Parser(
        prog="libmla eval",
        description="Measure bits per byte on held-out text, and agreement with the float32 model, for every cache "
        "format, backend and kind of attention.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_model_options(parser)
    add(
        "--text",
        type=Path,
        default=standard_library(),
        help="file, or folder of which the held-out files are read (default: this Python's standard library)",
    )
    add("--pattern", default="*.py", help="files of that folder (default: *.py)")
    add("--bytes", type=positive, default=16384, help="of text to measure with (default: 16384)")
    add("--context", type=positive, help="tokens of a window (default: what the model takes, 2048 at most)")
    add("--top-k", type=positive, default=512, help="keys that sparse attention reads (default: 512)")
    add(
        "--formats",
        type=_names,
        help="cache formats (default: all that can be computed with as --compute says); of DeepSeek V4 also two in "
        "one, of the window and of the compressed pool, as fp8_dsv41+fp4_dsv41",
    )
    add(
        "--compute",
        choices=get_args(Compute),
        default="default",
        help="fp8: products of e4m3 over fp8 caches; on a CPU the reference alone computes them, so that --slow-bytes "
        "is the text (default: default)",
    )
    add("--backends", type=_names, help="rows or families of `libmla explain` (default: all)")
    add("--slow-bytes", type=positive, default=512, help="text for cpu_portable and reference (default: 512)")
    add("--limit", type=float, default=0.5, help="percent that an fp8 cache may cost over bf16 (default: 0.5)")
    add("--markdown", action="store_true", help="print the table as Markdown")
    options = parse(parser, arguments)
    try:
        return _evaluate(options)
    except (UsageError, NoText) as error:
        print(f"libmla eval: {error}", file=sys.stderr)
        return UNUSABLE_INPUT


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _evaluate(options: argparse.Namespace) -> int:
    require_transformers()
    import torch

    from .cases import Case, Reference, attentions, check_backends, formats_for, measure
    from .measure import sample, score
    from .report import print_table

    where = place(options)
    folder = folder_of(options.model)
    config = config_of(folder)
    formats = formats_for(config, options.compute, options.formats)
    if options.backends is not None:
        check_backends(options.backends)
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    context = options.context or min(most or 2048, 2048)
    if context < 2 or (most and context > most):
        raise UsageError(f"--context: expected 2 to {most or 'the most that the model takes'}, got {context}")
    texts = (text for _, text in documents(options.text, "held-out", options.pattern))
    try:
        text = sample(texts, tokenizer_of(folder), context, options.bytes)
    except ValueError as error:
        raise UsageError(str(error)) from error

    _say(f"{text.num_bytes} bytes of '{options.text}' in {len(text.windows)} windows, device {where.name}")
    ways = attentions(config, options.top_k)
    folder = folder_of(options.model, weights=True)
    reference = Reference(text, score(load(folder, where, "f32"), text))
    model = load(folder, where, options.dtype)
    dtype = str(model.dtype).removeprefix("torch.")
    found = [Case(ways[0].name, "-", "transformers, float32", reference.figures(text, reference.scores))]
    if dtype != "float32":
        found.append(Case(ways[0].name, "-", f"transformers, {dtype}", reference.figures(text, score(model, text))))
    started = time.monotonic()
    for case in measure(
        model,
        reference,
        where,
        formats=formats,
        compute=options.compute,
        backends=options.backends,
        ways=ways,
        slow_bytes=options.slow_bytes,
    ):
        found.append(case)
        if case.figures:
            bits = f"{case.figures.bits_per_byte:.4f} bits/byte"
            _say(f"{time.monotonic() - started:7.1f} s  {case.attention}; {case.stored}; {case.backend}: {bits}")
    over = [case for case in found if _is_over(case, text.num_bytes, options.limit)]
    document: dict[str, Any] = {
        "version": 1,
        "model": options.model,
        "device": where.name,
        "device_name": torch.cuda.get_device_name(where.device) if where.device.type == "cuda" else None,
        "dtype": dtype,
        "text": str(options.text),
        "bytes": text.num_bytes,
        "tokens": text.predicted,
        "windows": len(text.windows),
        "context": context,
        "top_k": options.top_k,
        "compute": options.compute,
        "limit_percent": options.limit,
        "within_limit": not over,
        "results": [asdict(case) for case in found],
    }
    if options.json != "-":
        print_table(found, markdown=options.markdown)
    if options.json:
        write_json(document, options.json)
    for case in over:
        _say(f"over the limit of {options.limit:g} %: {case.attention}; {case.stored}; {case.backend}")
    return FAILED if over else 0


def _is_over(case: Case, num_bytes: int, limit: float) -> bool:
    """Returns whether a case of fp8 alone costs more over bf16 than `limit` percent. A part of the text is too little
    to tell."""
    figures = case.figures
    if not all(part.startswith("fp8") for part in case.cache.split("+")):
        return False
    if figures is None or figures.versus_bf16 is None or figures.num_bytes < num_bytes:
        return False
    return figures.versus_bf16 > limit / 100


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
