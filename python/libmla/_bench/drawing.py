# SPDX-License-Identifier: Apache-2.0
"""Defines how the plots look: colours, axes with plain tick labels, and labels beside what they name.

Figures are made without pyplot, so that drawing neither opens windows nor keeps state. A `Drawing` is one figure with
what a reader or a program wants to know about it; `svg()` gives it as text for a page, with colours that follow the
page's theme.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#1b1f24", "#5b636d", "#dde1e6", "#ffffff"

# Okabe and Ito's palette without its yellow and black; markers differ too, so that colour is never the only cue.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5c3e", "#6f7780")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
BETTER, WORSE = SERIES[0], SERIES[1]

# The page's names of the colours (report.css has their light and dark values).
CSS_NAMES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"} | {
    color: f"--series-{i}" for i, color in enumerate(SERIES)
}

FONT_SIZE = 9.5
_STYLE: Any = {  # matplotlib types the keys one by one
    "font.size": FONT_SIZE,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.hashsalt": "libmla",
}


class MissingMatplotlib(RuntimeError):
    """matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__("plots and reports need matplotlib: pip install 'libmla[plot]'")


@contextmanager
def style() -> Iterator[None]:
    """Gives matplotlib this module's look within the context, and its former look afterwards. Raises
    MissingMatplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise MissingMatplotlib from None
    with matplotlib.rc_context(_STYLE):
        yield


@dataclass
class Drawing:
    """Holds one figure: `name` is the file's name without ending, `summary` says in a sentence what it shows."""

    name: str
    title: str
    summary: str
    figure: Figure
    tooltips: dict[str, str] = field(default_factory=dict)  #: of marks, by the mark's gid

    def tip(self, artist: Any, text: str) -> None:
        gid = f"mark-{len(self.tooltips)}"
        artist.set_gid(gid)
        self.tooltips[gid] = text

    def save(self, path: str) -> None:
        with style():
            options: dict[str, Any] = {"metadata": {"Date": None}} if path.endswith(".svg") else {"dpi": 160}
            self.figure.savefig(path, bbox_inches="tight", pad_inches=0.2, **options)

    def save_dark(self, path: str) -> None:
        """Writes the figure as SVG, in the colours of the report's dark page."""
        colors = dark_colors()
        self.save(path)
        text = Path(path).read_text(encoding="utf-8")
        text = re.sub(r"#[0-9a-f]{6}\b", lambda found: colors.get(found.group(0), found.group(0)), text)
        Path(path).write_text(text, encoding="utf-8")

    def svg(self) -> str:
        """Returns the figure as an <svg> element: text as text, theme colours as CSS variables, tooltips on its
        marks."""
        buffer = io.StringIO()
        with style():
            import matplotlib

            with matplotlib.rc_context({"svg.fonttype": "none"}):
                self.figure.savefig(
                    buffer,
                    format="svg",
                    bbox_inches="tight",
                    pad_inches=0.05,
                    transparent=True,
                    metadata={"Date": None},
                )
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r"#[0-9a-f]{6}\b", lambda found: _themed(found.group(0)), text)
        for gid, tip in self.tooltips.items():
            text = text.replace(f'<g id="{gid}">', f'<g id="{gid}" class="mark"><title>{escape(tip)}</title>', 1)
        # One page holds several figures, and matplotlib numbers the parts of each alike.
        text = re.sub(r'(\bid="|href="#|url\(#)', lambda found: f"{found.group(0)}{self.name}--", text)
        width, height = re.findall(r'viewBox="0 0 (\S+) (\S+)"', text)[0]
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'style="width: {float(width):.0f}pt" aria-label="{escape(self.summary)}">'
        )
        return head + text[text.index(">") + 1 :]


def dark_colors() -> dict[str, str]:
    """Returns what report.css makes of this module's colours on a dark page."""
    css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    dark = css[css.index("prefers-color-scheme: dark") :]
    values = {name: value for name, value in re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", dark)}
    return {color: values[name] for color, name in CSS_NAMES.items()}


def _themed(color: str) -> str:
    return f"var({CSS_NAMES[color]})" if color in CSS_NAMES else color


def new_axes(
    width: float, height: float, title: str, notes: Sequence[str], note_width: float = 0, lift: float = 0
) -> tuple[Figure, Axes]:
    """Makes one pair of axes, `width` by `height` inches, under a title and lines of remarks; labels may stand beside
    it. `lift` is additional room, in points, between axes and remarks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    lines = [line for note in notes if note for line in textwrap.wrap(note, int((note_width or width) * 14))]
    axes.annotate(
        "\n".join(lines), (0, 1), xytext=(0, 12 + lift), xycoords="axes fraction", textcoords="offset points",
        va="bottom", color=MUTED, linespacing=1.35,
    )  # fmt: skip
    axes.annotate(
        title, (0, 1), xytext=(0, 18 + lift + len(lines) * FONT_SIZE * 1.45), xycoords="axes fraction",
        textcoords="offset points", va="bottom", fontsize=13, fontweight="bold",
    )  # fmt: skip
    return figure, axes


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Returns positions at least `gap` apart and as near to the wanted ones as can be, inside [low, high] if they
    fit."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # Without the gaps the positions only must not fall: neighbours that would are pooled at their mean.
    pools: list[tuple[float, int]] = []
    for rank, i in enumerate(order):
        mean, count = wanted[i] - rank * gap, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    bottoms = [mean for mean, count in pools for _ in range(count)]
    room = max(low, high - (len(wanted) - 1) * gap)
    placed = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        placed[i] = min(max(bottoms[rank], low), room) + rank * gap
    return placed


@dataclass(frozen=True)
class EndLabel:
    """Describes a label in the right margin, tied to a point by a thin line."""

    x: float
    y: float
    text: str
    color: str


def end_labels(axes: Axes, labels: Sequence[EndLabel]) -> None:
    """Draws labels so that none covers another. The limits of the axes must be final."""
    box = axes.get_window_extent()
    points_per_pixel = 72 / axes.figure.dpi
    height = box.height * points_per_pixel
    at = [axes.transData.transform((one.x, one.y)) for one in labels]
    wanted = [(y - box.y0) * points_per_pixel for _, y in at]
    for one, y in zip(labels, spread(wanted, FONT_SIZE * 1.4, 2, height - 2), strict=True):
        edge = (box.width * points_per_pixel + 12, y)
        line = {"arrowstyle": "-", "color": one.color, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 4}
        axes.annotate("", (one.x, one.y), xytext=edge, textcoords="axes points", annotation_clip=False, arrowprops=line)
        axes.annotate(
            one.text, (0, 0), xytext=(edge[0] + 3, y), textcoords="axes points", xycoords="axes fraction",
            va="center", annotation_clip=False, color=INK,
        )  # fmt: skip


def along_line(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    """Writes a text upon a straight line, in the line's direction. The limits of the axes must be final."""
    (x0, y0), (x1, y1) = axes.transData.transform(start), axes.transData.transform(end)
    axes.annotate(
        text, start, xytext=(-4 * math.sin(math.atan2(y1 - y0, x1 - x0)), 4), textcoords="offset points",
        rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)), rotation_mode="anchor", va="bottom", color=MUTED,
    )  # fmt: skip


_STEPS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9))


def ticks_between(low: float, high: float, base: float = 10) -> list[float]:
    """Returns round numbers inside [low, high]: at least three, if they need not be closer than a tenth."""
    ticks: list[float] = []
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    for steps in _STEPS if base == 10 else _STEPS[:1]:
        ticks = [step * base**power for power in powers for step in steps if low <= step * base**power <= high]
        if len(ticks) >= 3:
            break
    return ticks


def log_axis(axis: Any, ticks: Sequence[Any], text: Callable[[Any], str]) -> None:
    """Puts ticks only where they are named, with plain text."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullFormatter, NullLocator

    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FixedFormatter([text(tick) for tick in ticks]))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def look(index: int) -> dict[str, Any]:
    """Returns the colour, the marker and its size of a series: colours come around before markers repeat with the same
    colour."""
    turn = index // len(SERIES)
    marker = MARKERS[(index + turn) % len(MARKERS)]
    # The crosses have less area than the others.
    return {"color": SERIES[index % len(SERIES)], "marker": marker, "markersize": 8.5 if marker in "PX" else 6.5}
