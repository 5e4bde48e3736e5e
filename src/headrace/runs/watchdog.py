"""A hung step: noticed by a thread of its own, which says where everything stands.

    with Watchdog(device, after_s=600, file=folder / "hang.txt") as watchdog:
        for info in engine.steps(loader):
            watchdog.progress(f"batch {info.batch}")

It writes what the host waits for (the ledger knows), which streams have work left, what the child
processes do, and the stack of every thread; once, and again after each further `after_s`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import psutil
import torch

from headrace.device import Device, open_device
from headrace.parallel import kill_children

log = logging.getLogger("headrace")
#: The exit code of a process that ends itself because it hangs: "try again", as sendmail has it.
HUNG = 75
_LOOKS_A_SPELL = 10


class Watchdog:
    """Looks ten times in `after_s` seconds whether there was progress; 0 never looks.

    `abort` ends the process with code 75, and its children with it, after the report is written:
    for a scheduler that then starts it anew. It is only on watch between the first `progress` and
    the end of its block, and not after a `pause`.
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
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._device, self._after_s, self._file = open_device(device), after_s, file
        self._abort, self._clock, self._stream, self._leave = abort, clock, stream, leave
        self._last: float | None = None
        self._what = "nothing yet"
        self._said = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def progress(self, what: str) -> None:
        """Something was done: `what`, for the report."""
        self._what, self._last, self._said = what, self._clock(), 0

    def pause(self) -> None:
        """Until the next `progress` none is expected: a validation begins, say."""
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
        """Whether there has been no progress for too long; then that is said, once for each
        further spell."""
        last = self._last
        if last is None or self._after_s <= 0:
            return False
        spells = int((self._clock() - last) / self._after_s)
        if spells <= self._said:
            return False
        self._said = spells
        text = self.report(self._clock() - last)
        print(text, file=self._stream or sys.stderr, flush=True)
        self._write(text)
        if self._abort:
            kill_children()
            self._leave(HUNG)
        return True

    def report(self, seconds: float) -> str:
        """Where everything stands, as text."""
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
        except RuntimeError as problem:  # after an error of CUDA's every call raises it again
            return [f"{self._device} cannot be queried: {problem}"]
        said = [f"{name} {'idle' if idle else 'has pending work'}" for name, idle in states.items()]
        return [f"{self._device}: {', '.join(said) or 'has no streams'}"]

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n\n")
        except OSError as problem:  # it is on stderr, too
            log.warning("%s: cannot be written (%s)", self._file, problem.strerror)

    def _watch(self) -> None:
        while not self._ended.wait(self._after_s / _LOOKS_A_SPELL):
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
            continue  # it has ended meanwhile
    return found
