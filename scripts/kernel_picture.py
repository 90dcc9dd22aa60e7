# SPDX-License-Identifier: Apache-2.0
"""What the pictures of draw_kernels.py are made of: boxes, texts and arrows of an SVG file, and lanes of time."""

from dataclasses import dataclass, field
from html import escape

# Colours by what a thing is, in both schemes: (fill, border) of boxes.
LIGHT = {
    "load": ("#d6e6f9", "#2f6db3"),
    "flight": ("#eef4fb", "#8fb3da"),
    "scores": ("#fde3cc", "#b8621b"),
    "softmax": ("#d8efdc", "#2e7d43"),
    "values": ("#e6dcf5", "#6a4aa5"),
    "scales": ("#f6efc3", "#8d7a10"),
    "other": ("#eceef1", "#7b838d"),
}
DARK = {
    "load": ("#1c3a5e", "#6fa8e6"),
    "flight": ("#16263a", "#4a6d95"),
    "scores": ("#55351a", "#eda05c"),
    "softmax": ("#1d4529", "#73c78a"),
    "values": ("#3d2d5e", "#b39be6"),
    "scales": ("#4a4214", "#d9c654"),
    "other": ("#2d333b", "#8b949e"),
}


def _colours(scheme: dict[str, tuple[str, str]], paper: str, ink: str, muted: str, arrow: str) -> str:
    boxes = "".join(f".{name}{{fill:{fill};stroke:{border}}}" for name, (fill, border) in scheme.items())
    return (
        f".paper{{fill:{paper}}}{boxes}text{{fill:{ink}}}.muted{{fill:{muted}}}.rule{{stroke:{muted}}}"
        f".arrow{{stroke:{arrow}}}.head{{fill:{arrow}}}.halo{{stroke:{paper}}}.signal{{fill:{arrow}}}"
    )


STYLE = (
    "text{font:12px -apple-system,'Segoe UI','Noto Sans','DejaVu Sans',Helvetica,Arial,sans-serif}"
    ".title{font-size:14px;font-weight:600}.small{font-size:11px}.strong{font-weight:600}"
    ".box{stroke-width:1}.arrow{fill:none;stroke-width:1.4}.rule{stroke-width:0.7;stroke-dasharray:2 3}"
    ".halo{stroke-width:4;stroke-linejoin:round;paint-order:stroke}.signal{font-size:11px}"
    + _colours(LIGHT, "#ffffff", "#1b1f24", "#5b636d", "#b3261e")
    + "@media (prefers-color-scheme:dark){"
    + _colours(DARK, "#0d1117", "#e6edf3", "#9aa4af", "#ff8a80")
    + "}"
)


@dataclass
class Picture:
    """Holds an SVG under construction; coordinates are in pixels, y downwards."""

    name: str
    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, w: float, h: float, kind: str, text: str = "", style: str = "") -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" class="box {kind}"/>')
        if text:
            self.text(x + w / 2, y + h / 2 + 4, text, style, "middle")

    def rule(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="rule"/>')

    def arrow(self, points: list[tuple[float, float]], label: str = "", at: tuple[float, float] | None = None) -> None:
        """Draws a line through the points, with a head at the last; the label ends up centred at `at`."""
        self.parts.append(f'<polyline points="{" ".join(f"{x:g},{y:g}" for x, y in points)}" class="arrow"/>')
        (x0, y0), (x, y) = points[-2:]
        along = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = (x - x0) / along, (y - y0) / along
        head = [(x, y), (x - 7 * dx + 3.5 * dy, y - 7 * dy - 3.5 * dx), (x - 7 * dx - 3.5 * dy, y - 7 * dy + 3.5 * dx)]
        self.parts.append(f'<polygon points="{" ".join(f"{x:g},{y:g}" for x, y in head)}" class="head"/>')
        if label and at:
            self.text(*at, label, "signal halo", "middle")

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-label="{escape(self.title)}">\n'
            f"<!-- SPDX-License-Identifier: Apache-2.0. Made by scripts/draw_kernels.py. -->\n<style>{STYLE}</style>\n"
            f'<rect width="{self.width}" height="{self.height}" class="paper"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


class Timeline(Picture):
    """Draws lanes of roles against time. A lane is its top edge and height; the time axis runs to the right."""

    LEFT = 168  # where time begins

    def lane(self, y: float, height: float, name: str, detail: str) -> None:
        self.text(12, y + height / 2 - 2, name, "strong")
        self.text(12, y + height / 2 + 12, detail, "small muted")
        self.rule(self.LEFT, y + height + 7, self.width - 12, y + height + 7)

    def heading(self, *notes: str) -> None:
        self.text(12, 22, self.title, "title")
        for i, note in enumerate(notes):
            self.text(12, 41 + 16 * i, note, "small muted")
        self.text(self.width - 12, 22, "time →", "small muted", "end")


def memory_maps(name: str, title: str, notes: list[str], maps: list[tuple[str, str, list[tuple[str, str, int]], int]]):
    """Draws columns of shared memory.

    A map is its heading, what stands below, (kind, text, bytes) from the top, and the limit in bytes.
    """
    column = 290
    one = Picture(name, 24 + column * len(maps), 376 + 16 * len(notes), title)
    one.text(12, 22, title, "title")
    for i, note in enumerate(notes):
        one.text(12, 41 + 16 * i, note, "small muted")
    top, full = 62 + 16 * len(notes), 252  # of the map; its height if it takes all that a block may have
    least = 19
    for i, (heading, below, parts, limit) in enumerate(maps):
        x = 12 + i * column
        one.text(x, top - 10, heading, "strong")
        total = sum(size for *_, size in parts)
        scale = full / limit
        # Small parts get a line of text's height, which the large ones give.
        small = [size * scale < least for *_, size in parts]
        taken = sum(least for is_small in small if is_small)
        large = sum(size for (*_, size), is_small in zip(parts, small, strict=True) if not is_small)
        squeeze = (total * scale - taken) / large if large * scale > total * scale - taken else scale
        y = float(top)
        for (kind, text, size), is_small in zip(parts, small, strict=True):
            height = least if is_small else size * squeeze
            one.box(x, y, column - 26, height, kind)
            one.text(x + 8, y + height / 2 + 4, text, "small")
            one.text(x + column - 34, y + height / 2 + 4, f"{size:,}", "small", "end")
            y += height
        one.text(x, y + 17, f"{total:,} of {limit:,} bytes", "small strong")
        one.text(x, y + 33, below, "small muted")
    return one
