# SPDX-License-Identifier: Apache-2.0
"""Measures what `libmla eval` compares: every kind of attention, cache format and backend, each with its figures or the
reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

import libmla

from ..integrations.transformers import patch, unpatch
from ..integrations.transformers.pages import check_compute
from ..types import CacheFormat, Compute
from .measure import Sample, Scores, score
from .options import Place, UsageError, has_pool
from .select import Selector, all_keys, top_keys

#: Names the backends that take minutes for what others do in a second; they read less text.
SLOW = ("cpu_portable", "reference")

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@dataclass(frozen=True)
class Attention:
    """Describes a way to attend: the operation that computes it, and what chooses its keys."""

    name: str
    operation: str  #: the operation of libmla that computes it
    select_keys: Selector | None


#: DeepSeek V4.1's formats, of the window and of the compressed pool.
V41 = "fp8_dsv41+fp4_dsv41"


def attentions(config: Any, top_k: int) -> list[Attention]:
    """Returns the ways in which a model of this config attends."""
    if has_pool(config):
        return [Attention("window and pool", "decode_sparse", None)]
    return [
        Attention("dense", "decode", None),
        Attention("sparse, all keys", "decode_sparse", all_keys),
        Attention(f"sparse, top {top_k}", "decode_sparse", top_keys(top_k)),
    ]


@dataclass(frozen=True)
class Figures:
    """Holds what a model's scores come to."""

    num_bytes: int  #: of text that was read
    bits_per_byte: float
    versus_float32: float  #: relative change of bits per byte against the unpatched model in f32, on the same text
    versus_bf16: (
        float | None
    )  #: the same against the bf16 cache, with the same attention and the backend of `baseline`; None: not measured
    agreement: float  #: share of tokens where the f32 model finds the same one likeliest


@dataclass(frozen=True)
class Case:
    """Holds one row: a combination, and its figures or the reason why there are none."""

    attention: str
    cache: str
    backend: str
    figures: Figures | None = None
    reason: str | None = None
    compute: Compute = "default"  #: as in `libmla.decode`

    @property
    def stored(self) -> str:
        """Returns the cache's name, and how it is computed with where that is not the usual way."""
        return self.cache if self.compute == "default" else f"{self.cache}, compute {self.compute}"


@dataclass(frozen=True)
class Reference:
    """Holds the text and the scores of the unpatched model in f32, which everything is compared with."""

    sample: Sample
    scores: Scores

    def figures(self, sample: Sample, scores: Scores, bf16: Scores | None = None) -> Figures:
        """Returns the figures of scores on `sample`, which is the first part of the reference's."""
        ours = self.scores.head_of(sample)
        bits = scores.bits_per_byte(sample)
        return Figures(
            num_bytes=sample.num_bytes,
            bits_per_byte=bits,
            versus_float32=bits / ours.bits_per_byte(sample) - 1,
            versus_bf16=None if bf16 is None else bits / bf16.bits_per_byte(sample) - 1,
            agreement=scores.agreement(ours),
        )


def measure(
    model: Any,
    reference: Reference,
    where: Place,
    *,
    formats: Sequence[str],
    backends: Sequence[str] | None,
    ways: Sequence[Attention],
    slow_bytes: int,
    compute: Compute = "default",
) -> Iterator[Case]:
    """Yields all cases, in order; the model is unpatched at the end. If `backends` is None, these are all of each
    operation's table.

    bf16 is always among the formats, as the others are compared with it; it is computed with in the usual way.
    """
    for way in ways:
        bf16: dict[str, Scores] = {}
        for cache in dict.fromkeys(["bf16", *formats]):
            how: Compute = "default" if cache == "bf16" else compute
            for backend, reason in _judged(model, where, way, cache, how, backends):
                scores = None
                if reason is None:
                    slow = backend in SLOW or where.name.startswith("emulated")
                    sample = reference.sample.head(slow_bytes) if slow else reference.sample
                    scores, reason = _scores(model, where, way, cache, how, backend, sample)
                if scores is None:
                    yield Case(way.name, cache, backend, reason=reason, compute=how)
                    continue
                if cache == "bf16":
                    bf16[backend] = scores
                figures = reference.figures(sample, scores, baseline(bf16, backend, sample))
                yield Case(way.name, cache, backend, figures, compute=how)
    unpatch(model)


def baseline(bf16: Mapping[str, Scores], backend: str, sample: Sample) -> Scores | None:
    """Returns the scores of the bf16 cache that a backend's are compared with: its own or, where it takes no such cache
    (as one that multiplies e4m3 alone), those of the first backend that read as much of the text."""
    if backend in bf16:
        return bf16[backend]
    enough = (scores for scores in bf16.values() if sum(map(len, scores.bits)) >= sample.predicted)
    return next((scores.head_of(sample) for scores in enough), None)


def check_backends(names: Sequence[str]) -> None:
    """Raises UsageError unless each is a row of `decode`, or the first part of one's name, as "cpu" is."""
    rows = libmla.backends("decode")
    for name in names:
        if not any(row == name or row.startswith(f"{name}_") for row in rows):
            raise UsageError(
                f"--backends: expected names out of {', '.join(rows)}, or a family such as cpu, got '{name}'"
            )


def formats_for(config: Any, compute: Compute, formats: Sequence[str] | None) -> list[str]:
    """Returns the formats to measure: those that are given, or all that can be computed with in that way. Raises
    UsageError if one that is given cannot.

    Of a model with a compressed pool a name may be two: that of the window and that of the pool, as in ``V41``.
    """

    def refusal(name: str) -> str:
        try:
            for part in name.split("+"):
                check_compute(compute, part)
        except ValueError as error:
            return str(error)
        return ""

    names = get_args(CacheFormat)
    for name in formats or ():
        parts = name.split("+")
        if unknown := [part for part in parts if part not in names]:
            raise UsageError(f"--formats: expected names out of {', '.join(names)}, got '{unknown[0]}'")
        if len(parts) > (2 if has_pool(config) else 1):
            most = (
                "two formats, of the window and the pool" if has_pool(config) else "one format, as there is one cache"
            )
            raise UsageError(f"--formats: expected {most}, got '{name}'")
    if formats is None:
        return [name for name in (*names, *([V41] if has_pool(config) else [])) if not refusal(name)]
    if found := next(filter(None, map(refusal, formats)), None):
        raise UsageError(f"--{found}")
    return list(formats)


def _judged(
    model: Any, where: Place, way: Attention, cache: str, compute: Compute, backends: Sequence[str] | None
) -> Iterator[tuple[str, str | None]]:
    """Yields every backend, and the reason why it cannot run the case, or None if it can."""
    text = model.config.get_text_config(decoder=True)
    layer = (getattr(text, "per_layer_config", None) or [text])[0]
    if has_pool(model.config):
        width = d_v = layer.head_dim
    else:
        width, d_v = layer.kv_lora_rank + -(-layer.qk_rope_head_dim // 64) * 64, layer.kv_lora_rank
    for backend in libmla.backends(way.operation) if backends is None else backends:
        reasons = []
        for part in cache.split("+"):
            try:
                found = libmla.explain(
                    way.operation,
                    cache=part,
                    q_dtype=_DTYPES[model.dtype],
                    num_heads=layer.num_attention_heads,
                    d_qk=width,
                    d_v=d_v,
                    compute=compute,
                    device=where.name,
                    backend=backend,
                )
            except ValueError as error:
                raise UsageError(str(error)) from error
            own = next((row.reason for row in found.rows if row.backend == backend), found.error)
            reasons.append(None if found.selected else own)
        yield backend, next(filter(None, reasons), None)


def _scores(
    model: Any, where: Place, way: Attention, cache: str, compute: Compute, backend: str, sample: Sample
) -> tuple[Scores | None, str | None]:
    """Returns the scores, or why there are none."""
    context = where.context(backend)
    rows, _, compressed_rows = cache.partition("+")
    try:
        named = {"context": context, "select_keys": way.select_keys, "compute": compute}
        patch(model, cache_format=rows, pool_format=compressed_rows or None, absorb="always", **named)
    except ValueError as error:
        return None, str(error)
    try:
        return score(model, sample), None
    except libmla.UnsupportedError as error:
        return None, str(error)
