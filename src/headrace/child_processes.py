"""The processes that Headrace starts: each ends when its parent does, however that ends.

Whoever starts one does it in one of these ways:

    end_with_parent(parent)      in the child, first of all
    end_workers_with_this()      once per program, for the loader workers that it will fork
    fork_and_wait()              runs the rest of the program in a child

This file imports little: a child's program may import it, too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
#: Signals by which somebody asks a process to end.
_REQUESTS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)

#: In the child of `fork_and_wait`: this process, which now runs the command.
command_process: int | None = None
_main_thread = threading.local()


def end_with_parent(parent: int, *, of_main_thread: bool = True) -> None:
    """Kill this process as soon as process `parent`, which has started it, has ended.

    On Linux the kernel does it. There the "parent" is a thread: the child of a thread other than
    the main one (`of_main_thread` false) would end with that thread. It watches its parent itself,
    as it does where there is no such call.
    """
    if not (of_main_thread and _is_killed_with_parent()):
        threading.Thread(target=_watch, args=(parent,), name="headrace-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before that call
        _kill_this()


def end_workers_with_this() -> None:
    """From now on the loader workers that this process forks end with it.

    These are `multiprocessing`'s daemons. Other processes may have been meant to stay. Workers that
    are not forked (`spawn`, `forkserver`) end by PyTorch's own watchdog, within some seconds.
    """
    from multiprocessing import util

    if getattr(_main_thread, "is_this", False):
        return
    # After a fork, the only thread is the one that forked, with its own values.
    _main_thread.is_this = threading.current_thread() is threading.main_thread()
    util.register_after_fork(end_workers_with_this, _end_worker_with_parent)


def _end_worker_with_parent(_: object) -> None:
    from multiprocessing import current_process, parent_process

    parent = parent_process()
    if parent is not None and parent.pid is not None and current_process().daemon:
        end_with_parent(parent.pid, of_main_thread=getattr(_main_thread, "is_this", False))


@dataclass(frozen=True, slots=True)
class Ending:
    """How a child ended. `requested`: somebody asked it to, or the parent."""

    status: int
    requested: bool

    @property
    def exit_code(self) -> int:
        """The exit code with which a shell would show it."""
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        if self.status >= 0:
            return f"exit code {self.status}"
        known = {one.value: one.name for one in signal.Signals}
        name = known.get(-self.status, f"signal {-self.status}")
        return f"{name}, as when memory runs out" if name == "SIGKILL" else name


def fork_and_wait() -> Ending | None:
    """Fork. Returns None in the child, which goes on with the program, and in the parent, when the
    child has ended, how it did.

    The parent passes Ctrl-C and SIGTERM on, unless it ignores them (`nohup`). Call this from the
    main thread, before there are others.
    """
    global command_process
    parent = os.getpid()
    passed_on = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) not in (None, signal.SIG_IGN)
    ]
    received: list[int] = []
    before_mask = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    child = os.fork()
    if not child:
        command_process = os.getpid()
        end_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before_mask)
        return None

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in passed_on}
    signal.pthread_sigmask(signal.SIG_SETMASK, before_mask)
    try:
        # Not reaped yet, its number is nobody else's: `pass_on` cannot meet a stranger.
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ending(status, bool(received) or -status in _REQUESTS)


def child_environment() -> dict[str, str]:
    """The environment of a child that is another Python and imports what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def kill_children() -> None:
    """Kill this process's children, so that none outlive it when it exits at once."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=5)


def exit_with_children(status: int) -> NoReturn:
    """End this process and its children at once. Nothing is flushed: a thread that hangs may hold
    the lock of a stream."""
    kill_children()
    os._exit(status)


def _is_killed_with_parent() -> bool:
    """Whether the kernel will kill this process when the thread that started it ends."""
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0)
    except (AttributeError, OSError, TypeError):  # not Linux
        return False


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    _kill_this()


def _kill_this() -> None:
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
