# SPDX-License-Identifier: Apache-2.0
"""Tests that a process forked from the one that has torch is like a new one, and that its failures are seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes import python_path, python_with_torch

SEEN = """
import os, sys
print(__name__, vars(sys.modules["__main__"]) is globals(), sys.argv, sys.path, os.getcwd())
print(*sorted(os.environ), os.environ["OF_A_TEST"], os.environ["PYTHONPATH"])
print(*[name for name in sys.modules if name.partition(".")[0] in ("libmla", "conftest", "pytest", "tvm_ffi")])
print("to stderr", file=sys.stderr)
"""


@pytest.mark.parametrize("option", ["-c", "-m"])
def test_it_sees_what_a_new_python_sees(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seen.py").write_text(SEEN, encoding="utf-8")
    arguments = [option, SEEN if option == "-c" else "seen", "--rows", "3"]
    monkeypatch.setenv("OF_A_TEST", "of a test")
    changed = {"PYTHONPATH": python_path(tmp_path / "more")}
    forked = python_with_torch(*arguments, cwd=tmp_path, **changed)
    command = [sys.executable, *arguments]
    environment = {**os.environ, **changed}
    new = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (forked.returncode, forked.stdout, forked.stderr) == (new.returncode, new.stdout, new.stderr)
    assert forked.returncode == 0 and "of a test" in forked.stdout and forked.stderr == "to stderr\n"


ENDS = {
    "an error": ("def f(): raise ValueError('a word')\nf()", 1),
    "a status": ("import sys; sys.exit(37)", 37),
    "a message": ("import sys; sys.exit('a word')", 1),
    "an error in the syntax": ("a word", 1),
    "an assertion": ("assert False, 'a word'", 1),
    "a function at the end": ("import atexit; atexit.register(print, 'a word')", 0),
    "a thread at the end": ("import threading, time; threading.Timer(0.1, lambda: print('a word')).start()", 0),
}


@pytest.mark.parametrize("name", ENDS)
def test_it_ends_as_a_new_python_does(name: str) -> None:
    program, status = ENDS[name]
    forked = python_with_torch("-c", program)
    new = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    # Since Python 3.13, what precedes the last line of an error quotes the program, which a fork cannot.
    assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]
    assert forked.returncode == status and ("a word" in forked.stdout + forked.stderr) == (name != "a status")


def test_a_crash_says_where_it_was() -> None:
    program = "import os, sys; print('before', file=sys.stderr)\ndef f(): os.kill(os.getpid(), 11)\nf()"
    done = python_with_torch("-c", program)
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.startswith("before\n") and 'File "<string>", line 2 in f' in done.stderr


def test_one_that_does_not_end_is_stopped_and_says_where_it_was() -> None:
    program = "import sys, time; print('before', file=sys.stderr)\ntime.sleep(60)"
    with pytest.raises(TimeoutError, match=r"(?s)had not ended after 2 s\nbefore\n.*File \"<string>\", line 2 in"):
        python_with_torch("-c", program, timeout=2)
