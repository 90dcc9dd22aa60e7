# SPDX-License-Identifier: Apache-2.0
"""Shows results of `libmla eval` as a table: rich's in a terminal, plain text elsewhere, or Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .cases import Case, Figures

if TYPE_CHECKING:
    from rich.table import Table

_HEADER = ("attention", "cache", "backend", "bytes read", "bits/byte", "vs float32", "vs bf16 cache", "same token")
_TEXTS = 3
"""Counts the first columns, which are text; the others are numbers."""


def _rows(cases: Iterable[Case]) -> list[tuple[str, ...]]:
    """Returns the table's row of each case that was measured."""
    return [(case.attention, case.stored, case.backend, *_texts(case.figures)) for case in cases if case.figures]


def _texts(figures: Figures) -> tuple[str, ...]:
    return (
        str(figures.num_bytes),
        f"{figures.bits_per_byte:.4f}",
        _percent(figures.versus_float32),
        "-" if figures.versus_bf16 is None else _percent(figures.versus_bf16),
        f"{100 * figures.agreement:.2f} %",
    )


def _percent(change: float) -> str:
    return f"{round(100 * change, 2) + 0.0:+.2f} %"  # no -0.00


def reasons(cases: Iterable[Case]) -> list[str]:
    """Returns what was not measured and why, a line for each reason."""
    grouped: dict[str, list[Case]] = {}
    for case in cases:
        if case.reason is not None:
            grouped.setdefault(case.reason, []).append(case)
    lines = []
    for reason, those in grouped.items():
        parts = (dict.fromkeys(getattr(case, name) for case in those) for name in ("attention", "stored", "backend"))
        lines.append(f"{'; '.join(' / '.join(part) for part in parts)}: {reason}")
    return lines


def as_markdown(cases: Sequence[Case]) -> str:
    lines = [_row(_HEADER), _row(["---"] * _TEXTS + ["---:"] * (len(_HEADER) - _TEXTS))]
    lines += map(_row, _rows(cases))
    missing = reasons(cases)
    return "\n".join([*lines, *(["", "Not measured:", "", *(f"- {line}" for line in missing)] if missing else [])])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def as_text(cases: Sequence[Case]) -> str:
    rows = [_HEADER, *_rows(cases)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if at < _TEXTS else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join([*lines, *(f"not measured: {line}" for line in reasons(cases))])


def rich_table(cases: Sequence[Case]) -> Table:
    """Returns the results as a table of rich. Raises ImportError."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, name in enumerate(_HEADER):
        table.add_column(name, justify="left" if at < _TEXTS else "right")
    for row in _rows(cases):
        table.add_row(*row)
    return table


def print_table(cases: Sequence[Case], *, markdown: bool) -> None:
    """Prints the results to standard output."""
    if markdown:
        print(as_markdown(cases))
        return
    if sys.stdout.isatty():
        try:
            from rich.console import Console

            table = rich_table(cases)
        except ImportError:
            pass
        else:
            Console().print(table, *(f"not measured: {line}" for line in reasons(cases)), sep="\n", markup=False)
            return
    print(as_text(cases))
