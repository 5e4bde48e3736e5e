"""Names a rank that a signal has killed, which it cannot do itself.

Each rank watches the others on its machine: its siblings, since torchrun started them all. Until
torchrun has asked for a dead child's exit status, `/proc` shows it to the siblings, too. Torchrun
asks ten times a second; the watching thread is woken at once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

_EXIT_STATUS_FIELD = -1  # the last one of /proc/PID/stat


class RankWatch:
    """Watches other ranks of this machine in a thread, until the first of them fails.

        with RankWatch(rank, {0: 4241, 1: 4242}, show):
            ...

    `processes` maps the ranks of this machine to their process ids. When a signal kills one, the
    lowest rank left calls `show` with a sentence. Where the system has no pidfds, nothing is
    watched.
    """

    def __init__(
        self, rank: int, processes: Mapping[int, int], show: Callable[[str], object]
    ) -> None:
        self._rank, self._processes, self._show = rank, dict(processes), show
        self._killed = ""
        self._ended: list[int] = []
        self._descriptors: dict[int, int] = {}  # pidfd -> rank
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="headrace-ranks", daemon=True)

    def __enter__(self) -> Self:
        for rank, process in self._processes.items():
            if rank != self._rank and hasattr(os, "pidfd_open"):
                try:
                    self._descriptors[os.pidfd_open(process)] = rank
                except OSError:  # it is gone, or not to be seen from here
                    continue
        if self._descriptors:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        os.write(self._stopped, b".")
        if self._descriptors:
            self._thread.join()
        for descriptor in (*self._descriptors, self._stop, self._stopped):
            os.close(descriptor)

    def killed(self, timeout_s: float) -> str:
        """The sentence about a rank that a signal killed; "" if there is none within this time."""
        if self._descriptors:
            self._thread.join(timeout_s)
        return self._killed

    @property
    def ended(self) -> list[int]:
        """The ranks of this machine that have ended."""
        return sorted(self._ended)

    @property
    def _is_lowest(self) -> bool:
        """Whether this is the lowest rank of this machine that is left."""
        return self._rank == min(self._processes.keys() - set(self._ended))

    def _watch(self) -> None:
        waiting = select.poll()
        for descriptor in (self._stop, *self._descriptors):
            waiting.register(descriptor, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in waiting.poll()]
            if self._stop in ready:
                return
            self._ended += [self._descriptors[descriptor] for descriptor in ready]
            for descriptor in ready:
                waiting.unregister(descriptor)
            statuses = [self._exit_status(self._descriptors[descriptor]) for descriptor in ready]
            if any(statuses):
                # What ends after this one, torchrun ends.
                failed = statuses.index(next(status for status in statuses if status))
                self._name(self._descriptors[ready[failed]], statuses[failed] or 0)
                return

    def _name(self, rank: int, status: int) -> None:
        if not os.WIFSIGNALED(status):
            return  # it has printed its own error
        number = os.WTERMSIG(status)
        name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
        hint = " (as the kernel does when memory runs out)" if name == "SIGKILL" else ""
        self._killed = f"rank {rank} (process {self._processes[rank]}) was killed by {name}{hint}"
        if self._is_lowest:
            self._show(self._killed)

    def _exit_status(self, rank: int) -> int | None:
        """The status of a process that has ended, as `waitpid` gives it; None if it is unknown."""
        try:
            stat = Path(f"/proc/{self._processes[rank]}/stat").read_text()
            # The second field is the program's name, in parentheses; it may contain anything.
            fields = stat.rpartition(")")[2].split()
        except OSError:  # torchrun was faster
            return None
        return int(fields[_EXIT_STATUS_FIELD]) if fields[0] in "ZX" else None


def show_error(text: str) -> None:
    """Print an error of this process on stderr, now."""
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()
