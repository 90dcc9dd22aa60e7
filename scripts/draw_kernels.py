#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/kernels: who does what when in a block of threads, and what lies in its shared memory.

    draw_kernels.py (--check | --write)

The pictures are SVG files in docs/kernels/img. Their colours follow the reader's light or dark setting. Times are not
to scale unless a picture says so; bytes are those of the kernels' configurations, named in each picture.
"""

import argparse
import itertools
import pathlib
import sys

from kernel_picture import Picture, Timeline, memory_maps

ROOT = pathlib.Path(__file__).resolve().parent.parent
IMG = ROOT / "docs/kernels/img"


def cuda_bulk_block() -> Picture:
    """Draws a block of sixteen rows, memory-bound: a step takes as long as its rows take to arrive."""
    one = Timeline("cuda_bulk-block", 930, 396, "cuda_bulk: a block of 16 query rows, 16-bit cache")
    one.heading(
        "19 warps, 32 keys a step, four stages. Loads run up to four steps ahead; memory sets the pace.",
        "Red: mbarriers, drawn once, around step n and for the stage that it gives back to step n + 4.",
    )
    step, x0, end = 166, one.LEFT + 42, one.width - 14
    rows = {"load": 74, "flight": 126, "scores": 210, "softmax": 262, "values": 314}
    one.lane(rows["load"], 32, "load", "3 warps, 16 keys each")
    one.lane(rows["flight"], 64, "rows on their way", "bulk copies, 4 stages")
    one.lane(rows["scores"], 32, "scores", "4 warps, K / 4 each")
    one.lane(rows["softmax"], 32, "softmax", "4 warps, 4 rows each")
    one.lane(rows["values"], 32, "values", "8 warps, 64 channels each")
    phases = (("scores", 0.0, 0.38, "S"), ("softmax", 0.43, 0.47, "P"), ("values", 0.93, 0.34, "O"))
    issue = 1.43  # of the step that gets the stage back, behind the landing of the step that gives it

    for k in range(8):  # step n + k
        name = "n" if k == 0 else f"n+{k}"
        landed, issued = x0 + k * step, x0 + (k - 4 + issue) * step
        for kind, begin, length, word in phases:
            x, w = landed + begin * step, length * step
            if x < end - 30:
                one.box(x, rows[kind], min(w, end - x), 32, kind, f"{word}({name})")
        if k >= 4 and issued < end - 30:
            one.box(issued, rows["load"], min(0.5 * step, end - issued), 32, "load", f"load {name}")
        begin, stop = max(issued + 0.25 * step, one.LEFT + 2), min(landed, end)
        if begin < stop - 8:
            one.box(begin, rows["flight"] + k % 4 * 16, stop - begin, 14, "flight", name, "small")

    under = {kind: top + 32 for kind, top in rows.items()}
    one.arrow([(x0, rows["flight"] + 14), (x0 + 14, rows["scores"])], "kv_full(n)", (x0 + 50, rows["flight"] + 78))
    x = x0 + 0.38 * step
    one.arrow([(x, under["scores"]), (x + 12, rows["softmax"])], "s_full(n)", (x - 30, rows["softmax"] - 6))
    x = x0 + 0.90 * step
    one.arrow(
        [(x - 34, rows["softmax"]), (x0 + step + 6, under["scores"])], "s_empty(n)", (x + 50, rows["softmax"] - 6)
    )
    one.arrow([(x, under["softmax"]), (x + 12, rows["values"])], "p_full(n)", (x - 30, rows["values"] - 6))
    x, y = x0 + 1.405 * step, rows["values"] + 16
    one.arrow([(x0 + 1.27 * step, y), (x, y), (x, under["load"] - 14), (x0 + issue * step, under["load"] - 14)],
              "kv_empty(n)", (x + 40, rows["flight"] + 78))  # fmt: skip
    one.text(12, 376, "O(n): accumulators of 16 rows stay in the value warps' registers; they are rescaled by factors "
             "that the softmax warps leave in shared memory.", "small muted")  # fmt: skip
    return one


def cuda_sm90_block() -> Picture:
    """Draws a block of 64 rows; the clocks are those of docs/notebook/2026-11-22-flashmla.md."""
    one = Timeline("cuda_sm90-block", 930, 366, "cuda_sm90: a block of 64 query rows, 16-bit cache")
    one.heading(
        "Four warpgroups, 64 keys a step, two stages. Lengths: clocks of a step of 128 heads (H200, 2026-11-22).",
        "Red: mbarriers, drawn once, around step n and for the stage that it gives back to step n + 2.",
    )
    x0, per = one.LEFT + 10, 0.0905  # pixels a clock
    rows = {"load": 92, "scores": 152, "tensor": 204, "values": 272}
    one.lane(rows["load"], 36, "load", "1 warpgroup, cp.async")
    one.lane(rows["scores"], 88, "scores, softmax", "1 warpgroup")
    one.lane(rows["values"], 36, "values", "2 warpgroups, d_v / 2 each")
    end = one.width - 14

    def at(clock: float) -> float:
        return x0 + clock * per

    def draw(kind: str, row: str, begin: float, clocks: float, text: str) -> None:
        x, w = max(at(begin), x0), clocks * per - max(x0 - at(begin), 0)
        if x < end - 24 and w > 12:
            w = min(w, end - x)
            one.box(x, rows[row], w, 36, kind, text if w > 6.6 * len(text) else text.split(" ")[0])

    def name(k: int) -> str:
        return {0: "n", -1: "n−1"}.get(k, f"n+{k}")

    period, products, first, second, values = 3550, 2100, 680, 310, 1450
    for k in (-1, 0, 1, 2):
        t = k * period + 200
        draw("scores", "scores", t, products, f"S({name(k)}) = Q Kᵀ")
        draw("softmax", "tensor", t + products, first, f"P({name(k)}) a")
        draw("softmax", "tensor", t + products + first, second, "b")
        draw("values", "values", t + products + first, values, f"O += P({name(k)}) V")
        draw("load", "load", t + products + first + values / 2, 800, f"load {name(k + 2)}")
    t = 200
    p_a = t + products + first
    one.arrow([(at(p_a), rows["tensor"] + 36), (at(p_a) + 6, rows["values"])], "p_full(n, a), (n, b)",
              (at(p_a) - 66, rows["values"] - 10))  # fmt: skip
    empty = p_a + values / 2
    one.arrow([(at(empty), rows["values"]), (at(empty), rows["load"] + 36)], "kv_empty(n, a), (n, b)",
              (at(empty) + 2, rows["load"] - 8))  # fmt: skip
    landed = empty + 800
    one.arrow([(at(landed) - 30, rows["load"] + 36), (at(landed) + 8, rows["scores"] - 2)])
    one.text(at(landed) + 22, rows["load"] + 52, "kv_full(n+2), three pieces", "signal halo", "start")
    one.text(12, 336, "a, b: the halves of 32 keys. P(n) takes the place of the rotary channels of stage n, which nobody "
             "reads once S(n) is complete.", "small muted")  # fmt: skip
    one.text(12, 353, "S(n + 1) and O(n) are independent: both are on the tensor cores while the values are added.",
             "small muted")  # fmt: skip
    return one


def cuda_sm90_prefill_block() -> Picture:
    one = Timeline("cuda_sm90_prefill-block", 930, 318, "cuda_sm90 prefill: a block of 128 query rows of one head")
    one.heading(
        "Three warpgroups, 128 keys a tile, K and V in two stages each. The two that compute take turns on the tensor",
        "cores: while one multiplies, the other exponentiates. Red: mbarriers, and the named barriers of the turns.",
    )
    x0, unit, end = one.LEFT + 6, 92, one.width - 14
    rows = {"one": 78, "two": 150, "load": 238}
    one.lane(rows["one"], 36, "rows 0 to 63", "1 warpgroup")
    one.lane(rows["two"], 36, "rows 64 to 127", "1 warpgroup")
    one.lane(rows["load"], 32, "load", "1 warpgroup, tensor copies")

    def draw(kind: str, row: str, begin: float, length: float, text: str) -> None:
        x, w = x0 + begin * unit, length * unit - 3
        if x < end - 30:
            one.box(x, rows[row], min(w, end - x), 36 if row != "load" else 32, kind, text, "small")

    for k in range(2):
        t = 4 * k
        draw("scores", "one", t, 1, f"S({k + 1})")
        draw("values", "one", t + 1, 1, f"O += P({k}) V")
        draw("softmax", "one", t + 2, 1.94, f"softmax({k + 1})")
        draw("softmax", "two", t, 1.94, f"softmax({k})")
        draw("scores", "two", t + 2, 1, f"S({k + 1})")
        draw("values", "two", t + 3, 1, f"O += P({k}) V")
        draw("load", "load", t - 0.9 + (1 if k == 0 else 0), 1, f"K({k + 2})")
        draw("load", "load", t + 0.1 + (1 if k == 0 else 0), 1, f"V({k + 1})")
    draw("load", "load", 7.1, 1, "K(4)")
    for turn, (a, b) in enumerate([("one", "two"), ("two", "one"), ("one", "two")]):
        x = x0 + 2 * (turn + 1) * unit - 3
        y = (rows[a] + 36, rows[b]) if a == "one" else (rows[a], rows[b] + 36)
        one.arrow([(x - 5, y[0]), (x + 8, y[1])], "turn", (x + 24, rows["two"] - 14))
    x = x0 + 3 * unit - 3
    one.arrow([(x, rows["two"] + 36), (x + 10, rows["load"])], "k_empty(1)", (x - 38, rows["load"] - 8))
    y = rows["two"] + 50
    one.arrow([(x0 + 0.6 * unit, rows["load"]), (x0 + 0.6 * unit, y), (x0 + 6.2 * unit, y),
               (x0 + 6.2 * unit, rows["two"] + 36)], "k_full(2)", (x0 + 4.6 * unit, y + 14))  # fmt: skip
    one.text(12, 302, "P stays in registers: the accumulators of S have the layout of the first operand of P V. Tiles "
             "that all rows see whole take a loop of their own.", "small muted")  # fmt: skip
    return one


def two_groups(one: Timeline, second: int) -> tuple[dict[str, int], int, int]:
    """Draws the lanes of a block of two groups, and returns their tops and the ends of the time that they show."""
    rows = {"load": 84, "zero": 146, "one": second}
    one.lane(rows["load"], 40, "cp.async", "rows on their way")
    one.lane(rows["zero"], 40, "group 0", "rows 0 to 31")
    one.lane(rows["one"], 40, "group 1", "rows 32 to 63")
    return rows, one.LEFT + 8, one.width - 14


def cuda_portable_block() -> Picture:
    one = Timeline("cuda_portable-block", 930, 346, "cuda_portable: a block of 64 rows of absorbed attention")
    one.heading(
        "Two groups of four warps, 32 keys a step. Red: mbarriers, from who arrives to who waits. That both groups copy",
        "rows into the tile that group 1 leaves last is what keeps them half a step apart.",
    )
    rows, x0, end = two_groups(one, 226)
    scores, exchange, softmax, fill, values = 98, 22, 56, 26, 108
    step = scores + 2 * exchange + softmax + fill + values
    behind = scores + 2 * exchange + softmax  # of group 1, which begins with its copies

    def draw(x: float, y: int, phases: list[tuple[str, float, str]]) -> float:
        for kind, width, text in phases:
            left, right = max(x, x0), min(x + width, end)
            if left < right - 4:
                whole = left == x and right == x + width
                one.box(left, y, right - left, 40, kind, text if whole else "", "small")
            x += width
        return x

    for k in range(-1, 3):
        name = {-1: "n - 1", 0: "n"}.get(k, f"n + {k}")
        copies = [("load", fill, "")]
        to_p = [("scores", scores, f"S({name})"), ("scales", exchange, "0"), ("scales", exchange, "1"),
                ("softmax", softmax, "P")]  # fmt: skip
        x, product = x0 + k * step, [("values", values, f"O += P V({name})")]
        draw(x, rows["zero"], to_p + copies + product)
        draw(x + behind, rows["one"], copies + to_p + product)
        later = x + behind  # group 0 has P, group 1 has left the values of the step before
        if k < 0 or later + fill > end:
            continue
        before, next_one = {0: "n - 1", 1: "n"}[k], f"n + {k + 1}"
        one.box(later + 8, rows["load"] + (k % 2) * 20, min(fill + values - 14, end - later - 8), 18, "flight",
                f"rows of {next_one}", "small")  # fmt: skip
        one.arrow([(later - 6, rows["one"]), (later + 10, rows["zero"] + 40)])
        one.text(later + 14, rows["one"] - 16, f"kv_empty({before})", "signal halo", "start")
        if x + step < end - 40:
            top = rows["load"] + (k % 2) * 20 + 18
            one.arrow([(x + step - 10, top), (x + step + 8, rows["zero"])])
            one.text(min(x + step + 10, end - 74), rows["zero"] - 18, f"kv_full({next_one})", "signal halo", "start")
    one.text(12, 298, "0, 1: exchanges. Pairs of warps give each other half of the sums that they have; behind both, a score is whole, "
             "in one lane.", "small muted")  # fmt: skip
    one.text(12, 315, "P ends with a barrier of the group (bar.red.or), which also says whether the step is rare: a row outgrew its "
             "maximum, or a key is poison.", "small muted")  # fmt: skip
    one.text(12, 332, "Blue boxes: a warp waits for kv_empty, issues the copies of four rows, and, one warp in eight, finds the "
             "rows of the step behind.", "small muted")  # fmt: skip
    return one


def cuda_fp8_block() -> Picture:
    one = Timeline("cuda_fp8-block", 930, 330, "cuda_fp8: a block of 64 rows of absorbed attention")
    one.heading(
        "Two groups of four warps, 32 keys a step, half a step apart. Red: mbarriers, from who arrives to who waits.",
        "Rows of step n + 1 are copied into the tile that step n - 1 had, once group 1 is done with its values.",
    )
    rows, x0, end = two_groups(one, 218)
    scores, softmax, values, fill = 96, 74, 124, 26
    step = scores + softmax + values + fill

    def box(x: float, y: int, width: float, kind: str, text: str) -> None:
        if x < end:
            one.box(x, y, min(width, end - x), 40, kind, text if x + width < end else "", "small")

    for k in range(3):
        x = x0 + k * step
        box(x, rows["zero"], scores, "scores", f"S of step {k}")
        box(x + scores, rows["zero"], softmax, "softmax", "softmax")
        box(x + scores + softmax, rows["zero"], fill, "load", "")
        box(x + scores + softmax + fill, rows["zero"], values, "values", f"O += P V {k}")
        later = x + scores + softmax
        box(later, rows["one"], fill, "load", "")
        box(later + fill, rows["one"], scores, "scores", f"S of step {k}")
        box(later + fill + scores, rows["one"], softmax, "softmax", "softmax")
        box(later + fill + scores + softmax, rows["one"], values, "values", f"O += P V {k}")
        if later + 60 < end:
            one.arrow([(later - 4, rows["zero"] + 40), (later - 4, rows["one"] - 12), (later + fill + 40, rows["one"] - 12),
                       (later + fill + 40, rows["one"])])  # fmt: skip
            one.text(later + fill + 46, rows["one"] - 16, "scores_read(0)", "signal halo", "start")
        if later + fill < end:
            width = min(step - scores - softmax - 8, end - later - fill)
            one.box(later + fill, rows["load"] + (k % 2) * 20, width, 18, "flight", f"rows of step {k + 1}", "small")
    one.text(12, 290, "Narrow boxes: a warp waits for kv_empty, issues the copies of four rows, and, one warp in eight, finds the "
             "rows of the step behind.", "small muted")  # fmt: skip
    one.text(12, 307, "The softmax ends with P times the scales of the keys, as e4m3, once for every scale that a key has; rows are "
             "multiplied as they land.", "small muted")  # fmt: skip
    return one


def cuda_sm90_fp8_block() -> Picture:
    one = Timeline("cuda_sm90_fp8-block", 930, 344, "cuda_sm90_fp8: a block of 64 query rows")
    one.heading(
        "Three warpgroups, 64 keys a step, four stages of rows. Red: mbarriers, from who arrives to who waits.",
        "Each math warpgroup has the scores of every second step, and the values of half of the channels of all steps.",
    )
    rows = {"load": 74, "flight": 126, "zero": 196, "one": 258}
    x0, end = one.LEFT + 70, one.width - 14
    scores, softmax, values, gap = 78, 66, 54, 6
    pair = scores + softmax + 2 * (values + gap) + gap
    one.lane(rows["load"], 32, "load", "4 warps, 16 keys each")
    one.lane(rows["flight"], 44, "rows on their way", "cp.async, 4 stages")
    one.lane(rows["zero"], 40, "math 0", "channels 0 to 255")
    one.lane(rows["one"], 40, "math 1", "channels 256 to 511")

    def box(x: float, y: int, width: float, height: int, kind: str, text: str) -> None:
        if x < end:
            one.box(x, y, min(width, end - x), height, kind, text if x + width < end else "", "small")

    for k in range(3):
        x = x0 + k * pair
        for group, row in enumerate(("zero", "one")):
            step = 2 * k + group
            box(x, rows[row], scores, 40, "scores", f"S of step {step}")
            box(x + scores, rows[row], softmax, 40, "softmax", "softmax, P")
            for i in range(2):
                at = x + scores + softmax + gap + i * (values + gap)
                box(at, rows[row], values, 40, "values", f"P V {2 * k + i}")
        handed = x + scores + softmax + gap / 2
        if handed + values < end:
            one.arrow([(handed, rows["zero"] + 40), (handed, rows["one"] - 2)])
            one.text(handed + 8, rows["one"] - 7, f"p_full({2 * k}), p_full({2 * k + 1})", "signal halo", "start")
        for i in range(2):
            issued = x + scores + softmax + (i + 1) * (values + gap) + gap
            if k < 2 and issued < end:
                box(issued, rows["load"], 26, 32, "load", str(2 * k + i + 4))
                box(issued + 8, rows["flight"] + i * 22, pair - 40, 20, "flight", f"rows of step {2 * k + i + 4}")
    one.text(12, 330, "The rows' maxima go from each step to the next through max_full, in the middle of the softmax. A stage is free when both "
             "warpgroups have its values.", "small muted")  # fmt: skip
    return one


def cuda_portable_prefill_block() -> Picture:
    one = Timeline("cuda_portable_prefill-block", 930, 268, "cuda_portable prefill: one stage, two blocks an SM")
    one.heading(
        "Four warps of 32 rows each. K of the next tile arrives during softmax and P V, V of this tile during Q Kᵀ.",
        "The other block of the SM fills the gaps. Red: __syncthreads behind cp.async waits.",
    )
    x0, end = one.LEFT + 8, one.width - 14
    load, warps = 80, 156
    one.lane(load, 40, "cp.async", "tiles on their way")
    one.lane(warps, 40, "4 warps", "32 rows each")
    x = x0
    for k in range(3):
        one.arrow([(x + 4, warps - 16), (x + 4, warps + 40)])
        x += 12
        for kind, width, text, tile, upper in (
            ("scores", 112, "S = Q Kᵀ", f"V({'t' if k == 0 else f't+{k}'})", 0),
            ("softmax", 176, "softmax, O += P V", f"K(t+{k + 1})", 1),
        ):
            if x > end - 20:
                break
            w = min(width, end - x)
            one.box(x, warps, w, 40, kind if kind == "scores" else "values", text if w > 100 else "", "small")
            one.box(x, load + upper * 20, w - 2, 18, "flight", tile, "small")
            x += width
            if kind == "scores":
                if x < end - 20:
                    one.arrow([(x + 4, warps - 16), (x + 4, warps + 40)])
                x += 10
    one.text(x0 + 2, warps + 57, "K(t) is there", "signal halo")
    one.text(x0 + 128, warps + 57, "V(t) is there, K(t) is read", "signal halo")
    one.text(12, 250, "Where a block gets 99 KB, it has the SM alone, and two groups of four warps are what the two blocks are here: "
             "each has every second tile.", "small muted")  # fmt: skip
    return one


def cuda_fp8_prefill_block() -> Picture:
    one = Timeline("cuda_fp8_prefill-block", 930, 300, "cuda_fp8 prefill: two blocks of an SM")
    one.heading(
        "Four warps of 32 rows each. A stage holds K and V of the same keys; while a run is computed, the next stage arrives.",
        "Red: __syncthreads behind cp.async waits, once a stage. Nothing orders the two blocks.",
    )
    x0, end = one.LEFT + 8, one.width - 14
    load, warps, others = 80, 132, 206
    one.lane(load, 24, "cp.async", "block A")
    one.lane(warps, 40, "block A", "4 warps")
    one.lane(others, 40, "block B", "4 warps")
    kinds = (("scores", 104, "S = Q Kᵀ"), ("softmax", 74, "P = e4m3"), ("values", 96, "O += P V"))
    x = x0
    for k in range(3):
        one.arrow([(x + 4, warps - 16), (x + 4, warps + 40)])
        x += 12
        one.box(x, load, min(270, end - x), 22, "flight", f"K, V(t+{k + 1})", "small")
        for kind, width, text in kinds:
            if x > end - 20:
                break
            one.box(x, warps, min(width, end - x), 40, kind, text if end - x > 80 else "", "small")
            x += width
    x = x0
    for kind, width, text in (("values", 60, "P V"), *kinds * 3):
        if x > end - 20:
            break
        one.box(x, others, min(width, end - x), 40, kind, text if end - x > 80 else "", "small")
        x += width + (12 if kind == "values" else 0)
    one.text(x0 + 2, warps + 57, "K(t), V(t) are there, and the stage before is read", "signal halo")
    one.text(12, 284, "The tensor cores are idle where both blocks are at their softmax, and half as long at work as for bf16.", "small muted")  # fmt: skip
    return one


def cpu_block() -> Picture:
    one = Timeline("cpu-block", 930, 296, "cpu: a worker on one block of 96 keys, decode of a bf16 cache")
    one.heading(
        "Up to 128 query rows of one request, in groups of 16: a row is a lane of a vector. Times not to scale.",
        "One thread; what stands above a phase is done by the same loop, on ports that the products leave idle.",
    )
    x0 = one.LEFT + 8
    beside, main = 84, 150
    one.lane(beside, 40, "beside", "in the same loop")
    one.lane(main, 44, "worker", "tile kernels")
    x = x0
    phases = (
        ("scores", 84, "S: group 0", "prefetch keys"), ("softmax", 58, "softmax", ""),
        ("scores", 84, "S: group 1", "prefetch keys"), ("softmax", 58, "softmax", ""),
        ("other", 30, "…", ""), ("load", 62, "pack 0", ""),
        ("values", 104, "O: slab 0", "pack slab 1"), ("values", 104, "O: slab 1", "pack slab 2"),
        ("other", 30, "…", ""), ("values", 104, "O: slab 15", ""),
    )  # fmt: skip
    for kind, width, text, other in phases:
        one.box(x, main, width - 3, 44, kind, text, "small")
        if other:
            one.box(x, beside + 8, width - 3, 26, "flight", other, "small")
        x += width
    one.text(x0, 222, "S: tiles of 32 rows × 8 keys, 16 accumulators; a key is broadcast from the cache where it lies, 32 bits "
             "at a time.", "small muted")  # fmt: skip
    one.text(x0, 240, "softmax: rows are lanes, so maximum, sum and rescaling need no shuffles. P leaves as pairs of keys.",
             "small muted")  # fmt: skip
    one.text(x0, 258, "O: tiles of 8 rows × 32 channels. A slab is 32 channels of all 96 keys, two keys interleaved, 6 KB in L1.",
             "small muted")  # fmt: skip
    one.text(x0, 276, "Quantized rows become bf16 once a block, before the scores.", "small muted")
    return one


def work_split() -> Picture:
    one = Picture("work-split", 930, 248, "The work list: units laid end to end, cut into equal shares")
    one.text(12, 22, one.title, "title")
    one.text(12, 41, "Five requests of different length, four workers. Every key block costs the same; a unit costs a little "
             "more to begin, and a cut more again.", "small muted")  # fmt: skip
    x0, y, workers = 118, 58, 4
    lengths = (260, 84, 96, 250, 106)
    kinds = ("load", "scores", "softmax", "values", "scales")
    share = sum(lengths) / workers
    for label, detail, top in (("units", "rows × all keys", 20), ("segments", "a share each", 84),
                               ("combine", "cut units only", 154)):  # fmt: skip
        one.text(12, y + top, label, "strong")
        one.text(12, y + top + 14, detail, "small muted")
    for worker in range(workers):
        one.text(x0 + (worker + 0.5) * share, y + 58, f"worker {worker}", "small muted", "middle")
        if worker > 0:
            one.rule(x0 + worker * share, y - 6, x0 + worker * share, y + 114)
    at = 0.0
    for i, (length, kind) in enumerate(zip(lengths, kinds, strict=True)):
        one.box(x0 + at, y, length - 2, 40, kind, f"request {i}", "small")
        cuts = [at, *(c * share for c in range(1, workers) if at < c * share < at + length), at + length]
        centre = x0 + at + length / 2
        for part, (first, last) in enumerate(itertools.pairwise(cuts)):
            whole = len(cuts) == 2
            text = f"{i}" if whole else f"{i}{'abc'[part]}"
            left = 0 if first == at else 3
            one.box(x0 + first + left, y + 66, last - first - left - (3 if last < at + length else 2), 40, kind, text,
                    "small")  # fmt: skip
            if not whole:
                middle = x0 + (first + last) / 2
                one.arrow([(middle, y + 106), (centre + (-16 if middle < centre else 16), y + 142)])
        if len(cuts) > 2:
            one.box(centre - 52, y + 142, 104, 28, kind, f"request {i}: o, lse", "small")
        at += length
    one.text(x0 + 796, y + 160, "red: partial states", "signal", "end")
    one.text(x0 + 796, y + 174, "(o, max, sum) in f32", "signal", "end")
    return one


KB = 1024


def cuda_bulk_memory() -> Picture:
    return memory_maps(
        "cuda_bulk-memory", "cuda_bulk: shared memory of a block (512 + 64 channels)",
        ["Bytes; parts of less than a line are drawn a line high. Rows of a stage are an odd number of 16-byte chunks apart, "
         + "in other banks."],
        [
            ("16 rows, 16-bit", "608 threads, no setmaxnreg", [
                ("other", "barriers, units, factors", 768), ("softmax", "P, two steps of 16 × 32", 2_560),
                ("scores", "S, four K slices of 16 × 32, f32", 10_240), ("scores", "Q, 16 rows", 18_688),
                *[("load", f"stage {i}: 32 rows of 1,168", 37_376) for i in range(4)]], 227 * KB),
            ("16 rows, e4m3", "768 threads; rows of fp8_ds_mla", [
                ("other", "barriers, units, scales of values", 2_944), ("softmax", "P, two steps of 16 × 64", 4_608),
                ("scores", "S, four K slices of 16 × 64, f32", 18_432), ("scores", "Q, to be converted", 19_456),
                *[("load", f"stage {i}: 64 rows of 656 + 16", 43_008) for i in range(4)]], 227 * KB),
            ("64 rows, 16-bit", "512 threads; SM100, or forced on SM90", [
                ("other", "barriers, units, factors", 1_408), ("softmax", "P, two steps of 64 × 32", 10_240),
                ("scores", "S, two K slices of 64 × 32, f32", 16_384), ("scores", "Q beyond registers, 64 rows", 54_272),
                *[("load", f"stage {i}: 32 rows of 1,168", 37_376) for i in range(4)]], 227 * KB),
        ],
    )  # fmt: skip


def cuda_sm90_memory() -> Picture:
    tile = 73_728
    stage = [("load", "latent pieces, 8 × [64, 64], swizzled", 65_536), ("softmax", "rotary channels, then P", 8_192)]
    return memory_maps(
        "cuda_sm90-memory", "cuda_sm90: shared memory of a block (512 + 64 channels)",
        ["Bytes. A piece is 64 channels of 64 rows: rows of 128 bytes, swizzled by 128 bytes.",
         "The same tile is read along k for the scores and along n (transposed) for the values."],
        [
            ("absorbed attention", "512 threads; registers 72, 120, 160, 160", [
                ("scores", "Q: 9 pieces", tile), *stage, *stage, ("other", "barriers, units, factors", 1_416)], 227 * KB),
            ("prefill 192/128", "384 threads; registers 40, 232, 232", [
                ("scores", "Q: 2 × [64, 192]", 49_152), ("load", "K: 2 stages of [128, 192]", 98_304),
                ("values", "V: 2 stages of [128, 128]", 65_536), ("other", "outputs on their way", 16_384),
                ("other", "units, flags, barriers", 224)], 227 * KB),
        ],
    )  # fmt: skip


def cuda_sm90_fp8_memory() -> Picture:
    stage = [("load", "a stage: 4 pieces of e4m3", 32_768), ("softmax", "rotary channels, then P", 8_192)]
    return memory_maps(
        "cuda_sm90_fp8-memory", "cuda_sm90_fp8: shared memory", [],
        [
            ("384 threads", "registers 40, 232, 232", [
                ("scores", "Q: 4 pieces of e4m3, rotary", 40_960), *stage, *stage, *stage, *stage,
                ("softmax", "P of scales 3 and 4, two steps", 16_384), ("other", "scales of keys and of P", 6_144),
                ("other", "maxima, factors, units, barriers", 2_936)], 227 * KB),
        ],
    )  # fmt: skip


def cuda_portable_memory() -> Picture:
    return memory_maps(
        "cuda_portable-memory", "cuda_portable: shared memory of a block (512 + 64 channels)",
        ["Bytes. Rows in tiles are swizzled. Queries pass through the tiles into registers before the first step.",
         "Each warp has a place of its own for exchanges: half of its scores of a step."],
        [
            ("64 rows, 16-bit", "32 keys a step, two groups", [
                ("other", "places, entries, row state", 2_944), ("scores", "exchanges, 8 × 2,048", 16_384),
                ("softmax", "P of both groups, two steps", 8_192), ("load", "tile A: 32 rows of 1,152", 36_864),
                ("load", "tile B", 36_864)], 99 * KB),
            ("64 rows, e4m3", "two groups, rows are decoded where they land", [
                ("other", "places, entries, row state", 2_944), ("scores", "exchanges, 8 × 2,048", 16_384),
                ("softmax", "P of both groups, two steps", 8_192),
                ("load", "tile A: 640 bytes of a row, then 1,152", 36_864), ("load", "tile B", 36_864)], 99 * KB),
            ("16 rows, e4m3", "rows land raw, one tile of bf16", [
                ("other", "places, scales, row state", 4_224), ("scores", "exchanges, 8 × 512", 4_096),
                ("softmax", "P, two steps", 2_048), ("values", "tile: 32 rows as bf16", 36_864),
                ("load", "raw stage 0: 32 rows of 640", 20_480), ("load", "raw stage 1", 20_480)], 99 * KB),
        ],
    )  # fmt: skip


def cuda_fp8_memory() -> Picture:
    return memory_maps(
        "cuda_fp8-memory", "cuda_fp8: shared memory of a block (512 + 64 channels)",
        ["Bytes. A row is 512 e4m3 and 64 rotary channels of 8 or 16 bits, swizzled; nobody decodes it."],
        [
            ("64 rows", "32 keys a step, two groups", [
                ("other", "places, row state, scales of P", 5_120), ("scores", "S of one group, four K slices", 16_384),
                ("softmax", "P of both groups, 8 scales and rope", 20_480), ("load", "tile A: 32 rows of 640", 20_480),
                ("load", "tile B", 20_480), ("other", "scales of the keys", 2_048)], 99 * KB),
            ("16 rows", "32 keys a step", [
                ("other", "places, row state, scales of P", 2_688), ("scores", "S, four K slices", 8_192),
                ("softmax", "P, 8 scales and rope", 5_120), ("load", "tile A: 32 rows of 640", 20_480),
                ("load", "tile B", 20_480), ("load", "tile C", 20_480), ("other", "scales of the keys", 3_072)], 99 * KB),
        ],
    )  # fmt: skip


def cuda_fp8_prefill_memory() -> Picture:
    def stages(keys: int, d_qk: int, d_v: int) -> list[tuple[str, str, int]]:
        return [
            part
            for i in range(2)
            for part in (
                ("scores", f"K of stage {i}: {keys} rows of {d_qk}", keys * d_qk),
                ("values", f"V of stage {i}: {keys} rows of {d_v}", keys * d_v),
            )
        ]

    def block(heading: str, below: str, rows: int, q_bytes: int, parts: list[tuple[str, str, int]]):
        queries = ("load", f"Q: {rows} rows of {q_bytes}", rows * q_bytes)
        return heading, below, [queries, *parts, ("other", "rows of the warps", 64)], 49 * KB

    return memory_maps(
        "cuda_fp8_prefill-memory", "cuda_fp8 prefill: shared memory of a block, of which an SM has two",
        ["Bytes, swizzled. Rows of K of 192 channels take 256 bytes. What of Q is not here is in registers."],
        [
            block("192/128", "64 channels of Q in registers", 128, 128, stages(32, 256, 128)),
            block("128/128", "64 keys a stage", 128, 128, stages(64, 128, 128)),
            block("256/256", "16 rows a warp", 64, 256, stages(32, 256, 256)),
        ],
    )  # fmt: skip


PICTURES = (
    cuda_fp8_block, cuda_fp8_memory, cuda_fp8_prefill_block, cuda_fp8_prefill_memory, cuda_bulk_block, cuda_bulk_memory, cuda_sm90_block, cuda_sm90_memory, cuda_sm90_prefill_block, cuda_sm90_fp8_block, cuda_sm90_fp8_memory, cuda_portable_block,
    cuda_portable_memory, cuda_portable_prefill_block, cpu_block, work_split,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="whether docs/kernels/img holds exactly these pictures")
    mode.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    drawn = {f"{one.name}.svg": one.svg() for one in (draw() for draw in PICTURES)}
    if arguments.write:
        IMG.mkdir(exist_ok=True)
        for name, text in drawn.items():
            (IMG / name).write_text(text, encoding="utf-8")
        return
    there = {path.name: path.read_text(encoding="utf-8") for path in IMG.glob("*")}
    stale = sorted(name for name in drawn.keys() | there.keys() if drawn.get(name) != there.get(name))
    if stale:
        sys.exit(f"docs/kernels/img: not as drawn: {', '.join(stale)}; refresh with `make docs`")


if __name__ == "__main__":
    main()
