# SPDX-License-Identifier: Apache-2.0
"""The command line `libmla`, also `python -m libmla`: the C++ tool `mla`, and what Python adds to it.

`plot` and `report` run here. Every other command is the tool's: it takes over the process, so that its output, exit
status and signals are its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_UNUSABLE_INPUT = 2
_OWN_COMMANDS = """
Also, of the Python package:
  plot                            Draw results of bench as PNG and SVG
  report                          Write results of bench as one HTML page
"""


class NoTool(RuntimeError):
    """The C++ tool is not where it should be."""


def tool() -> Path:
    """The tool `mla`: what the environment's LIBMLA_TOOL names, else what the wheel brought. Raises NoTool."""
    named = os.environ.get("LIBMLA_TOOL")
    path = Path(named) if named else Path(__file__).parent / "bin" / "mla"
    if not path.is_file() or not os.access(path, os.X_OK):
        whose = "LIBMLA_TOOL names" if named else "this installation should have"
        raise NoTool(f"the tool that {whose}, '{path}', is not a program that can be run")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; commands of the tool do not return."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["plot"]:
        from .plot import main as plot

        return plot(given[1:])
    if given[:1] == ["report"]:
        from .report import main as report

        return report(given[1:])
    try:
        program = str(tool())
    except NoTool as error:
        print(f"libmla: {error}", file=sys.stderr)
        return _UNUSABLE_INPUT
    if not given or given[0] in ("-h", "--help"):
        status = subprocess.run([program, *given], check=False).returncode
        print(_OWN_COMMANDS, end="", file=sys.stdout if given else sys.stderr)
        return status
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program, [program, *given])


if __name__ == "__main__":
    sys.exit(main())
