# SPDX-License-Identifier: Apache-2.0
"""Tests `libmla report`: the page is whole by itself, says what was measured, and works in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.image
import pytest

from bench_results import BAD_FILES, BUSY_LOAD, MEASURED, bad_files, document, gpu_result, result, unwritable, write
from libmla import report
from libmla._bench import results


class Page(HTMLParser):
    """Collects what a page refers to, its ids, and the cells of its tables of results."""

    VOID = ("meta", "link", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.references += [given[name] for name in ("href", "src", "xlink:href", "srcset", "data") if name in given]
        self.references += re.findall(r"url\(([^)]*)\)", " ".join(given.values()))
        self.ids += [given["id"]] if "id" in given else []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.cell = True
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "tags are not nested"
        if tag in ("td", "th"):
            self.cell = False

    def handle_data(self, data: str) -> None:
        if self.cell:
            self.rows[-1][-1] += data


def page_of(*made: dict[str, Any], **changes: Any) -> str:
    return report.page([results.parse(document(*made, **changes), "run", "run.json")])


SWEEP = [
    result(cache=cache, heads=heads, kv_len=kv_len, median_us=us * heads, ceiling_share=share)
    for cache, share in (("bf16", 0.8), ("fp8_ds_mla", 0.65))
    for heads in (16, 128)
    for kv_len, us in ((1024, 10.0), (4096, 30.0))
]


def test_page_is_whole_by_itself() -> None:
    text = report.page(results.load_all([MEASURED, MEASURED]))
    page = Page(text)
    assert page.open == []
    outside = [one for one in page.references if not one.startswith("#") and one != "data:,"]
    assert outside == []
    assert not re.search(r"@import|fetch\(|XMLHttpRequest|<script src|//(?!www\.w3\.org)[a-z0-9]+\.[a-z]", text)
    assert len(page.ids) == len(set(page.ids))
    targets = {one[1:] for one in page.references if one.startswith("#")}
    assert targets <= set(page.ids)
    for figure in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(figure.replace("xlink:href", "href"))


def test_every_case_is_a_row_and_only_what_differs_a_column() -> None:
    head, *rows = Page(page_of(*SWEEP)).rows
    assert head == ["cache", "heads", "kv_len", "median", "p10", "p90", "GFLOP/s", "GB/s", "share", "of"]
    assert len(rows) == len(SWEEP)
    assert rows[0] == ["bf16", "16", "1024", "160 µs", "157 µs", "166 µs", "400", "10", "80.0 %", "bf16 peak"]


def test_what_only_some_results_have_gets_a_column() -> None:
    made = [
        gpu_result(heads=16, label="memory", target="share >= 0.85", met=True, ratio=1.5, error=1e-3),
        gpu_result(heads=128, label="compute", target="share >= 0.90", met=False),
    ]
    head, first, second = Page(page_of(*made)).rows
    cells = dict(zip(head, first, strict=True))
    assert cells["plan"] == "3.20 µs" and cells["ratio"] == "1.50" and cells["error"] == "1.0e-03"
    assert (cells["label"], cells["target"], cells["met"]) == ("memory", "share >= 0.85", "yes")
    assert dict(zip(head, second, strict=True))["ratio"] == "-"
    text = page_of(*made)
    assert "<b>1 of 2</b><span>targets met</span>" in text
    assert "<dt>bf16 mma.sync peak</dt><dd>600 TFLOP/s</dd>" in text and "Test GPU" in text


def test_machine_ceilings_and_settings_are_named() -> None:
    text = page_of(*SWEEP)
    for fact in ("Test CPU", "500 GFLOP/s (AVX-512 vdpbf16ps)", "40 GB/s", "at least 0.3 s of runs, seed 1", "warm"):
        assert f"<dd>{fact}</dd>" in text


@pytest.mark.parametrize(
    ("made", "changes", "notice"),
    [
        ([result(p90_us=900.0)], {}, "Other work ran on the machine during 1 of 1 cases"),
        ([result(noisy=True, ceiling_share=1.3), result(heads=8)], {}, "during 1 of 2 cases"),
        ([result()], {"interrupted": True}, "The bench was interrupted"),
        ([result()], {"load": BUSY_LOAD}, "Times on the CPU are too long."),
        ([result(error=1.0, error_text="o: too far off")], {}, "1 of 1 cases gave wrong results: o: too far off"),
        ([result(device="emulated:sm90", ceiling_share=None)], {}, "1 of 1 cases ran in the emulator"),
    ],
)
def test_what_a_reader_must_know_stands_above(made: list[dict[str, Any]], changes: dict[str, Any], notice: str) -> None:
    text = page_of(*made, **changes)
    assert notice in text and text.index(notice) < text.index("<table")
    assert 'class="notice"' not in page_of(result(), load=BUSY_LOAD | {"busy": False})


def test_texts_of_the_file_cannot_become_markup() -> None:
    evil = "<script>alert(1)</script>\"'&"
    text = page_of(result(label=evil, backend=evil, heads=8), result(label=evil, cache=evil), machine={"cpu": evil})
    assert "<script>alert" not in text
    assert Page(text).open == []


def test_several_runs_are_compared_with_the_first(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "before.json", result()),
        write(tmp_path / "after.json", result(median_us=50.0)),
    ]
    text = report.page(results.load_all(files))
    assert "<h2>Compared with before</h2>" in text
    assert "1 common case, median speed 2.00×; 1 faster and 0 slower" in text
    assert len(Page(text).rows) == 4


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_get_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, message = bad_files(tmp_path)[name]
    assert report.main([path, "--out", os.fspath(tmp_path / "out.html")]) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith(f"libmla report: {path}: ") and message in streams.err
    assert streams.err.count("\n") == 1 and not streams.out
    assert not (tmp_path / "out.html").exists()


def test_unwritable_page_gets_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = unwritable(tmp_path)
    assert report.main([os.fspath(MEASURED), "--out", os.fspath(out)]) == 2
    assert capsys.readouterr().err == f"libmla report: cannot write '{out}': Not a directory\n"


def test_the_page_is_named_like_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert report.main([os.fspath(MEASURED)]) == 0
    assert capsys.readouterr().out == "bench_cpu.html\n"
    assert Page((tmp_path / "bench_cpu.html").read_text(encoding="utf-8")).open == []


# In a browser.


Browser = Callable[..., str]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium: scripts/setup.sh test")
    profile = tmp_path_factory.mktemp("chromium")

    def run(page: Path, *options: str) -> str:
        """Loads the page and returns standard output; fails if the console got a message."""
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--timeout=20000", *options, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert console == []
        return done.stdout

    return run


def with_script(page: str, script: str, path: Path) -> Path:
    """Writes the page with a script at its end that writes what it returns into the page."""
    call = f"document.body.dataset.found = JSON.stringify((() => {{ {script} }})());"
    path.write_text(page.replace("</body>", f"<script>{call}</script></body>"), encoding="utf-8")
    return path


def found(dom: str) -> Any:
    parser = re.search(r'data-found="([^"]*)"', dom)
    assert parser, "the script did not run"
    return json.loads(parser.group(1).replace("&quot;", '"').replace("&amp;", "&"))


def test_a_console_message_would_be_noticed(chromium: Browser, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text("<script>missing()</script>", encoding="utf-8")
    with pytest.raises(AssertionError):
        chromium(page, "--dump-dom")


def test_browser_renders_the_page_in_light_and_dark(chromium: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(report.page(results.load_all([MEASURED])), encoding="utf-8")
    corners = []
    for scheme in (1, 0):  # light, dark
        shot = tmp_path / f"{scheme}.png"
        options = (f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={shot}", "--window-size=1280,2400")
        chromium(page, *options)
        pixels = matplotlib.image.imread(shot)[:, :, :3]
        assert pixels.shape == (2400, 1280, 3)
        corners.append(tuple((pixels[5, 5] * 255).round().astype(int)))
        # Text, figures and table all differ from the paper, from the top to the last row.
        inked = (abs(pixels - pixels[5, 5]) > 0.2).any(axis=2)
        assert all(band.mean() > 0.002 for band in inked[:1600].reshape(8, 200, 1280))
    assert corners == [(0xFF, 0xFF, 0xFF), (0x14, 0x18, 0x1D)]


def test_headers_sort_and_the_box_filters(chromium: Browser, tmp_path: Path) -> None:
    script = """
      const column = (title) => {
        const heads = [...document.querySelectorAll("th")];
        const i = heads.findIndex((head) => head.textContent === title);
        const sort = () => {
          heads[i].querySelector("button").click();
          const rows = [...document.querySelectorAll("tbody tr")];
          return [heads[i].getAttribute("aria-sort"), rows.map((row) => row.cells[i].textContent)];
        };
        return [sort(), sort()];
      };
      const box = document.querySelector("input");
      box.value = "fp8_ds  128";
      box.dispatchEvent(new Event("input"));
      const shown = [...document.querySelectorAll("tbody tr")].filter((row) => !row.hidden);
      return {heads: column("heads"), median: column("median"), cache: column("cache"),
              shown: shown.length, count: document.querySelector(".tools span").textContent};
    """
    page = with_script(page_of(*SWEEP), script, tmp_path / "page.html")
    answer = found(chromium(page, "--dump-dom"))
    up, down = answer["heads"]
    assert up == ["ascending", ["16"] * 4 + ["128"] * 4] and down == ["descending", up[1][::-1]]
    times = ["160 µs", "160 µs", "480 µs", "480 µs", "1.28 ms", "1.28 ms", "3.84 ms", "3.84 ms"]
    assert [order for _, order in answer["median"]] == [times, times[::-1]], "by time, not by text"
    assert answer["cache"][0][1] == ["bf16"] * 4 + ["fp8_ds_mla"] * 4
    assert (answer["shown"], answer["count"]) == (2, "2 of 8 cases")


def test_a_narrow_window_scrolls_tables_rather_than_the_page(chromium: Browser, tmp_path: Path) -> None:
    script = """
      const table = document.querySelector("table").parentElement;
      return {page: [document.documentElement.scrollWidth, window.innerWidth],
              table: [table.scrollWidth, table.clientWidth]};
    """
    page = with_script(report.page(results.load_all([MEASURED])), script, tmp_path / "page.html")
    widths = found(chromium(page, "--dump-dom", "--window-size=600,900"))
    assert widths["page"][0] <= widths["page"][1]
    assert widths["table"][0] > widths["table"][1]
