"""Processes that start with PyTorch loaded.

A new Python takes seconds to load PyTorch. These processes fork from a server that has loaded it
and has done nothing with it: they have no threads, no CUDA context and no patches of the tests.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import psutil
import torch.multiprocessing

from headrace.child_processes import end_with_parent

# An optimizer loads torch._dynamo.
PRELOADED = [
    "headrace.bench.runner",
    "headrace.cli",
    "headrace.report",
    "headrace.translation.trainer",
    "torch._dynamo",
    "torch.distributed.fsdp",
]
HEADRACE = "from headrace.__main__ import main; main()"


def forkserver() -> ForkServerContext:
    context: Any = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # whoever is first starts the server
    found: ForkServerContext = context
    return found


def child_processes() -> list[psutil.Process]:
    """The children of this process and theirs, except the servers of Python's multiprocessing: they
    live as long as this process."""
    servers = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            if child.ppid() != os.getpid() or not any(server in line for server in servers):
                found.append(child)
    return found


class Forked:
    """`python -c code arguments`, like a `subprocess.Popen` whose output is in files."""

    def __init__(self, code: str, *arguments: object, stderr: Path | None = None) -> None:
        self._output = tempfile.TemporaryDirectory(prefix="forked-")
        self.stdout = Path(self._output.name, "stdout")
        self.stderr = stderr or Path(self._output.name, "stderr")
        words = list(map(str, arguments))
        place = (str(Path.cwd()), dict(os.environ), str(self.stdout), str(self.stderr))
        self._process = forkserver().Process(target=_run, args=(code, words, *place))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("python -c …", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def run_python(code: str, *arguments: object, timeout: float = 100) -> Any:
    """Like `subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)`."""
    process = Forked(code, *arguments)
    try:
        status = process.wait(timeout)
    finally:
        process.kill()
    out, err = (path.read_text(encoding="utf-8") for path in (process.stdout, process.stderr))
    return subprocess.CompletedProcess(list(arguments), status, out, err)


def _run(
    code: str, words: list[str], folder: str, environment: dict[str, str], out: str, err: str
) -> None:
    end_with_parent(os.getppid())  # the server, which ends with the tests
    multiprocessing.set_start_method(None, force=True)  # else its children would be forked like it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for path, number in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.argv = ["-c", *words]
    sys.path[0] = ""  # as `python -c` has it
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()
