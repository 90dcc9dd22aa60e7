# SPDX-License-Identifier: Apache-2.0
"""Runs the command line `libmla`, also `mla` and `python -m libmla`: the C++ tool, and what Python adds to it.

The package's own commands run here. Every other command is the tool's: it takes over the process, so that its output,
exit status and signals are its own.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_UNUSABLE_INPUT = 2
_INTERRUPTED = 130

#: Holds the package's own commands: what `--help` says of each, and the module whose `main` it is.
_OWN_COMMANDS = {
    "plot": ("Draw results of bench as PNG and SVG", ".plot"),
    "report": ("Write results of bench as one HTML page", ".report"),
    "generate": ("Let a language model write, its attention on libmla", "._text.generate"),
    "eval": ("Measure what each cache format costs a language model", "._text.evaluate"),
}


class NoTool(RuntimeError):
    """The C++ tool is not where it should be."""


def tool() -> Path:
    """Returns the path of the tool `mla`: what the environment's LIBMLA_TOOL names, else what the wheel brought. Raises
    NoTool."""
    named = os.environ.get("LIBMLA_TOOL")
    path = Path(named) if named else Path(__file__).parent / "bin" / "mla"
    if not path.is_file() or not os.access(path, os.X_OK):
        whose = "LIBMLA_TOOL names" if named else "this installation should have"
        raise NoTool(f"the tool that {whose}, '{path}', is not a program that can be run")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; commands of the tool do not return."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] == "help":  # `help` is `--help`, `help COMMAND` is `COMMAND --help`
        given = [*given[1:2], "--help"]
    if given and given[0] in _OWN_COMMANDS:
        module = importlib.import_module(_OWN_COMMANDS[given[0]][1], __package__)
        try:
            return int(module.main(given[1:]))
        except KeyboardInterrupt:
            return _INTERRUPTED
    try:
        program = str(tool())
    except NoTool as error:
        print(f"libmla: {error}", file=sys.stderr)
        return _UNUSABLE_INPUT
    if not given or given[0] in ("-h", "--help"):
        status = subprocess.run([program, *given], check=False).returncode
        lines = (f"  {name:<30}  {summary}" for name, (summary, _) in _OWN_COMMANDS.items())
        print("\nAlso, of the Python package:", *lines, sep="\n", file=sys.stdout if given else sys.stderr)
        return status
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program, ["libmla", *given])


if __name__ == "__main__":
    sys.exit(main())
