# SPDX-License-Identifier: Apache-2.0
"""Reads text to train on and text to measure with, told apart by one rule: a file is held out by its path alone."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Split = Literal["train", "held-out"]

#: One file of so many is held out.
HELD_OUT_ONE_IN = 20

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


class NoText(ValueError):
    """A file or folder has no text to read."""


def standard_library() -> Path:
    """Returns the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _rank(relative: str) -> int:
    return int.from_bytes(hashlib.sha256(relative.encode()).digest()[:8], "big")


def is_held_out(relative: str) -> bool:
    """Returns whether the file of this path, relative to its folder and with `/` between parts, is held out."""
    return _rank(relative) % HELD_OUT_ONE_IN == 0


def documents(root: Path, split: Split, pattern: str = "*.py") -> Iterator[tuple[str, str]]:
    """Yields paths and texts of a folder's UTF-8 files, in an order that the paths alone decide (their hashes').

    Installed packages are left out. A single file is held-out text, whatever its name. Raises NoText.
    """
    if root.is_file():
        found = [(root.name, root)] if split == "held-out" else []
    elif root.is_dir():
        files = (one for one in root.rglob(pattern) if one.is_file())
        named = ((one.relative_to(root).as_posix(), one) for one in files)
        found = [(name, one) for name, one in named if is_held_out(name) == (split == "held-out")]
        found = [(name, one) for name, one in found if not _NOT_THE_LIBRARY & set(name.split("/"))]
    else:
        raise NoText(f"text: expected a file or a folder, got '{root}', which is neither")
    empty = True
    for name, path in sorted(found, key=lambda one: (_rank(one[0]), one[0])):
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            empty = False
            yield name, text
    if empty:
        raise NoText(f"text: expected UTF-8 files '{pattern}' ({split}) in '{root}', got none")
