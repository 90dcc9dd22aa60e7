# SPDX-License-Identifier: Apache-2.0
"""Runs processes of tests without the seconds that importing torch takes.

Those that need no torch cannot import it. Those that need it are forked from one process that has imported it: the fork
server of multiprocessing, which starts with the first of them and ends with the test run. The server computes nothing,
on a GPU neither: threads that a computation starts are missing in a fork, which would wait for them for ever.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["torch"])


def python(*arguments: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs this Python, where torch cannot be imported, and captures what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        changed = without_torch(Path(folder), **environment)
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=changed, capture_output=True, text=True, check=False, input=stdin)


def without_torch(folder: Path, **environment: str) -> dict[str, str]:
    """Returns the environment of such a process; `folder` must be empty and stay until it ends."""
    (folder / "torch.py").write_text("raise ImportError('hidden by a test')\n", encoding="utf-8")
    return dict(os.environ, PYTHONPATH=python_path(folder), **environment)


def python_path(folder: Path) -> str:
    """Returns a PYTHONPATH in which the folder comes first."""
    return os.pathsep.join(filter(None, [os.fspath(folder), os.environ.get("PYTHONPATH", "")]))


def python_with_torch(
    option: str, program: str, *arguments: str, cwd: Path | None = None, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python -c PROGRAM` or `python -m MODULE` in a process that has torch, and captures what it writes.

    The process has the variables of the environment from its beginning, but torch was imported before: a test of what
    torch, OpenMP or Python itself makes of a variable needs a Python of its own. One that takes longer than `timeout`
    seconds is stopped, and the error says at which line it was.
    """
    command = [sys.executable, option, program, *arguments]
    variables = dict(os.environ, **environment)
    folder = os.fspath(cwd or Path.cwd())
    with tempfile.TemporaryDirectory() as written:
        outputs = [Path(written, name) for name in ("stdout", "stderr")]
        given = (command[1:], folder, variables, _path_of_a_new_python(variables.get("PYTHONPATH")), outputs)
        process = _forks.Process(target=_become_python, args=given)
        process.start()
        try:
            process.join(timeout)
        finally:
            late = process.exitcode is None
            _stop([process])
        stdout, stderr = (file.read_text(encoding="utf-8") if file.is_file() else "" for file in outputs)
    if late:
        raise TimeoutError(f"{command} had not ended after {timeout} s\n{stdout}{stderr}")
    return subprocess.CompletedProcess(command, process.exitcode, stdout, stderr)


def run_ranks(main: Callable[..., None], arguments: tuple[Any, ...], count: int, timeout: float = 240) -> None:
    """Runs `main(rank, *arguments)` in so many processes at once, which have torch.

    An error of one ends all and is raised here, as one of torch.multiprocessing's; so does taking longer than `timeout`
    seconds, and then each writes at which line it was.
    """
    import torch.multiprocessing

    given = (dict(os.environ), main, arguments)
    ranks = torch.multiprocessing.start_processes(
        _become_rank, given, count, join=False, start_method=_forks.get_start_method()
    )
    end = time.monotonic() + timeout
    while not ranks.join(max(end - time.monotonic(), 0)):  # which raises the error of a rank
        if time.monotonic() > end:
            _stop(ranks.processes)
            raise TimeoutError(f"{count} ranks had not ended after {timeout} s")


def _stop(processes: list[Any]) -> None:
    """Ends processes, each of which first writes where it is."""
    for process in processes:
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGABRT)  # which faulthandler handles
    for process in processes:
        process.join(10)
        process.kill()
        process.join()


def _become_rank(rank: int, environment: dict[str, str], main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Is one of these processes."""
    faulthandler.enable()
    _set_environment(environment)
    main(rank, *arguments)


def _set_environment(environment: dict[str, str]) -> None:
    """Gives a fork the variables of whoever asked for it, rather than those with which the fork server started."""
    os.environ.clear()
    os.environ.update(environment)


@functools.cache
def _path_of_a_new_python(python_path: str | None) -> list[str]:
    """Returns sys.path as a Python that is started with this PYTHONPATH has it, but for its first entry."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if python_path is not None:
        environment["PYTHONPATH"] = python_path
    command = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def _become_python(
    arguments: list[str], folder: str, environment: dict[str, str], path: list[str], outputs: list[Path]
) -> None:
    """Makes of a forked process what Python's own main function makes of a new one, down to how it ends."""
    for descriptor, file in enumerate(outputs, 1):
        with file.open("wb") as opened:
            os.dup2(opened.fileno(), descriptor)
    faulthandler.enable()
    gc.freeze()  # Otherwise the end takes 0.3 s longer, as all that torch made is looked through and so copied.
    assert "libmla" not in sys.modules
    os.chdir(folder)
    _set_environment(environment)
    option, program, *_ = arguments
    sys.argv = [option, *arguments[2:]]
    sys.path[:] = ["" if option == "-c" else folder, *path]
    sys.modules["__main__"] = ModuleType("__main__")
    if option == "-m":
        program = f"import runpy; runpy.run_module({program!r}, run_name='__main__', alter_sys=True)"
    # Both are what Python's main function calls: the first writes what was raised, and ends the process at a SystemExit.
    failed = ctypes.pythonapi.PyRun_SimpleString(program.encode())
    ctypes.pythonapi.Py_Exit(1 if failed else 0)
