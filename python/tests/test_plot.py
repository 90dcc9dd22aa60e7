# SPDX-License-Identifier: Apache-2.0
"""Tests `libmla plot`: what the figures show, how they read, and what bad input gets."""

from __future__ import annotations

import itertools
import os
import random
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.image
import matplotlib.text
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from bench_results import BAD_FILES, BUSY_LOAD, MEASURED, bad_files, document, gpu_result, result, unwritable, write
from libmla import plot
from libmla._bench import comparisons, drawing, figures, names, peers, results
from processes import python


def run_of(*made: dict[str, Any], name: str = "run", **changes: Any) -> results.BenchRun:
    return results.parse(document(*made, **changes), name, f"{name}.json")


def drawn(function: Any, *arguments: Any) -> drawing.Drawing:
    """Returns the only figure of a kind."""
    with drawing.style():
        (only,) = function(*arguments)
    return only


def texts(figure: Any) -> list[str]:
    """Returns everything that is written in a figure, as a reader sees it."""
    FigureCanvasAgg(figure).draw()  # ticks get their texts
    found = figure.findobj(matplotlib.text.Text)
    return [" ".join(artist.get_text().split()) for artist in found if artist.get_text().strip()]


def marks(one: drawing.Drawing) -> list[tuple[float, float]]:
    lines = {line.get_gid(): line for axes in one.figure.axes for line in axes.lines}
    return [(lines[gid].get_xdata()[0], lines[gid].get_ydata()[0]) for gid in one.tooltips]


SWEEP = [
    result(cache=cache, heads=heads, kv_len=kv_len, gflops=share * 500, gbps=share * 500 / heads, ceiling_share=share)
    for cache, heads, share in (("bf16", 16, 0.7), ("bf16", 128, 0.9), ("fp8_ds_mla", 16, 0.6), ("fp8", 128, 0.85))
    for kv_len in (1024, 4096, 32768)
]


# Files and exit statuses.


def test_measured_results_give_png_and_svg_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "after.json", *document(*SWEEP)["results"])
    out = tmp_path / "new" / "plots"
    assert plot.main([os.fspath(MEASURED), os.fspath(tmp_path / "after.json"), "--out", os.fspath(out)]) == 0
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    kinds = {"bench_cpu-roofline", "bench_cpu-share", "bench_cpu-backends", "after-roofline", "after-share"}
    assert {path.stem for path in printed} == kinds | {"bench_cpu-vs-after"}
    assert {path.suffix for path in printed} == {".png", ".svg"}
    for path in printed:
        if path.suffix == ".png":
            pixels = matplotlib.image.imread(path)
            assert pixels.shape[0] > 300 and pixels.shape[1] > 600
            assert pixels.std() > 0.05, "blank"
        else:
            assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_the_same_results_give_the_same_svg(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        assert plot.main([os.fspath(MEASURED), "--out", os.fspath(tmp_path / folder), "--format", "svg"]) == 0
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_files_of_one_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    for folder in ("before", "after"):
        write(tmp_path / folder / "bench.json", result())
    files = [os.fspath(tmp_path / folder / "bench.json") for folder in ("before", "after", "after")]
    out = tmp_path / "out"
    assert plot.main([*files, "--out", os.fspath(out), "--kind", "roofline", "--format", "png"]) == 0
    assert {path.stem for path in out.iterdir()} == {
        "before-bench-roofline",
        "after-bench-roofline",
        "after-bench-2-roofline",
    }


def test_dash_is_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MEASURED.open(encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert plot.main(["-", "--out", os.fspath(tmp_path), "--kind", "share", "--format", "svg"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["stdin-share.svg"]


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_get_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, message = bad_files(tmp_path)[name]
    assert plot.main([os.fspath(MEASURED), path, "--out", os.fspath(tmp_path / "out")]) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith(f"libmla plot: {path}: ") and message in streams.err
    assert streams.err.count("\n") == 1 and not streams.out
    assert not (tmp_path / "out").exists()


def test_unwritable_folder_gets_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = unwritable(tmp_path)
    assert plot.main([os.fspath(MEASURED), "--out", os.fspath(out)]) == 2
    error = capsys.readouterr().err
    assert error == f"libmla plot: cannot write to '{out}': Not a directory\n"


@pytest.mark.parametrize("option", ["--kind", "--format"])
def test_unknown_choices_name_the_known_ones(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        plot.main([os.fspath(MEASURED), option, "pie"])
    assert stop.value.code == 2
    assert "expected some of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "kind", "message"),
    [
        ([result(device="emulated:sm90")], "roofline", "from the emulator, whose times say nothing about a GPU"),
        ([result(device="emulated:sm90")], "share", "from the emulator, whose times say nothing about a GPU"),
        ([result(op="append", gflops=0.0)], "roofline", "no result has arithmetic and measured ceilings"),
        ([result()], "share", "no operation was measured at two lengths"),
        ([result(), result(heads=8)], "backends", "no case was measured on two backends"),
        ([result()], "runs", "a comparison takes the results of two runs"),
    ],
)
def test_a_plot_that_would_be_empty_is_refused(
    made: list[dict[str, Any]], kind: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "some.json", *made)
    assert plot.main([os.fspath(path), "--kind", kind, "--out", os.fspath(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_runs_without_a_common_case_say_so_and_draw_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write(tmp_path / f"{heads}.json", result(heads=heads)) for heads in (16, 32)]
    assert plot.main([*map(os.fspath, paths), "--out", os.fspath(tmp_path / "out"), "--format", "png"]) == 0
    assert "16 and 32 have no case in common" in capsys.readouterr().err
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {"16-roofline", "32-roofline"}


def test_without_matplotlib_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.main([os.fspath(MEASURED)]) == 2
    assert capsys.readouterr().err == "libmla plot: plots and reports need matplotlib: pip install 'libmla[plot]'\n"


def test_drawing_needs_no_display_and_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    program = (
        "import sys, matplotlib; before = matplotlib.rcParams.copy(); from libmla import plot\n"
        f"assert plot.main([{os.fspath(MEASURED)!r}, '--out', {os.fspath(tmp_path)!r}, '--kind', 'share']) == 0\n"
        "assert 'matplotlib.pyplot' not in sys.modules and matplotlib.rcParams.copy() == before\n"
    )
    done = python("-c", program, DISPLAY="")
    assert done.returncode == 0, done.stderr


# What the figures show.


def test_roofline_places_cases_under_the_measured_ceilings() -> None:
    made = run_of(result(heads=16, gflops=300.0, gbps=10.0), result(heads=128, gflops=450.0, gbps=2.0))
    one = drawn(figures.roofline, made)
    assert marks(one) == [(30.0, 300.0), (225.0, 450.0)]
    written = texts(one.figure)
    assert {"16 heads", "128 heads", "bf16 peak, 500 GFLOP/s", "DRAM read, 40 GB/s", "L3 read, 160 GB/s"} <= {*written}
    roofs = [line for line in one.figure.axes[0].lines if line.get_gid() is None]
    assert {tuple(line.get_ydata())[1] for line in roofs} == {500.0}, "all roofs end in the peak"
    ridges = sorted(line.get_xdata()[1] for line in roofs)[:2]
    assert ridges == pytest.approx([500 / 160, 500 / 40])


def test_roofline_of_a_gpu_is_in_tflops_under_its_own_ceilings() -> None:
    made = run_of(gpu_result(), gpu_result(heads=128, gflops=500e3, gbps=2000.0, ceiling_kind="mma_bf16"), result())
    with drawing.style():
        on_gpu, on_cpu = figures.roofline(made)
    assert (on_gpu.name, on_cpu.name) == ("run-roofline-cuda-0", "run-roofline")
    assert marks(on_gpu) == [(pytest.approx(100e3 / 3400), 100.0), (250.0, 500.0)]
    written = texts(on_gpu.figure)
    expected = {"bf16 mma.sync peak, 600 TFLOP/s", "bf16 wgmma peak, 900 TFLOP/s", "memory read, 4,000 GB/s"}
    assert expected | {"speed (TFLOP/s)"} <= {*written}
    assert any(text.startswith("Test GPU (cuda:0)") for text in written)
    assert not any("e4m3" in text for text in written), "nothing multiplies e4m3"


def test_roofline_of_a_gpu_has_the_e4m3_peak_where_a_case_multiplies_e4m3() -> None:
    made = run_of(gpu_result(), gpu_result(heads=128, gflops=1000e3, gbps=2000.0, ceiling_kind="mma_e4m3"))
    written = {*texts(drawn(figures.roofline, made).figure)}
    assert {"bf16 mma.sync peak, 600 TFLOP/s", "e4m3 mma.sync peak, 1,200 TFLOP/s"} <= written


def test_names_of_a_gpus_peaks() -> None:
    peaks = {"mma_bf16_gflops": 600.0, "mma_e4m3_gflops": 400.0, "mma_e4m3_converted": True, "wgmma_bf16_gflops": None}
    assert names.gpu_peaks(peaks) == {
        "mma_bf16": ("bf16 mma.sync peak", 600.0),
        "mma_e4m3": ("e4m3 mma.sync peak (converted to f16)", 400.0),
    }
    assert names.gpu_peaks(peaks | {"mma_e4m3_converted": False})["mma_e4m3"] == ("e4m3 mma.sync peak", 400.0)
    assert {"mma_bf16", "mma_e4m3", "wgmma_bf16"} <= {*names.CEILINGS}


def test_roofline_says_why_a_mark_stands_above_its_line() -> None:
    remark = "Marks above their line: the machine was busy while its ceilings were measured."
    for gflops, expected in ((600.0, True), (490.0, False)):
        one = drawn(figures.roofline, run_of(result(gflops=gflops)))
        assert any(remark in text for text in texts(one.figure)) == expected


def test_roofline_leaves_out_what_has_no_place_on_it_and_says_so() -> None:
    made = run_of(result(), result(op="append", gflops=0.0), result(threads=1), result(device="emulated:sm90"))
    one = drawn(figures.roofline, made)
    assert len(one.tooltips) == 1
    assert any("2 cases without arithmetic or with other threads left out" in text for text in texts(one.figure))


def test_share_lines_run_through_the_shares_by_length() -> None:
    one = drawn(figures.share, run_of(*SWEEP))
    assert one.name == "run-share"
    assert [share for _, share in marks(one)] == [made["ceiling_share"] for made in SWEEP]
    for (x, _), made in zip(marks(one), SWEEP, strict=True):
        assert x == pytest.approx(made["kv_len"], rel=0.1)
    written = texts(one.figure)
    assert {"bf16, 16 heads", "bf16, 128 heads", "fp8_ds_mla, 16 heads", "fp8, 128 heads"} <= {*written}
    assert {"1k", "4k", "32k", "0 %", "100 %", "share of the bf16 peak"} <= {*written}


def test_share_of_sparse_attention_is_by_topk() -> None:
    made = [result(op="decode_sparse", topk=topk, kv_len=65536) for topk in (512, 2048)]
    one = drawn(figures.share, run_of(*made))
    assert one.title == "decode_sparse: share of the ceiling by topk"
    assert [x for x, _ in marks(one)] == [512, 2048]


def test_share_shows_the_spread_of_the_runs_and_busy_machines() -> None:
    slow = result(kv_len=1024, p10_us=80.0, p90_us=200.0)
    noisy = result(kv_len=4096, ceiling_share=1.3, noisy=True)
    one = drawn(figures.share, run_of(slow, noisy))
    axes = one.figure.axes[0]
    bars = [tuple(line.get_ydata()) for line in axes.lines if len(set(line.get_xdata())) == 1 and not line.get_gid()]
    assert pytest.approx((0.4, 1.0)) in bars, "80 % in 100 us: 40 % in 200 us, 100 % in 80 us"
    filled = {line.get_gid(): line.get_markerfacecolor() for line in axes.lines if line.get_gid()}
    assert [filled[gid] == drawing.PAPER for gid in one.tooltips] == [False, True]
    assert any(text.find("Hollow marks: shares above 100 %") >= 0 for text in texts(one.figure))
    assert axes.get_ylim()[1] > 1.3


def test_share_is_split_where_one_figure_would_hold_too_many_lines() -> None:
    made = [
        result(cache=cache, heads=heads, kv_len=kv_len)
        for cache in ("bf16", "f16", "fp8")
        for heads in (8, 16, 32, 64, 96, 128)
        for kv_len in (1024, 4096)
    ]
    with drawing.style():
        parts = figures.share(run_of(*made))
    assert [part.name for part in parts] == ["run-share-decode-bf16", "run-share-decode-f16", "run-share-decode-fp8"]
    assert [len(part.tooltips) for part in parts] == [12, 12, 12]


def test_backends_compares_only_what_ran_on_two() -> None:
    made = [
        result(median_us=100.0),
        result(backend="cpu_avx2", median_us=250.0),
        result(backend="reference", median_us=40000.0),
        result(kv_len=8192, median_us=210.0),
    ]
    one = drawn(comparisons.backends, run_of(*made))
    assert [x for x, _ in marks(one)] == [100.0, 250.0, 40000.0]
    written = texts(one.figure)
    assert "cpu_avx512_bf16: 2.5× as fast as cpu_avx2" in written
    assert {"cpu_avx512_bf16", "cpu_avx2", "reference", "100 µs", "1 ms", "10 ms"} <= {*written}


def test_backends_that_take_the_same_time_are_as_fast_as_each_other() -> None:
    for median_us, expected in ((104.0, "cpu_avx2: as fast as"), (106.0, "cpu_avx2: 1.1× as fast as")):
        one = drawn(comparisons.backends, run_of(result(backend="cpu_avx2"), result(median_us=median_us)))
        assert f"{expected} cpu_avx512_bf16" in texts(one.figure)


def test_figures_of_a_busy_machine_say_so() -> None:
    text = "This machine was busy: other processes took 20 % and other virtual machines 3 % of its processors' time."
    made = [result(), result(kv_len=1024), result(backend="cpu_avx2")]
    for load, expected in (BUSY_LOAD, True), (BUSY_LOAD | {"busy": False}, False), (None, False):
        run = run_of(*made, load=load)
        for draw in (figures.roofline, figures.share, comparisons.backends):
            assert any(text in " ".join(one.split()) for one in texts(drawn(draw, run).figure)) == expected, draw
        assert (
            any(f"run: {text}" in one for one in texts(drawn(comparisons.runs, run_of(*made), run).figure)) == expected
        )
    assert not any(text in one for one in texts(drawn(figures.roofline, run_of(gpu_result(), load=BUSY_LOAD)).figure))


def test_backends_on_two_devices_are_told_apart() -> None:
    one = drawn(comparisons.backends, run_of(result(median_us=400.0), gpu_result(median_us=10.0)))
    written = texts(one.figure)
    assert "cuda_portable on cuda:0: 40.0× as fast as cpu_avx512_bf16" in written


def test_runs_show_the_speed_up_and_whether_it_is_certain() -> None:
    before = [result(kv_len=kv_len, median_us=100.0) for kv_len in (1024, 2048, 4096, 8192)]
    after = [
        result(kv_len=1024, median_us=50.0),
        result(kv_len=2048, median_us=200.0),
        result(kv_len=4096, median_us=97.0, p90_us=300.0),
        result(kv_len=16384, median_us=1.0),
    ]
    one = drawn(comparisons.runs, run_of(*before, name="before"), run_of(*after, name="after"))
    assert one.name == "before-vs-after"
    assert [x for x, _ in marks(one)] == pytest.approx([2.0, 0.5, 100 / 97])
    lines = {line.get_gid(): line for line in one.figure.axes[0].lines}
    colors = [lines[gid].get_color() for gid in one.tooltips]
    assert colors == [drawing.BETTER, drawing.WORSE, drawing.MUTED]
    written = texts(one.figure)
    assert {"2.00× 100 µs → 50.0 µs", "0.50× 100 µs → 200 µs", "before", "after"} <= {*written}
    assert any("2 results have no partner and are left out." in text for text in written)
    assert "3 common cases" in one.summary and "1 faster and 1 slower" in one.summary


def test_runs_on_other_backends_are_compared_with_a_remark() -> None:
    one = drawn(comparisons.runs, run_of(result(), name="a"), run_of(result(backend="cpu_avx2"), name="b"))
    assert any("Backends: cpu_avx2 against cpu_avx512_bf16." in text for text in texts(one.figure))


def test_a_case_that_was_measured_twice_is_compared_twice() -> None:
    twice = [result(median_us=100.0), result(median_us=110.0)]
    one = drawn(comparisons.runs, run_of(*twice, name="a"), run_of(*twice, name="b"))
    assert [x for x, _ in marks(one)] == [1.0, 1.0]


# How they read.


def peer_readings() -> peers.PeerReadings:
    cases = [{"case": f"batch {2**i}", "peer_us": 2.0**i, "libmla_us": 20.0 / (i + 1)} for i in range(6)]
    groups = [{"label": f"decode bf16, {16 * i} heads", "peer": "A peer", "cases": cases} for i in range(1, 8)]
    words = {"device": "Test GPU", "date": "2026-01-31", "libmla": "0123abc", "method": "Medians of turns."}
    return peers.parse_peers(words | {"peers": {"A peer": "1.0"}, "groups": groups}, "some", "some.json")


EVERY_KIND = [
    pytest.param(figures.roofline, (run_of(*SWEEP),), id="roofline"),
    pytest.param(figures.share, (run_of(*SWEEP),), id="share"),
    pytest.param(comparisons.backends, (run_of(*SWEEP, *(one | {"backend": "b"} for one in SWEEP)),), id="backends"),
    pytest.param(comparisons.runs, (run_of(*SWEEP, name="a"), run_of(*SWEEP, name="b")), id="runs"),
    pytest.param(peers.peers, (peer_readings(),), id="peers"),
]


@pytest.mark.parametrize(("function", "arguments"), EVERY_KIND)
def test_texts_do_not_cover_each_other_and_ticks_are_plain(function: Any, arguments: Any) -> None:
    one = drawn(function, *arguments)
    with drawing.style():
        canvas = FigureCanvasAgg(one.figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        found = [
            artist
            for artist in one.figure.findobj(matplotlib.text.Text)
            if artist.get_text().strip() and artist.get_visible() and not artist.get_rotation() % 90
        ]
        boxes = [(artist.get_text(), artist.get_window_extent(renderer)) for artist in found]
    for (text, box), (other, its_box) in itertools.combinations(boxes, 2):
        across = min(box.x1, its_box.x1) - max(box.x0, its_box.x0)
        down = min(box.y1, its_box.y1) - max(box.y0, its_box.y0)
        assert not (across > 1 and down > 3), f"'{text}' and '{other}' overlap"
    for i, axes in enumerate(one.figure.axes):
        for axis in (axes.xaxis, axes.yaxis)[: 2 - i]:  # the second pair of axes shares the first one's rows
            ticks = [tick.get_text() for tick in axis.get_ticklabels()]
            assert len(ticks) >= 2
            assert not any("$" in tick or "e+" in tick or "10^" in tick for tick in ticks), ticks
        assert axes.get_xlabel()


def test_close_labels_are_spread_and_keep_their_order() -> None:
    chance = random.Random(5)
    for _ in range(200):
        wanted = [chance.uniform(0, 100) for _ in range(chance.randint(1, 9))]
        placed = drawing.spread(wanted, gap=10, low=0, high=100)
        assert all(-1e-9 <= y <= 100 + 1e-9 for y in placed)
        order = sorted(range(len(wanted)), key=lambda i: wanted[i])
        for i, j in itertools.pairwise(order):
            assert placed[j] - placed[i] >= 10 - 1e-9
    assert drawing.spread([20, 50, 80], gap=10, low=0, high=100) == [20, 50, 80], "moved without need"


def _seen(color: str, kind: str) -> tuple[float, float, float]:
    """Returns CIE Lab of a colour as people with a colour blindness see it (Machado and others 2009, severity 1)."""
    import numpy as np

    sight = {
        "normal": np.eye(3),
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    }
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(sight[kind]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = (np.array(to_xyz) @ linear) / [0.9505, 1.0, 1.089]
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("kind", ["normal", "protan", "deutan", "tritan"])
def test_series_are_told_apart_without_full_colour_sight(kind: str) -> None:
    looks = [drawing.look(i) for i in range(14)]
    for one, other in itertools.combinations(looks, 2):
        assert (one["color"], one["marker"]) != (other["color"], other["marker"])
    # The first six by colour alone, the rest also by their marks.
    for one, other in itertools.combinations(drawing.SERIES[:6], 2):
        first, second = _seen(one, kind), _seen(other, kind)
        distance = sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5
        assert distance > 12, f"{one} and {other}"


@pytest.mark.parametrize(
    ("us", "text"),
    [(0.8, "0.80 µs"), (9.99, "9.99 µs"), (99.96, "100 µs"), (372.4, "372 µs"), (999.7, "1.00 ms"), (2.5e6, "2.50 s")],
)
def test_times_have_three_digits_and_a_unit(us: float, text: str) -> None:
    assert names.time_text(us) == text


@pytest.mark.parametrize(("count", "text"), [(1000, "1000"), (1024, "1k"), (131072, "128k"), (1536, "1536")])
def test_lengths_are_in_k_of_1024(count: int, text: str) -> None:
    assert names.count_text(count) == text


def test_labels_name_what_differs_and_nothing_that_follows_from_it() -> None:
    made = run_of(
        result(cache="bf16"),
        result(cache="bf16", batch=8),
        result(cache="fp8_dsv4", d_qk=512),
        result(cache="fp8_dsv4", d_qk=512, batch=8),
    ).results
    keys = names.varying_keys(made)
    assert keys == ["cache", "batch"], "d_qk follows from the cache"
    assert names.label(made[3], keys) == "fp8_dsv4, batch 8"


def test_labels_leave_out_what_most_cases_have() -> None:
    made = run_of(*(result(heads=heads) for heads in (8, 16, 32)), result(heads=8, page_size=1)).results
    keys = names.varying_keys(made)
    usual = names.usual_values(made, keys)
    assert usual == {"page_size": 64}
    assert [names.label(one, keys, usual) for one in made] == [
        "8 heads",
        "16 heads",
        "32 heads",
        "8 heads, page size 1",
    ]
    assert names.remark(usual) == "Unless a label says otherwise: page size 64."
