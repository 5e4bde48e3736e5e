"""Children end with their parent, however it ends: over real processes, most of them killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from headrace import child_processes
from headrace.child_processes import Ending, child_environment

# A program whose children print their numbers and then wait for a signal.
BEGIN = """
import multiprocessing, os, signal, sys, threading, time
from headrace import child_processes as children

def stay(*_):
    os.write(1, f"{os.getpid()}\\n".encode())
    while True:
        signal.pause()

def fork(begin=stay):
    child = os.fork()
    if not child:
        begin()
    return child
"""


@contextmanager
def program(code: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def has_ended(pid: int, within_s: float = 10) -> bool:
    """Whether the process is gone or a zombie, now or soon."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return False


ENDING = "children.end_with_parent(parent); stay()"
WAYS = {
    "forked": f"parent = os.getpid()\nfork(lambda: ({ENDING.replace('; ', ', ')}))\nstay()",
    "forked in a thread": (
        "parent = os.getpid()\n"
        "def begin():\n    children.end_with_parent(parent, of_main_thread=False)\n    stay()\n"
        "thread = threading.Thread(target=fork, args=(begin,))\n"
        "thread.start(), thread.join()\nstay()"
    ),
    "a worker": (
        "children.end_workers_with_this()\n"
        "multiprocessing.get_context('fork').Process(target=stay, daemon=True).start()\nstay()"
    ),
    "a worker forked in a thread": (
        "children.end_workers_with_this()\n"
        "worker = multiprocessing.get_context('fork').Process(target=stay, daemon=True)\n"
        "thread = threading.Thread(target=worker.start)\n"
        "thread.start(), thread.join()\nstay()"
    ),
    "the rest of the program": "children.fork_and_wait()\nstay()",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_child_ends_when_its_parent_is_killed(way: str) -> None:
    with program(WAYS[way]) as parent:
        # The program waits as well, but for `fork_and_wait`; it prints its own number.
        numbers = [int(says(parent)) for _ in range(1 if way.startswith("the rest") else 2)]
        (child,) = {*numbers} - {parent.pid}
        assert not has_ended(child, 0.1)
        parent.kill()
        assert has_ended(child)


def test_a_worker_outlives_the_thread_that_forked_it() -> None:
    """Linux ends a child with its parent's thread, not with its process."""
    with program(WAYS["a worker forked in a thread"]) as parent:
        (worker,) = {int(says(parent)), int(says(parent))} - {parent.pid}  # joined the thread
        assert not has_ended(worker, 0.3)


def test_a_child_whose_parent_has_ended_already_ends_at_once() -> None:
    with program("children.end_with_parent(1 << 30); stay()") as orphan:
        assert orphan.wait(10) == -signal.SIGKILL


def test_a_process_that_is_no_worker_is_left_alone() -> None:
    """A script's server, say, which is meant to stay."""
    code = (
        "children.end_workers_with_this()\n"
        "multiprocessing.get_context('fork').Process(target=stay, daemon=False).start()\nstay()"
    )
    with program(code) as parent:
        (child,) = {int(says(parent)), int(says(parent))} - {parent.pid}
        parent.kill()
        parent.wait()
        assert not has_ended(child, 0.2)  # and kills it


class TestForkAndWait:
    @pytest.mark.parametrize(
        ("child", "told"),
        [
            ("sys.exit(3)", "exit code 3, False, 3"),
            ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV, False, 139"),
            ("os.kill(os.getpid(), signal.SIGTERM)", "SIGTERM, True, 143"),
        ],
    )
    def test_the_parent_knows_how_its_child_ended(self, child: str, told: str) -> None:
        code = (
            "ending = children.fork_and_wait()\n"
            f"if ending is None: {child}\n"
            "print(ending, ending.requested, ending.exit_code, sep=', ')"
        )
        with program(code) as process:
            assert says(process) == told

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_to_the_parent_reaches_the_child(self, number: signal.Signals) -> None:
        code = (
            "ending = children.fork_and_wait()\n"
            "if ending is None:\n"
            "    for one in (signal.SIGINT, signal.SIGTERM):\n"
            "        signal.signal(one, lambda number, _: os._exit(number))\n"
            "    stay()\n"
            "print(ending, ending.requested)"
        )
        with program(code) as parent:
            says(parent)
            parent.send_signal(number)
            assert says(parent) == f"exit code {number.value} True"

    def test_an_ignored_signal_is_not_passed_on(self) -> None:
        """As under nohup; SIGTERM still ends it."""
        code = (
            "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "ending = children.fork_and_wait()\n"
            "if ending is None: stay()\n"
            "print(ending, ending.requested)"
        )
        with program(code) as parent:
            child = int(says(parent))
            parent.send_signal(signal.SIGINT)
            os.kill(child, signal.SIGINT)
            parent.send_signal(signal.SIGTERM)
            assert says(parent) == "SIGTERM True"

    def test_the_child_knows_that_it_runs_the_command(self) -> None:
        code = (
            "first = children.command_process\n"
            "if children.fork_and_wait() is None:\n"
            "    print(first, children.command_process == os.getpid(), flush=True)"
        )
        with program(code) as process:
            assert says(process) == "None True"

    def test_what_memory_may_have_caused_is_said(self) -> None:
        assert str(Ending(-signal.SIGKILL, False)) == "SIGKILL, as when memory runs out"
        assert str(Ending(-63, False)) == "signal 63"


def test_kill_children() -> None:
    with program("child = fork(); sys.stdin.readline(); children.kill_children(); stay()") as one:
        child = int(says(one))
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
        assert int(says(one)) == one.pid
        assert has_ended(child, 1)


def test_without_a_call_of_the_kernel_the_child_watches_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on macOS."""
    watched: list[int] = []
    monkeypatch.setattr(child_processes, "_is_killed_with_parent", lambda: False)
    monkeypatch.setattr(child_processes, "_watch", watched.append)
    child_processes.end_with_parent(os.getppid())
    until = time.monotonic() + 5
    while not watched and time.monotonic() < until:
        time.sleep(0.001)
    assert watched == [os.getppid()]
