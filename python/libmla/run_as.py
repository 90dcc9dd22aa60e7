# SPDX-License-Identifier: Apache-2.0
"""Runs a program that cannot be edited with libmla's drop-ins in the peers' places.

From a shell::

    python -m libmla.run_as flash_mla,flashinfer program.py --its --arguments
    python -m libmla.run_as flash_mla -m package.module --its --arguments
    python -m libmla.run_as --fallback flashinfer program.py    # names that libmla lacks come from the installed peer
"""

import runpy
import sys
from pathlib import Path

from libmla.install import install_as


def main(arguments: list[str]) -> None:
    """Runs a program with drop-ins installed: [--fallback] NAMES (PROGRAM | -m MODULE) [ARGUMENTS]."""
    fallback = arguments[:1] == ["--fallback"]
    arguments = arguments[fallback:]
    if len(arguments) < 2 or (arguments[1] == "-m" and len(arguments) < 3):
        sys.exit("usage: python -m libmla.run_as [--fallback] NAME[,NAME] (PROGRAM | -m MODULE) [ARGUMENTS]")
    for name in arguments[0].split(","):
        install_as(name, fallback=fallback)
    if arguments[1] == "-m":
        sys.argv = arguments[2:]
        runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments[1:]
        sys.path[0] = str(Path(arguments[1]).resolve().parent)
        runpy.run_path(arguments[1], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
