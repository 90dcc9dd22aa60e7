# SPDX-License-Identifier: Apache-2.0
"""Runs processes of tests that need no torch: importing it takes most of a second, and tvm_ffi does where it can."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def python(*arguments: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs this Python, where torch cannot be imported, and captures what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        changed = without_torch(Path(folder), **environment)
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=changed, capture_output=True, text=True, check=False, input=stdin)


def without_torch(folder: Path, **environment: str) -> dict[str, str]:
    """Returns the environment of such a process; `folder` must be empty and stay until it ends."""
    (folder / "torch.py").write_text("raise ImportError('hidden by a test')\n", encoding="utf-8")
    paths = [os.fspath(folder), os.environ.get("PYTHONPATH", "")]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)), **environment)
