# SPDX-License-Identifier: Apache-2.0
"""Tests the command line of the package: the C++ tool passed through, and the commands of its own."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench_results import MEASURED
from libmla import cli
from processes import python, without_torch


def run(*arguments: str, tool: Path | None = None, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `python -m libmla`, with the tests' tool or another one."""
    return python("-m", "libmla", *arguments, stdin=stdin, LIBMLA_TOOL=os.fspath(tool or cli.tool()))


def script(path: Path, lines: str) -> Path:
    """Writes a program that stands in for the tool."""
    path.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_tool_runs_as_it_would_by_itself() -> None:
    # Not decode, whose reasons have rates that each process measures for itself.
    arguments = ("explain", "--op", "append", "--backend", "cpu_portable", "--json")
    direct = subprocess.run([cli.tool(), *arguments], capture_output=True, text=True, check=True)
    through = run(*arguments)
    assert (through.returncode, through.stdout, through.stderr) == (0, direct.stdout, direct.stderr)
    assert json.loads(through.stdout)["selected"] == "cpu_portable"


def test_messages_and_exit_status_of_the_tool_come_through() -> None:
    done = run("bench", "--heads", "many")
    assert done.returncode == 2
    assert done.stderr.startswith("libmla: --heads: ") and done.stdout == ""


def test_arguments_and_streams_pass_unchanged(tmp_path: Path) -> None:
    tool = script(tmp_path / "tool", 'printf "[%s]" "$@"; cat; echo "to stderr" >&2; exit 37')
    given = ["bench", "--label", "two words", "", "*", "--json", "-", "--kind=a\nb"]
    done = run(*given, tool=tool, stdin="from stdin")
    assert done.stdout == "".join(f"[{one}]" for one in given) + "from stdin"
    assert (done.returncode, done.stderr) == (37, "to stderr\n")


def test_a_signal_that_ends_the_tool_ends_the_command(tmp_path: Path) -> None:
    done = run("replay", tool=script(tmp_path / "tool", "kill -TERM $$"))
    assert done.returncode == -signal.SIGTERM


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Lets children be interrupted, although what a script starts in the background ignores interrupts."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interruptible")
def test_interrupting_the_command_reaches_the_tool(tmp_path: Path) -> None:
    tool = script(tmp_path / "tool", 'trap "exit 130" INT; echo ready; while :; do sleep 0.05; done')
    (tmp_path / "path").mkdir()
    environment = without_torch(tmp_path / "path", LIBMLA_TOOL=os.fspath(tool))
    command = [sys.executable, "-m", "libmla", "bench"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 130
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "status", "stream"), [(["--help"], 0, "out"), (["help"], 0, "out"), ([], 2, "err")]
)
def test_help_names_the_commands_of_both(
    arguments: list[str], status: int, stream: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == status
    text = getattr(capfd.readouterr(), stream)
    for command in ("info", "bench", "plot", "report"):
        assert f"\n  {command} " in text
    assert "Usage: libmla " in text


def test_help_of_a_command_comes_from_the_package_or_the_tool(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="^0$"):
        cli.main(["help", "plot"])
    assert capfd.readouterr().out.startswith("usage: libmla plot ")
    assert run("help", "info").stdout == run("info", "--help").stdout


@pytest.mark.parametrize("command", cli._OWN_COMMANDS)
def test_the_tool_knows_the_packages_commands(command: str) -> None:
    misspelt = run(command[:-1])
    assert misspelt.returncode == 2 and f"did you mean '{command}'?" in misspelt.stderr
    alone = subprocess.run([cli.tool(), command], capture_output=True, text=True, check=False)
    assert alone.returncode == 2 and f"'{command}' is a command of the Python package" in alone.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["generate", "--modle", "x"], "libmla generate: unknown option '--modle'; did you mean '--model'?\n"),
        (["eval", "--model", "x", "--byte=9"], "libmla eval: unknown option '--byte=9'; did you mean '--bytes'?\n"),
        (
            ["generate", "--model", "x", "--num-threads", "no"],
            "libmla generate: argument --num-threads/--threads: expected a whole number, 0 or more, got 'no'\n",
        ),
        (["plot", "--zz"], "libmla plot: unknown option '--zz'; libmla plot --help lists those that there are\n"),
        (["report"], "libmla report: the following arguments are required: RESULTS.json\n"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="^2$"):
        cli.main(arguments)
    assert capsys.readouterr() == ("", error)


def test_plot_is_a_command(tmp_path: Path) -> None:
    done = run("plot", os.fspath(MEASURED), "--kind", "share", "--format", "png", "--out", os.fspath(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'bench_cpu-share.png'}\n"), done.stderr


def test_report_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert cli.main(["report", os.fspath(MEASURED), "--out", os.fspath(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("what", ["missing", "folder", "no program"])
def test_a_tool_that_cannot_run_gets_one_sentence(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = {"missing": tmp_path / "missing", "folder": tmp_path, "no program": tmp_path / "text"}[what]
    (tmp_path / "text").write_text("not executable", encoding="utf-8")
    monkeypatch.setenv("LIBMLA_TOOL", os.fspath(path))
    assert cli.main(["info"]) == 2
    error = capsys.readouterr().err
    assert error == f"libmla: the tool that LIBMLA_TOOL names, '{path}', is not a program that can be run\n"


def test_without_the_variable_the_tool_is_the_one_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LIBMLA_TOOL", raising=False)
    monkeypatch.setattr(cli, "__file__", os.fspath(tmp_path / "cli.py"))
    expected = tmp_path / "bin" / "mla"
    assert cli.main(["info"]) == 2
    assert f"the tool that this installation should have, '{expected}', is not" in capsys.readouterr().err
    expected.parent.mkdir()
    script(expected, "exit 0")
    assert cli.tool() == expected
