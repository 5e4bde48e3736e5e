"""Turns Ctrl-C and SIGTERM into a flag that the training loop reads between two batches."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """Inside the block, SIGINT and SIGTERM set `requested` instead of ending the process.

        with StopRequests() as stop:
            for info in engine.steps(loader):
                if stop.requested:
                    break

    `requested` is the name of the first signal, or None. A second Ctrl-C raises
    KeyboardInterrupt at once, unless `ignore_repeats`: torchrun sends each rank a SIGINT of its
    own, and kills ranks that do not end.

    `grace_s` seconds after a SIGTERM (0 is no limit) a thread calls `on_overdue`, which should end
    the process. Signals that the process ignores already (`nohup`, `&` in a script) stay ignored.
    Python delivers signals to the main thread only: in other threads the block does nothing.
    """

    def __init__(
        self,
        grace_s: float = 0,
        on_overdue: Callable[[], object] | None = None,
        timer: Callable[[float, Callable[[], object]], threading.Timer] = threading.Timer,
        *,
        ignore_repeats: bool = False,
    ) -> None:
        self._grace_s, self._on_overdue, self._new_timer = grace_s, on_overdue, timer
        self._timer: threading.Timer | None = None
        self._ignore_repeats = ignore_repeats
        self.requested: str | None = None
        self._interrupts = 0
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    @property
    def number(self) -> int:
        """The number of the first signal, or 0."""
        return 0 if self.requested is None else int(signal.Signals[self.requested])

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._pid = os.getpid()
            for number in _SIGNALS:
                before = signal.getsignal(number)
                # None is a handler that was not set by Python, and that we could not restore.
                if before not in (None, signal.SIG_IGN):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGTERM" and os.getpid() != self._pid:
            # A forked worker has inherited this handler, but a SIGTERM should end it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if name == "SIGTERM" and self._timer is None and self._grace_s > 0 and self._on_overdue:
            self._timer = self._new_timer(self._grace_s, self._on_overdue)
            self._timer.daemon = True
            self._timer.start()
        self._interrupts += name == "SIGINT"
        self.requested = self.requested or name
        if name == "SIGINT" and self._interrupts > 1 and not self._ignore_repeats:
            raise KeyboardInterrupt


def ignore_foreign_sigterm(worker: int = 0) -> None:
    """Make a loader's worker ignore a SIGTERM, unless its parent sent it.

    systemd and Slurm send SIGTERM to every process of a run. The training process then still
    needs batches until it has stopped. It ends its workers itself, with the loader's message or
    with a SIGTERM.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    parent = os.getppid()
    # Block it in this thread and in those that it starts. One of them receives it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def listen() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            continue
        os._exit(0)

    threading.Thread(target=listen, name="headrace-sigterm", daemon=True).start()
