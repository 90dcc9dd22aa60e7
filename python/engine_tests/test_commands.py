# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/engines.md are commands of the engine that is installed here."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
PROGRAMS = {"vllm": "vllm serve", "sglang": "sglang serve"}


def engine() -> str:
    installed = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    return next(name for name in PROGRAMS if name in installed)


def commands() -> list[list[str]]:
    """Arguments of every command of the page for this engine, lines that end in a backslash joined."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    _, found, rest = zip(*(line.partition(PROGRAMS[engine()]) for line in lines), strict=True)
    return [shlex.split(text, comments=True) for mark, text in zip(found, rest, strict=True) if mark]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    if engine() == "vllm":
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        where = "common" if importlib.util.find_spec("vllm.entrypoints.common.cli_args") else "launchers"
        module = importlib.import_module(f"vllm.entrypoints.{where}.cli_args")
        return module.make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
    from sglang.srt.server_args import ServerArgs

    from libmla.integrations.sglang import register

    register()
    made = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(made)
    return made


def test_there_are_commands():
    assert len(commands()) >= 5


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_parses(parser, command):
    """Unknown options and values that are no choice end the program."""
    parser.parse_args(command)


def test_what_is_no_option_does_not(parser):
    with pytest.raises(SystemExit):
        parser.parse_args([*commands()[0], "--no-such-option"])
