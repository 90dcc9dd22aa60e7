# SPDX-License-Identifier: Apache-2.0
"""Says what this machine has, and which backend a problem gets, as data that prints as tables.

Printed, the tables are rich's where rich is installed (``pip install rich``), plain text where it is not.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core

if TYPE_CHECKING:
    from rich.console import Group

    from .types import CacheFormat, Compute, DType, IndexerFormat


_ON_A_CACHE = (
    "decode", "decode_sparse", "prefill_sparse", "append", "append_rope", "gather", "copy_pages", "compress",
)  # fmt: skip
_TYPED = {
    "prefill": "q, k and v",
    "merge_states": "states",
    "append": "rows",
    "append_indexer": "rows",
    "gather": "rows",
    "compress": "tokens",
    "finish_output": "outputs",
}


@dataclass(frozen=True)
class _Table:
    """Holds rows of text under a header; `marked` is the row that matters, or -1."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int = -1

    def plain(self) -> str:
        cells = [("  " + self.header[0], *self.header[1:])]
        cells += [(("> " if i == self.marked else "  ") + row[0], *row[1:]) for i, row in enumerate(self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join(lines)

    def rich(self) -> Any:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in self.header:
            table.add_column(name)
        for i, row in enumerate(self.rows):
            first = Text(("> " if i == self.marked else "  ") + row[0])
            shades = {"yes": "green", "no": "red"}
            texts = [first, *(Text(text, style=shades.get(text, "")) for text in row[1:])]
            table.add_row(*texts, style="bold" if i == self.marked else None)
        return table


class _Printable:
    """Prints as paragraphs and tables, which `_parts` gives."""

    def _parts(self) -> Sequence[str | _Table]:
        raise NotImplementedError

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        return Group(*(Text(part) if isinstance(part, str) else part.rich() for part in self._parts()))

    def __str__(self) -> str:
        try:
            from rich.console import Console
        except ImportError:
            return "\n\n".join(part if isinstance(part, str) else part.plain() for part in self._parts())
        text = io.StringIO()
        terminal = bool(sys.stdout and sys.stdout.isatty())
        # A file or a pipe has no width: nothing is broken there.
        Console(file=text, force_terminal=terminal, width=None if terminal else 1000).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    __repr__ = __str__


class Verdict(NamedTuple):
    """Holds one row of an operation's table of backends, judged for one problem."""

    backend: str
    usable: bool
    reason: str  #: why it is, or is not, usable
    multiplied: str  #: what queries and keys, probabilities and values are multiplied as: "bf16", "f32", ...
    summed: str  #: what their products are summed in
    products_per_cut: (
        int  #: products that tensor cores add at once before they cut the sum off; 0: every sum is rounded
    )
    query_bits: int  #: significant bits of a query that take part
    sum_bits: int  #: significant bits that tensor cores keep of a sum
    p_run: int  #: keys of a run, whose softmax weights have one scale, with compute="fp8"


@dataclass(frozen=True)
class GpuCode:
    """Says which code a GPU runs."""

    arch: int  #: architecture that the code was compiled for, 80 for sm80; 0 if there is none
    family: bool  #: it was compiled for another GPU of the same family
    by_driver: bool  #: the GPU's driver compiles it
    built: bool  #: this build has it
    text: str  #: all this in words: "the family of sm100, not in this build"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class Explanation(_Printable):
    """Holds every backend's verdict on a problem, best first, and the backend that the problem gets."""

    problem: str  #: the problem in words
    selected: str | None  #: None if no backend can run the problem, or not the forced one
    error: str | None  #: why `selected` is None
    rows: tuple[Verdict, ...]
    code: GpuCode | None = None  #: what the problem's GPU runs; None on the CPU and in the emulator
    note: str | None = None  #: what this build does otherwise than the full one that was asked about

    def _table(self) -> _Table:
        rows = tuple((row.backend, "yes" if row.usable else "no", row.reason) for row in self.rows)
        names = [row.backend for row in self.rows]
        return _Table(("backend", "usable", "reason"), rows, names.index(self.selected) if self.selected else -1)

    def _parts(self) -> Sequence[str | _Table]:
        # Where all rows say no, the table has said why.
        error = self.error if any(row.usable for row in self.rows) else "no backend can run this"
        problem = self.problem if self.code is None else f"{self.problem} (code: {self.code})"
        selected = f"selected: {self.selected or f'none; {error}'}"
        return [problem, self._table(), selected if self.note is None else f"{selected}\nnote: {self.note}"]


@dataclass(frozen=True)
class IsaLevel:
    """Describes a set of instructions that the CPU backend has code for."""

    name: str
    cpu_has: bool  #: the processor reports all of it
    os_allows: bool  #: the operating system saves its registers
    built: bool  #: this build has code for it
    gflops: float | None  #: what a thread multiplies and adds in a second, in 10^9; None if that is not measured
    detail: str


@dataclass(frozen=True)
class Gpu:
    """Describes a GPU as its driver lists it; numbers are 0 where the driver's library could not be asked."""

    name: str
    bus_location: str
    uuid: str
    index: int  #: N of "cuda:N"; -1 if this process cannot use it
    arch: int  #: 90 for compute capability 9.0
    num_sms: int
    memory_bytes: int
    shared_bytes_per_block: int
    l2_bytes: int

    def __str__(self) -> str:
        where = f"cuda:{self.index}" if self.index >= 0 else "not usable by this process"
        known = f", sm{self.arch}, {self.num_sms} SMs, {self.memory_bytes / 2**30:.0f} GiB" if self.arch else ""
        return f"{self.name} ({where}{known})"


@dataclass(frozen=True, repr=False)
class Info(_Printable):
    """Holds what was detected on this machine, once per process."""

    version: str  #: of the library
    cpu: str
    threads: int  #: that this process may run on
    isa: tuple[IsaLevel, ...]  #: best first
    gpus: tuple[Gpu, ...]
    cuda: str | None  #: why no GPU can be used; None if one can
    cuda_driver: int  #: CUDA version that the driver supports, 13000 for 13.0; 0 without a driver
    cuda_runtime: int  #: CUDA version of this build; 0 if it has no GPU code
    gpu_archs: tuple[int, ...]  #: architectures that this build has code for
    emulated_archs: tuple[int, ...]  #: architectures that this build can emulate
    decode: Explanation  #: of a typical decode: 128 heads, 576/512, bf16 cache

    def _parts(self) -> Sequence[str | _Table]:
        lines = [f"libmla {self.version}", f"cpu       {self.cpu}, {_count(self.threads, 'thread')}"]
        lines += [f"gpu       {gpu}" for gpu in self.gpus] or ["gpu       none"]
        if self.cuda:
            lines.append(f"cuda      {self.cuda}")
        if self.cuda_driver:
            built = _cuda(self.cuda_runtime) if self.cuda_runtime else "none"
            lines.append(f"cuda      driver {_cuda(self.cuda_driver)}, library built with {built}")
        lines.append(f"gpu code  {_archs(self.gpu_archs)}")
        lines.append(f"emulates  {_archs(self.emulated_archs)}")
        yes_no = ("no", "yes")
        levels = tuple(
            (
                one.name,
                yes_no[one.cpu_has],
                yes_no[one.os_allows],
                yes_no[one.built],
                f"{one.gflops:.0f}" if one.gflops else "",
                one.detail,
            )
            for one in self.isa
        )
        isa = _Table(("instruction set", "cpu has", "OS allows", "built", "GFLOP/s a thread", "detail"), levels)
        return ["\n".join(lines), isa, f"backends, for {self.decode.problem}:", *self.decode._parts()[1:]]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _archs(archs: Sequence[int]) -> str:
    return " ".join(f"sm{arch}" for arch in archs) or "none"


def info() -> Info:
    """Describes this machine and this build, and says which backends a typical decode could use.

    Returns:
        Data: ``print(libmla.info())`` shows it as tables, ``dataclasses.asdict`` gives it as plain values.
    """
    found: dict[str, Any] = _core.data("info")
    found["isa"] = tuple(IsaLevel(**level) for level in found["isa"])
    found["gpus"] = tuple(Gpu(**gpu) for gpu in found["gpus"])
    for key in ("gpu_archs", "emulated_archs"):
        found[key] = tuple(found[key])
    emulated = os.environ.get("MLA_EMULATE", "")
    return Info(**found, decode=explain("decode", device=f"emulated:{emulated}" if emulated else "cpu"))


def explain(
    op: str,
    *,
    model: str | None = None,
    cache: CacheFormat = "bf16",
    q_dtype: DType = "bf16",
    num_heads: int = 128,
    d_qk: int = 576,
    d_v: int = 512,
    q_len: int = 1,
    listed_keys: int = 0,
    num_requests: int = 0,
    compute: Compute = "default",
    indexer_format: IndexerFormat = "fp8",
    logits_dtype: DType = "f32",
    device: str = "cpu",
    full_build: bool = True,
    backend: str = "",
) -> Explanation:
    """Says which backend a problem gets, and what every other one says of it.

    Args:
        op: an operation's name, such as ``"decode"``.
        model: a preset such as ``"deepseek-v3"``, or the path of a ``config.json``: gives ``num_heads``, ``d_qk`` and
            ``d_v``.
        cache: format of the cache; of `prefill_sparse`, type of its rows.
        q_dtype: type of the queries, of the rows that are written or read, of the tokens that are pooled, or of the
            states that are merged.
        num_heads: query heads.
        d_qk: channels of a query and of a cached row (`prefill`: 192).
        d_v: channels of an output row (`prefill`: 128).
        q_len: of `decode`: query tokens of a request, over all requests on average, rounded up.
        listed_keys: of `decode_sparse` and `prefill_sparse`: query tokens times the entries of a token's lists; 0: many.
        num_requests: of `decode`: requests; 0: many.
        compute: of `decode`, `decode_sparse` and `prefill`: as in :func:`libmla.decode`; of `indexer_logits` and
            `indexer_top_k`, where every key has a logit: as there.
        indexer_format: of `append_indexer`, `indexer_logits` and `indexer_top_k`: format of the keys.
        logits_dtype: of `indexer_logits`, `indexer_top_k` and `top_k`: type of the logits, f32, bf16 or f16.
        device: ``"cpu"``, ``"cuda:0"``, ``"emulated:sm90"``, or an architecture such as ``"sm120"``, present or not.
        full_build: of an architecture, the answer is that of a build with code for every GPU, as the command
            ``libmla explain`` gives it: reasons and ``code`` say what is not in this build. With False it is that of
            this build, by which programs decide.
        backend: a row or family to force; empty: the environment's ``MLA_BACKEND``, else the first usable row.

    Returns:
        Data that prints as a table. If nothing can run the problem, ``selected`` is None and ``error`` says why.

    Raises:
        ValueError: an argument names nothing that exists; the message says which and what was expected.
    """
    found = _core.data(
        "explain",
        op,
        model or "",
        cache,
        q_dtype,
        num_heads,
        d_qk,
        d_v,
        q_len,
        listed_keys,
        num_requests,
        compute,
        indexer_format,
        logits_dtype,
        device,
        full_build,
        backend,
    )
    shape = f"{_count(found['num_heads'], 'head')}, head dims {found['d_qk']}/{found['d_v']}"
    data = f"cache {cache}, " if op in _ON_A_CACHE else ""
    typed = _TYPED.get(op, "queries") + (f", {q_len} per request" if op == "decode" and q_len > 1 else "")
    listed = f", {_count(listed_keys, 'listed key')}" if listed_keys > 0 else ""
    requests = f", {_count(num_requests, 'request')}" if num_requests > 0 else ""
    rounded = f", compute {compute}" if compute != "default" else ""
    keys = f", keys {indexer_format}" if indexer_format != "fp8" else ""
    logits = f", logits {logits_dtype}" if logits_dtype != "f32" else ""
    return Explanation(
        problem=f"{op}: {data}{q_dtype} {typed}, {shape}{listed}{requests}{rounded}{keys}{logits}, device {device}",
        selected=found["selected"],
        error=found["error"],
        rows=tuple(Verdict(**row) for row in found["rows"]),
        code=found["code"] and GpuCode(**found["code"]),
        note=found["note"],
    )
