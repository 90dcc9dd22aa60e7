# SPDX-License-Identifier: Apache-2.0
"""Parses the arguments of the package's commands, with errors as the C++ tool has them: one line, and a guess at what a
misspelt option was to be."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

_UNUSABLE_INPUT = 2


class Parser(argparse.ArgumentParser):
    """Parses one command's arguments; options are written in full."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named, allow_abbrev=False)

    def parse_args(  # type: ignore[override]  # nobody here passes a namespace
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        given = list(sys.argv[1:] if args is None else args)
        # Before argparse complains of what is missing, which may be what was misspelt. As for argparse, `--` ends the
        # options, and what has a space is none.
        for one in given[: given.index("--")] if "--" in given else given:
            name = one.partition("=")[0]
            if name.startswith("--") and " " not in one and name not in self._option_string_actions:
                near = difflib.get_close_matches(name, self._option_string_actions, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"{self.prog} --help lists those that there are"
                self.error(f"unknown option '{one}'; {hint}")
        return super().parse_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(_UNUSABLE_INPUT, f"{self.prog}: {message}\n")
