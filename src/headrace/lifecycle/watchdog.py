"""Reports a training step that hangs: what every thread, stream and child process is doing.

    with Watchdog(device, after_s=600, file=folder / "hang.txt") as watchdog:
        for info in engine.steps(loader):
            watchdog.progress(f"batch {info.batch}")

The report says what the host waits for, which streams have pending work, what the child processes
do, and the stack of each thread. It is repeated after each further `after_s` seconds.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import psutil
import torch

from headrace.child_processes import exit_with_children
from headrace.device import Device, open_device

log = logging.getLogger("headrace")
#: Exit code of a process that ends itself because it hangs: EX_TEMPFAIL, "try again later".
HUNG = 75
_LOOKS_PER_PERIOD = 10


class Watchdog:
    """Reports a hang if there was no progress for `after_s` seconds; 0 disables it.

    It watches from the first call of `progress` to the end of its block, except between a `pause`
    and the next `progress`. With `abort` it ends the process and its children after the report,
    with exit code 75, so that a scheduler can restart the run.
    """

    def __init__(
        self,
        device: Device | str | torch.device,
        after_s: float,
        *,
        file: Path | None = None,
        abort: bool = False,
        clock: Callable[[], float] = time.monotonic,
        stream: TextIO | None = None,
        leave: Callable[[int], object] = exit_with_children,
    ) -> None:
        self._device, self._after_s, self._file = open_device(device), after_s, file
        self._abort, self._clock, self._stream, self._leave = abort, clock, stream, leave
        self._last: float | None = None
        self._what = "nothing yet"
        self._reported = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def progress(self, what: str) -> None:
        """Call this after each step. The report names `what`."""
        self._what, self._last, self._reported = what, self._clock(), 0

    def pause(self) -> None:
        """Expect no progress until the next call of `progress`, during a validation for example."""
        self._last = None

    def __enter__(self) -> Watchdog:
        if self._after_s > 0:
            self._thread = threading.Thread(target=self._watch, name="headrace-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> bool:
        """Report a hang if there is one that was not reported in this period; true if so.

        A period is `after_s` long. The thread calls this.
        """
        last = self._last
        if last is None or self._after_s <= 0:
            return False
        periods = int((self._clock() - last) / self._after_s)
        if periods <= self._reported:
            return False
        self._reported = periods
        text = self.report(self._clock() - last)
        self._write(text)
        with suppress(OSError, ValueError):  # the terminal is gone; the process must end even so
            print(text, file=self._stream or sys.stderr, flush=True)
        if self._abort:
            self._leave(HUNG)
        return True

    def report(self, seconds: float) -> str:
        """What everything is doing, as text."""
        lines = [f"no progress for {seconds:.0f} s; last progress: {self._what}", ""]
        for wait in self._device.ledger.under_way():
            lines.append(
                f"{wait.thread} has been waiting for {wait.reason!r} "
                f"for {wait.elapsed_ms / 1e3:.1f} s"
            )
        lines += [*self._streams(), *_children(), ""]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines.append(f"--- {names.get(ident, 'a non-Python thread')} ({ident})")
                lines += [line.rstrip() for line in traceback.format_stack(frame)]
        return "\n".join(lines)

    def _streams(self) -> list[str]:
        try:
            states = self._device.stream_states()
        except RuntimeError as problem:  # after a CUDA error, every call raises it again
            return [f"{self._device} cannot be queried: {problem}"]
        streams = [
            f"{name} {'idle' if idle else 'has pending work'}" for name, idle in states.items()
        ]
        return [f"{self._device}: {', '.join(streams) or 'has no streams'}"]

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n\n")
        except OSError as problem:  # the report is also on stderr
            log.warning("%s: cannot be written (%s)", self._file, problem.strerror)

    def _watch(self) -> None:
        while not self._ended.wait(self._after_s / _LOOKS_PER_PERIOD):
            self.look()


def _children() -> list[str]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            found.append(
                f"process {child.pid} ({child.name()}): {child.status()}, "
                f"{child.cpu_times().user:.1f} s of CPU time"
            )
        except psutil.Error:
            continue  # it has ended
    return found
