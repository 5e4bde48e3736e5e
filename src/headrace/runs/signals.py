"""Being asked to stop: Ctrl-C and SIGTERM become a flag that a loop reads between two batches."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """Inside the block SIGINT and SIGTERM ask to stop instead of stopping.

        with StopRequests() as stop:
            for info in engine.steps(loader):
                if stop.requested:
                    break

    `requested` is the first signal's name, or None. A second Ctrl-C raises KeyboardInterrupt at
    once. After a SIGTERM there are `grace_s` seconds (0: any number): then `overdue` is called, in
    a thread of its own, which is to end the process. A signal that the process was told to ignore
    (`nohup`, `&` in a script) stays ignored. Python gives signals to the main thread only: in any
    other the block does nothing. With `patient` a second Ctrl-C asks no more than the first:
    torchrun sends each rank one of its own, and ends those that do not end.
    """

    def __init__(
        self,
        grace_s: float = 0,
        overdue: Callable[[], object] | None = None,
        timer: Callable[[float, Callable[[], object]], threading.Timer] = threading.Timer,
        *,
        patient: bool = False,
    ) -> None:
        self._grace_s, self._overdue, self._make_timer = grace_s, overdue, timer
        self._timer: threading.Timer | None = None
        self._patient = patient
        self.requested: str | None = None
        self._interrupts = 0
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    @property
    def number(self) -> int:
        """The first signal's number, 0 for none."""
        return 0 if self.requested is None else int(signal.Signals[self.requested])

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._pid = os.getpid()
            for number in _SIGNALS:
                before = signal.getsignal(number)
                # None: a handler that is not Python's, which could not be put back.
                if before not in (None, signal.SIG_IGN):
                    self._before[number] = before
                    signal.signal(number, self._asked)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _asked(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGTERM" and os.getpid() != self._pid:
            # A forked worker has inherited this handler; whoever terminates it means it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if name == "SIGTERM" and self._timer is None and self._grace_s > 0 and self._overdue:
            self._timer = self._make_timer(self._grace_s, self._overdue)
            self._timer.daemon = True
            self._timer.start()
        self._interrupts += name == "SIGINT"
        self.requested = self.requested or name
        if name == "SIGINT" and self._interrupts > 1 and not self._patient:
            raise KeyboardInterrupt


def outlive_sigterm(worker: int = 0) -> None:
    """For a loader's worker: a SIGTERM that is meant for the whole run (systemd and Slurm send it
    to each of its processes) is the training process' to answer, which still needs batches until
    it has stopped. The worker ends when its parent says so: by the loader's own message, or by a
    SIGTERM of the parent's."""
    if not hasattr(signal, "sigwaitinfo"):
        return
    parent = os.getppid()
    # In this thread and those that it starts; one of them waits for it instead.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def listen() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            continue
        os._exit(0)

    threading.Thread(target=listen, name="headrace-sigterm", daemon=True).start()
